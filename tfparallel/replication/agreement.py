"""Checks that all workers train the same model on the same batches, to the same weights.

Every worker runs the whole program on the whole batch, so a worker with different data or a
different model would not fail. It would silently train something else.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.cluster.differences import differences, name_workers
from tfparallel.data import rows_of_worker
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.keras import layers_in
from tfparallel.seams.optimizers import rate_of
from tfparallel.variables.sharded import ShardedVariable

# The first batches of a `fit`, `evaluate` or `predict` are compared; they reveal another order.
_NUM_STEPS = 2
_PLAIN = (int, float, str, bool, type(None))
_LOOKUPS = (keras.layers.IntegerLookup, keras.layers.StringLookup)
_KINDS = ("fit", "evaluate", "predict")
_OTHER_BATCH = "The workers were given different batches"

# Relative to the sum of a block's absolute values. Different processors may round an update
# differently; weights that only one worker loaded are further apart.
_MOST_APART = 1e-4
_PATTERN = 1.0 + np.arange(101) / 101  # Unequal factors, so the order of values matters.
_BLOCKS = 2**14  # For all weights whose checksums differ, which bounds the message.
_LEAST_BLOCK = 256  # Elements: rounded values near zero are judged together with others.


def check_fit(workers, model: keras.Model, arguments: dict[str, Any]) -> None:
    """Raises unless all workers call `fit` with the same model and the same arguments.

    Args:
        workers: The strategy's `ProcessGroup`.
        model: The model to train.
        arguments: The arguments of `fit` by name.

    Raises:
        RuntimeError: On every worker, with what differs and on which workers.
    """
    numbers = ("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_steps")
    facts = {
        "fit": {name: arguments[name] for name in numbers if name in arguments},
        "data": [str(_shape(leaf)) for leaf in keras.tree.flatten(arguments.get("x"))],
        "order": getattr(rows_of_worker.readings_of(arguments.get("x")), "facts", dict)(),
        "weights": [f"{v.name} {tuple(v.shape)} {v.dtype}" for v in model.variables],
        "optimizer": _configuration(model.optimizer),
        "layout": model.layout.title,
        "sync": str(getattr(model, "_sync", "every_step")),
        "class_weight": {
            str(label): f"{float(weight):.6g}"
            for label, weight in sorted((arguments.get("class_weight") or {}).items())
        },
        "loss": _identities(model, "loss"),
        "loss_weights": _identities(model, "loss_weights"),
        "vocabulary": _vocabularies(model),
    }
    problems = differences(dict(enumerate(workers.exchange(facts, "the start of `fit`"))))
    if problems:
        raise RuntimeError(
            "The workers disagree on what to train; all workers must use the same model, data and "
            "arguments of `fit`. Received: " + "; ".join(problems) + ". Start all workers "
            "with the same program and the same data."
        )


def check_values(workers, model: keras.Model, when: str, *, states: bool = True) -> None:
    """Raises unless all workers hold the same weights.

    Args:
        workers: The strategy's `ProcessGroup`.
        model: The model.
        when: A phrase that completes "The workers hold different weights".
        states: Whether to compare seeds and counts as well.

    Raises:
        RuntimeError: On every worker, with the variables that differ, and where.
    """
    # By order, not by name: Keras numbers its objects, and one worker may have created more.
    variables = [v for v in model.variables if v.dtype != "string"]
    if states and model.optimizer is not None:
        variables.append(model.optimizer.iterations)
    if not states:
        variables = [v for v in variables if _is_floating(v)]
    # A subclassed model may be built on some workers only.
    shapes = [[list(v.shape), str(v.dtype)] for v in variables]
    facts = [shapes, list(map(_checksum, variables))]
    facts_by_worker = workers.exchange(facts, f"the comparison of weights {when}")
    if any(theirs != facts_by_worker[0][0] for theirs, _ in facts_by_worker):
        counts = ", ".join(str(len(theirs)) for theirs, _ in facts_by_worker)
        raise RuntimeError(
            f"The workers hold different weights {when}. They must be identical on all workers. "
            f"Received: models of {counts} variables, in worker order, with different shapes. "
            "Build and load the model on every worker."
        )
    checksums = zip(*[sums for _, sums in facts_by_worker], strict=True)
    suspects = [v for v, sums in zip(variables, checksums, strict=True) if len(set(sums)) > 1]
    if not suspects:
        return
    max_blocks = max(1, _BLOCKS // len(suspects))
    blocks = [_blocks(variable, max_blocks) for variable in suspects]
    values = workers.exchange(blocks, f"the comparison of blocks of weights {when}")
    differing = {}
    for place, variable in enumerate(suspects):
        others = [i for i, theirs in enumerate(values) if _differ(values[0][place], theirs[place])]
        if others:
            differing[variable.path] = others
    if not differing:
        return
    path, others = next(iter(differing.items()))
    more = f", as do {len(differing) - 1} more variables" if len(differing) > 1 else ""
    raise RuntimeError(
        f"The workers hold different weights {when}. They must be identical on all workers. "
        f"Received: '{path}' on {name_workers(others)} differs from worker 0's{more}. Load weights "
        "on every worker, from a shared folder; set the same random seed "
        "(`keras.utils.set_random_seed`); call the model in training mode on all workers or on "
        "none; and pass the same callbacks on all."
    )


def check_readings(workers, facts: dict[str, str]) -> None:
    """Raises unless all workers read shares of the same data.

    Args:
        workers: The strategy's `ProcessGroup`.
        facts: What `rows_of_worker.Readings` says about it.

    Raises:
        RuntimeError: On every worker, with what differs.
    """
    if problems := differences(
        dict(enumerate(workers.exchange(facts, "the comparison of input data")))
    ):
        raise RuntimeError(
            "The workers read different data; all workers must read the same. Received: "
            + "; ".join(problems)
            + ". Pass the same arrays or files on all workers."
        )


def _is_floating(variable) -> bool:
    return tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).is_floating


def _values(variable) -> np.ndarray:
    return np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).reshape(-1)


def _checksum(variable) -> int | None:
    if isinstance(variable, ShardedVariable):  # The assigned values may differ by worker.
        return variable.checksum
    return zlib.crc32(_values(variable).view("uint8"))


def _blocks(variable, max_blocks: int) -> list[Any]:
    """A projection and a norm of each block of values; a checksum if values are not floats."""
    if not _is_floating(variable) or isinstance(variable, ShardedVariable):
        return [_checksum(variable)]
    values = _values(variable)
    size = max(_LEAST_BLOCK, -(-len(values) // max_blocks))
    blocks = []
    for start in range(0, len(values), size):
        block = values[start : start + size].astype("float64")
        projection = float(block @ np.resize(_PATTERN, len(block)))
        blocks.append([float(f"{number:.9g}") for number in (projection, np.abs(block).sum())])
    return blocks


def _differ(blocks, others) -> bool:
    return any(map(_block_differs, blocks, others))


def _block_differs(one, other) -> bool:
    if not isinstance(one, list):
        return one != other
    if not np.isfinite([*one, *other]).all():
        return not np.array_equal(np.isfinite(one), np.isfinite(other))
    return abs(one[0] - other[0]) > _MOST_APART * max(one[1], other[1])


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """Turns an error of `BatchFingerprints` into a `RuntimeError` that says what to do."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if _OTHER_BATCH not in str(error):
            raise
        raise RuntimeError(
            f"{_OTHER_BATCH} in one of the first {_NUM_STEPS} steps; each worker needs the whole "
            "global batch, in the same order. Received: batches with different fingerprints. Seed "
            "every shuffle (`keras.utils.set_random_seed`, `shuffle(…, seed=7)`), remove "
            "`deterministic=False`, and do not shard the data yourself. Pass the result of "
            "`tfparallel.data.by_sample` unchanged: apply `map` before it, not after."
        ) from None


class BatchFingerprints:
    """Compares the batches of the workers in the first steps of a method.

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
        """Fails the step on all workers if their batches differ."""
        num_checked = self._num_checked[kind]
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]

        def compare():
            rows = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
            fingerprints = tf.cast(tf.concat(rows, 0), tf.int32)
            num_workers = self._workers.num_workers
            (gathered,) = self._workers.all_gather([fingerprints], [len(leaves)] * num_workers)
            same = tf.reduce_all(gathered == tf.tile(fingerprints, [num_workers, 1]))
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
    except NotImplementedError:  # A user's learning rate schedule may raise it.
        rate = rate_of(optimizer)
        kinds = (int, float, str, type(None))
        config = {name: attr for name, attr in vars(optimizer).items() if isinstance(attr, kinds)}
        config |= {"optimizer": type(optimizer).__name__, "learning_rate": type(rate).__name__}
    config.pop("name")  # Keras counts its objects: one more on the chief, and "sgd" is "sgd_1".
    return {name: str(value) for name, value in sorted(config.items())}


def _identities(model, name) -> list[Any]:
    """The values of an argument of `compile`, flattened, in a form that workers can compare."""
    argument = (compile_arguments(model) or {}).get(name)
    return [_identity(leaf) for leaf in _leaves(argument)]


def _leaves(argument) -> Iterator[Any]:
    if isinstance(argument, dict):
        # Keras numbers the names of layers, and a dictionary may come from a set.
        argument = sorted(argument.values(), key=lambda leaf: str(_identity(leaf)))
    if not isinstance(argument, list | tuple):
        yield argument
        return
    for inner in argument:
        yield from _leaves(inner)


def _identity(leaf):
    if isinstance(leaf, _PLAIN):
        return leaf
    if not isinstance(leaf, keras.losses.Loss):
        return getattr(leaf, "__name__", type(leaf).__name__)
    try:
        config = leaf.get_config()
    except Exception:  # noqa: BLE001 - A user's own may raise anything; its class is compared.
        config = {}
    plain = {k: v for k, v in config.items() if k != "name" and _is_telling(v)}
    return {"class": type(leaf).__name__} | plain


def _is_telling(value) -> bool:
    """Whether a value of a config describes the computation: a word, not a file or an address."""
    return value.isidentifier() if isinstance(value, str) else isinstance(value, _PLAIN)


def _vocabularies(model) -> list[str]:
    """A fingerprint of each lookup layer, in order."""
    fingerprints = []
    for layer in layers_in(model):
        if isinstance(layer, _LOOKUPS):
            try:
                words = [str(word) for word in layer.get_vocabulary()]
            except UnicodeDecodeError:  # Keras cannot list these words, only look them up.
                fingerprints.append("entries that are not UTF-8")
                continue
            checksum = zlib.crc32("\0".join(words).encode())
            fingerprints.append(f"{len(words)} entries, checksum {checksum:08x}")
    return fingerprints
