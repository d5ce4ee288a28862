"""Do all workers train the same model on the same batches: asked before a weight changes.

Every worker runs the whole program on the whole batch, so a worker whose data or model is another
one would not fail; it would train something that nobody asked for.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.cluster.agreement import differences, name_workers
from tfparallel.data import share
from tfparallel.seams.optimizers import rate_of

# The first batches of a `fit`, `evaluate` or `predict` are compared; another order shows there.
_NUM_STEPS = 2
_KINDS = ("fit", "evaluate", "predict")
_OTHER_BATCH = "The workers were given different batches"

# Of the sum of a weight's sizes. Processors of two kinds may round an update otherwise; weights
# that were loaded on one worker alone are further apart.
_MOST_APART = 1e-4
_PATTERN = 1.0 + np.arange(101) / 101  # By which a weight with two values exchanged is another.
_ELEMENTS_AT_ONCE = 101 * 2**14


def check_fit(workers, model: keras.Model, asked: dict[str, Any]) -> None:
    """Raises unless all workers call `fit` with the same model and the same arguments.

    Args:
        workers: The strategy's `ProcessGroup`.
        model: The model that is to be trained.
        asked: The arguments of `fit` by name.

    Raises:
        RuntimeError: On every worker, with what differs and on which of them.
    """
    numbers = ("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_steps")
    facts = {
        "fit": {name: asked[name] for name in numbers if name in asked},
        "data": [str(_shape(leaf)) for leaf in keras.tree.flatten(asked.get("x"))],
        "order": getattr(share.readings_of(asked.get("x")), "facts", dict)(),
        "weights": [f"{v.name} {tuple(v.shape)} {v.dtype}" for v in model.variables],
        "optimizer": _configuration(model.optimizer),
        "layout": model.layout.title,
        "sync": str(getattr(model, "_sync", "every_step")),
    }
    found = differences(dict(enumerate(workers.exchange(facts))))
    if found:
        raise RuntimeError(
            "The workers disagree on what to train; the same model, data and arguments of `fit` "
            "are required on all of them. Received: " + "; ".join(found) + ". Start all workers "
            "with the same program and the same data."
        )


def check_values(workers, model: keras.Model, when: str) -> None:
    """Raises unless all workers hold the same weights and states, and count the same steps.

    Args:
        workers: The strategy's `ProcessGroup`.
        model: The model.
        when: In words, behind "the workers hold different weights".

    Raises:
        RuntimeError: On every worker, with which variables differ, and where.
    """
    variables = {v.path: v for v in model.variables if v.dtype != "string"}
    for metric in model.metrics_variables:  # Of which each worker may have its own rows'.
        variables.pop(metric.path, None)
    if model.optimizer is not None:
        variables["optimizer/iterations"] = model.optimizer.iterations
    everyones = workers.exchange({path: _fingerprint(v) for path, v in variables.items()})
    apart = {}
    for path, first in everyones[0].items():
        others = [index for index, own in enumerate(everyones) if _differ(first, own[path])]
        if others:
            apart[path] = others
    if not apart:
        return
    path, others = next(iter(apart.items()))
    more = f", and {len(apart) - 1} more variables" if len(apart) > 1 else ""
    raise RuntimeError(
        f"The workers hold different weights {when}. The same are required on all of them. "
        f"Received: '{path}' on {name_workers(others)} is another one than on worker 0{more}. Load "
        "weights on every worker, from a folder that all see; seed what is drawn "
        "(`keras.utils.set_random_seed`); call the model in training mode on all workers or on "
        "none; and give all the same callbacks."
    )


def _fingerprint(variable) -> list[float] | int:
    """A number that is another one where the values are others; two of floats, for `_differ`."""
    values = np.asarray(keras.ops.convert_to_numpy(variable)).reshape(-1)
    if not tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).is_floating:
        return zlib.crc32(np.ascontiguousarray(values))
    size = projection = 0.0
    for start in range(0, len(values), _ELEMENTS_AT_ONCE):
        some = values[start : start + _ELEMENTS_AT_ONCE].astype("float64")
        rows = np.resize(_PATTERN, len(some))
        size += float(np.abs(some).sum())
        projection += float(some @ rows)
    return [projection, size]


def _differ(one, other) -> bool:
    if isinstance(one, int):
        return one != other
    if not np.isfinite([*one, *other]).all():
        return not np.array_equal(np.isfinite(one), np.isfinite(other))
    return abs(one[0] - other[0]) > _MOST_APART * max(one[1], other[1])


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """Raises what `BatchFingerprints` found as a `RuntimeError` that says what to do."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if _OTHER_BATCH not in str(error):
            raise
        raise RuntimeError(
            f"{_OTHER_BATCH} in one of the first {_NUM_STEPS} steps; each worker needs the whole "
            "global batch, in the same order. Received: batches whose fingerprints differ. Seed "
            "what shuffles (`keras.utils.set_random_seed`, `shuffle(…, seed=7)`), leave out "
            "`deterministic=False`, and do not shard the data by hand. A data set of "
            "`tfparallel.data.by_sample` must be given as it is: map it before, not afterwards."
        ) from None


class BatchFingerprints:
    """Compares the workers' batches in the first steps of a method.

    Args:
        workers: The strategy's `ProcessGroup`.
    """

    def __init__(self, workers):
        self._workers = workers
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._num_checked = {kind: tf.Variable(0, trainable=False) for kind in _KINDS}

    def restart(self, *kinds: str) -> None:
        """Compares the next batches of these methods again."""
        for kind in kinds:
            self._num_checked[kind].assign(0)

    def check(self, data, kind: str) -> None:
        """In a step of a method: stops it, on all workers, if their batches differ."""
        num_checked = self._num_checked[kind]
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]

        def compare():
            rows = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
            own = tf.cast(tf.concat(rows, 0), tf.int32)
            num_workers = self._workers.num_workers
            (everyones,) = self._workers.all_gather([own], [len(leaves)] * num_workers)
            same = tf.reduce_all(everyones == tf.tile(own, [num_workers, 1]))
            num_checked.assign_add(1)
            with tf.control_dependencies([tf.debugging.Assert(same, [_OTHER_BATCH])]):
                return tf.constant(True)

        tf.cond(num_checked < _NUM_STEPS, compare, lambda: tf.constant(True))


def _shape(leaf):
    if isinstance(leaf, tf.data.Dataset):
        return int(leaf.cardinality()), leaf.element_spec
    return getattr(leaf, "shape", type(leaf).__name__)


def _configuration(optimizer):
    if optimizer is None:
        return None
    try:
        config = dict(optimizer.get_config())
    except NotImplementedError:  # As a learning rate schedule of the user's own may.
        rate = rate_of(optimizer)
        kinds = (int, float, str, type(None))
        config = {name: own for name, own in vars(optimizer).items() if isinstance(own, kinds)}
        config |= {"optimizer": type(optimizer).__name__, "learning_rate": type(rate).__name__}
    config.pop("name")  # Keras counts its objects: one more on the chief, and "sgd" is "sgd_1".
    return {name: str(value) for name, value in sorted(config.items())}
