"""Finds the participants of a collective from its call site, and validates what they pass to it.

`ops.py` has the table of call sites.
"""

import hashlib
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.differences import name_workers, who_said
from tfparallel.collectives.in_replica import Replicas
from tfparallel.collectives.packing import SENT_AS
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS
from tfparallel.seams.keras import COMPILE_MODULE, LAYER_MODULE, TRAINER_MODULE
from tfparallel.seams.tensorflow import leaves_with_paths

# A layer call, and the trainer's symbolic build of losses and metrics.
_KERAS = {
    (LAYER_MODULE, "__call__"),
    (COMPILE_MODULE, "_symbolic_build"),
}
_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
DTYPES = {*_FLOATS, tf.int32, tf.int64, *SENT_AS}


class Group:
    """Some of the workers of the job, from `tfparallel.new_group`.

    Attributes:
        ranks: The indices of its workers, in ascending order.
        rank: The position of this worker among them; None if it is not one of them.
        size: Their number.
    """

    def __init__(self, ranks: Sequence[int], rank: int | None, workers: ProcessGroup | None):
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.workers = workers  # None outside the group, and in a group of one.

    def __repr__(self) -> str:
        return f"Group(ranks={self.ranks})"


class SingleRank:
    """A single rank: the collective has no other participant."""

    rank = 0
    num_ranks = 1

    def __init__(self, members: Sequence[int] = (0,)):
        self.members = members


class Workers:
    """The workers of the job, or some, as `tfparallel.collectives.differentiable.Ranks`.

    `members` are their indices in the job, in the order of their ranks.
    """

    def __init__(self, workers: ProcessGroup, members: Sequence[int] | None = None):
        self.group = workers.for_users
        self.rank = workers.worker_index
        self.num_ranks = workers.num_workers
        self.members = range(self.num_ranks) if members is None else members

    def all_reduce(self, tensors, op):
        return self.group.all_reduce(tensors, op)

    def all_gather(self, tensor):
        num_rows = tf.reshape(tf.shape(tensor)[0], [1])
        counts = self.group.all_gather([num_rows], [1] * self.num_ranks)[0]
        (joined,) = self.group.all_gather([tensor], tf.unstack(counts, num=self.num_ranks), ROWS)
        return joined, counts

    def all_to_all(self, tensor):
        return self.group.all_to_all(tensor)

    def scatter(self, tensor, root):
        return self.group.scatter(tensor, root)

    def own_rows(self, tensor):
        return tensor

    def compare_notes(self, note: str) -> None:
        """Raises unless every worker is about to make the same call."""
        digest = int.from_bytes(hashlib.blake2b(note.encode(), digest_size=7).digest())
        # One "max" of two integers yields both the maximum and the minimum.
        extremes = tf.constant([digest, -digest], tf.int64)
        try:
            largest, minus_smallest = self.group.all_reduce([extremes], "max")[0].numpy()
        except tf.errors.DeadlineExceededError as error:
            raise RuntimeError(
                f"Not all of {name_workers(self.members)} made this call within "
                f"{self.group.timeout_seconds:g} s; all are required, and no collective can run in "
                f"this process any more. Received: {note}. Look for a call that only some make, or "
                "allow more time: `timeout_seconds` of `new_group`, or of the strategy's "
                "communication options."
            ) from error
        if largest == -minus_smallest:
            return
        notes = self.group.exchange(note, "a collective of the program's own")
        received = who_said(notes, self.members)
        raise ValueError(
            "The workers made different calls, so each would wait for the others. All of them must "
            "call the same collective, with values of the same structure, shapes and dtypes. "
            f"Received: {received}. Look for a call under a condition that differs between "
            "workers; to join tensors with different numbers of rows, use `tfparallel.all_gather`."
        )


def find(group: Group | None = None) -> Replicas | Workers | SingleRank:
    """Returns the participants of a collective called at this point of the program.

    Raises:
        RuntimeError: In a multi-worker job, before a strategy has connected the workers; or if a
            group is passed where replicas take part, or Keras calls.
        ValueError: If this worker is not in the group.
    """
    everyone = _everyone()
    if group is None:
        return everyone
    if not isinstance(group, Group):
        raise ValueError(
            "`group` must be what `tfparallel.new_group` returned. Received: "
            f"group={group!r}. Omit it for all workers, or call `tfparallel.new_group([0, 1])`."
        )
    if isinstance(everyone, Replicas) or (isinstance(everyone, SingleRank) and group.workers):
        raise RuntimeError(
            "A group is one of workers, so its collectives must be called outside replicas, and "
            f"not by Keras. Received: group={group} in a replica, or in a layer, loss or step. "
            "Move the call into the program or a callback, or omit the group."
        )
    if group.rank is None:
        raise ValueError(
            "Only the workers of a group may call its collectives. Received: a call from worker "
            f"{everyone.rank} with group={group}. Call it under `if group.rank is not None:`."
        )
    return SingleRank(group.ranks) if group.workers is None else Workers(group.workers, group.ranks)


def _everyone():
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
        if not tf.distribute.in_cross_replica_context():
            return Replicas()
        joins_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if getattr(strategy, "program_is_running", False) or not joins_workers:
            return SingleRank()
    if _is_called_by_keras():
        return SingleRank()
    if ProcessGroup.of_process is not None:
        return Workers(ProcessGroup.of_process)
    cluster = Cluster.from_env()
    if cluster.num_workers > 1 and not cluster.is_evaluator:
        raise RuntimeError(
            f"This process is worker {cluster.worker_index} of {cluster.num_workers} "
            f"({cluster.source}), but the workers are not connected. A strategy must connect them "
            "before the first collective. Received: a call before any strategy. Put `strategy = "
            "tfparallel.MultiWorkerMirroredStrategy()` at the top of the program."
        )
    return SingleRank()


def agreed(
    name: str, value: Any, group: Group | None = None, **options
) -> tuple[Any, list[tf.Tensor]]:
    """Validates a collective call; raises on all participating workers or on none.

    Returns:
        The participating ranks, and the value's tensors in the order of `tf.nest.flatten`.
    """
    ranks = find(group)
    problems, tensors, notes = _option_problems(ranks, **options), [], []
    joins = name in ("all_gather", "gather")
    for path, leaf in leaves_with_paths(value):
        try:
            tensor = tensor_of(leaf, min_ndim=int(joins))
            problem = _problem(tensor, ranks, name, **options)
            note = f"{tensor.dtype.name} {_shape(tensor, joins)}"
            tensors.append(tensor)
        except (TypeError, ValueError, OverflowError):
            received = f"{type(leaf).__name__} {str(leaf)[:40]}"
            problem = f"Dense tensors of at most 64 bits are required. Received: {received}."
            note = type(leaf).__name__
        where = f"{path}: " if path else ""
        notes.append(where + note)
        problems += [where + problem] if problem else []
    if isinstance(ranks, Workers) and tf.executing_eagerly():
        # Even a worker with an invalid value must take part here, or the others would hang.
        arguments = ", ".join(f"{key}={option!r}" for key, option in options.items())
        ranks.compare_notes(f"{name}({arguments}) of {', '.join(notes) or 'nothing'}")
    if problems:
        raise ValueError(f"`tfparallel.{name}` cannot send this. {' '.join(problems)}")
    return ranks, tensors


def is_index(value: Any) -> bool:
    """Whether a value is an integer, of Python or of NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _option_problems(ranks, op="sum", root=None) -> list[str]:
    problems = []
    root = ranks.members[0] if root is None else root
    if op not in ("sum", "mean", "max", "min"):
        problems.append(f"`op` must be 'sum', 'mean', 'max' or 'min'. Received: op={op!r}.")
    if not is_index(root) or root not in ranks.members:
        last = ranks.num_ranks - 1
        is_all = ranks.members[0] == 0 and ranks.members[-1] == last
        which = f"an integer from 0 to {last}" if is_all else f"one of {list(ranks.members)}"
        problems.append(
            f"`root` must be {which}: the index of a participant. Received: root={root!r}."
        )
    return problems


def _problem(tensor, ranks, name, op="sum", root=None) -> str:
    """Returns the problem with a tensor; "" if there is none."""
    dtype = tensor.dtype
    if dtype not in DTYPES:
        return f"A numeric or boolean tensor is required. Received: a tensor of type {dtype.name}."
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        if dtype.is_bool and op in ("sum", "mean"):
            return (
                "Boolean tensors support only 'max' (is any true?) and 'min' (are all?). Received: "
                f"op={op!r}. Cast them to int32 to count."
            )
        if dtype == tf.uint64 and op in ("max", "min"):
            return f"uint64 does not support {op!r}. Received: op={op!r}. Cast it to int64."
    if name in ("reduce_scatter", "scatter", "all_to_all"):
        if tensor.shape.rank == 0:
            return "At least one axis is required, which is split. Received: a scalar."
        instead = ", or use `tfparallel.all_reduce`" if name == "reduce_scatter" else ""
        if tensor.shape.rank is not None and (tensor.shape[0] or 0) % ranks.num_ranks:
            return (
                f"The number of rows must be a multiple of {ranks.num_ranks}, one equal share for "
                f"each participant. Received: shape {tuple(tensor.shape)}. Pad axis 0{instead}."
            )
    return ""


def tensor_of(leaf: Any, min_ndim: int = 0) -> tf.Tensor:
    """Converts a leaf of a value to a tensor; a Python number keeps its 64 bits."""
    if isinstance(leaf, bool | int | float):
        leaf = np.asarray(leaf)
    tensor = tf.convert_to_tensor(leaf)
    return tensor[None] if min_ndim and tensor.shape.rank == 0 else tensor


def _shape(tensor, joins: bool) -> str:
    lengths = ["?" if length is None else str(length) for length in tensor.shape]
    if joins:
        lengths[0] = "rows"
    return f"({', '.join(lengths)}{',' * (len(lengths) == 1)})"


def workers_of(model: keras.Model) -> ProcessGroup | None:
    """Returns the workers that train a model together; None if one process does.

    A mesh of workers has its strategy in `model.strategy`, not in `model.distribute_strategy`: the
    strategy does not run Keras's steps.
    """
    for strategy in (getattr(model, "strategy", None), model.distribute_strategy):
        workers = getattr(strategy, "workers", None)
        if isinstance(workers, ProcessGroup):
            return workers
    return None


def _is_called_by_keras() -> bool:
    """Whether the caller is a layer or a step of Keras's trainer; False in a callback.

    A collective in a user's loss runs on all workers when the user calls the loss, and on none when
    Keras does, for instance to infer shapes. Only the stack can tell the two apart. This relies on
    the names of Keras's modules; `tests/workers/test_collectives.py` fails if they change.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_name) in _KERAS:
            return True
        if module == TRAINER_MODULE:
            # `fit` itself calls the callbacks; each batch runs in a function nested in it.
            return frame.f_code.co_name not in ("fit", "evaluate", "predict")
        frame = frame.f_back
    return False
