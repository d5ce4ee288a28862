"""Whether all workers train the same model on the same batches, and come to the same weights.

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

from tfparallel.cluster.differences import differences, name_workers
from tfparallel.data import rows_of_worker
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.keras import layers_in
from tfparallel.seams.optimizers import rate_of
from tfparallel.variables.sharded import ShardedVariable

# The first batches of a `fit`, `evaluate` or `predict` are compared; another order shows there.
_NUM_STEPS = 2
_PLAIN = (int, float, str, bool, type(None))
_LOOKUPS = (keras.layers.IntegerLookup, keras.layers.StringLookup)
_KINDS = ("fit", "evaluate", "predict")
_OTHER_BATCH = "The workers were given different batches"

# Relative to the sum of a block's absolute values. Processors of two kinds may round an update
# differently; weights that were loaded on one worker alone are further apart.
_MOST_APART = 1e-4
_PATTERN = 1.0 + np.arange(101) / 101  # Factors that differ, so that the order of values counts.
_BLOCKS = 2**14  # Of all weights whose checksums differ, so that what is sent is bounded.
_LEAST_BLOCK = 256  # Elements: values near zero, and rounded, are judged with others.


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
        "order": getattr(rows_of_worker.readings_of(asked.get("x")), "facts", dict)(),
        "weights": [f"{v.name} {tuple(v.shape)} {v.dtype}" for v in model.variables],
        "optimizer": _configuration(model.optimizer),
        "layout": model.layout.title,
        "sync": str(getattr(model, "_sync", "every_step")),
        "class_weight": {
            str(label): f"{float(weight):.6g}"
            for label, weight in sorted((asked.get("class_weight") or {}).items())
        },
        "loss": _identities(model, "loss"),
        "loss_weights": _identities(model, "loss_weights"),
        "vocabulary": _vocabularies(model),
    }
    found = differences(dict(enumerate(workers.exchange(facts, "the start of `fit`"))))
    if found:
        raise RuntimeError(
            "The workers disagree on what to train; the same model, data and arguments of `fit` "
            "are required on all of them. Received: " + "; ".join(found) + ". Start all workers "
            "with the same program and the same data."
        )


def check_values(workers, model: keras.Model, when: str, *, states: bool = True) -> None:
    """Raises unless all workers hold the same weights.

    Args:
        workers: The strategy's `ProcessGroup`.
        model: The model.
        when: In words, behind "The workers hold different weights".
        states: Whether to compare seeds and counts, too.

    Raises:
        RuntimeError: On every worker, with which variables differ, and where.
    """
    # By their order: Keras numbers its objects, and one worker may have made more of them.
    variables = [v for v in model.variables if v.dtype != "string"]
    if states and model.optimizer is not None:
        variables.append(model.optimizer.iterations)
    if not states:
        variables = [v for v in variables if _is_floating(v)]
    # A subclassed model may be built on some workers only.
    shapes = [[list(v.shape), str(v.dtype)] for v in variables]
    own = [shapes, list(map(_checksum, variables))]
    everyones = workers.exchange(own, f"the comparison of weights {when}")
    if any(theirs != everyones[0][0] for theirs, _ in everyones):
        counts = ", ".join(str(len(theirs)) for theirs, _ in everyones)
        raise RuntimeError(
            f"The workers hold different weights {when}. The same are required on all of them. "
            f"Received: {counts} variables, by worker, not all of the same shapes. Build and load "
            "the model on every worker."
        )
    checksums = zip(*[sums for _, sums in everyones], strict=True)
    unlike = [v for v, sums in zip(variables, checksums, strict=True) if len(set(sums)) > 1]
    if not unlike:
        return
    most = max(1, _BLOCKS // len(unlike))
    own = [_blocks(variable, most) for variable in unlike]
    values = workers.exchange(own, f"the comparison of blocks of weights {when}")
    apart = {}
    for place, variable in enumerate(unlike):
        others = [i for i, own in enumerate(values) if _differ(values[0][place], own[place])]
        if others:
            apart[variable.path] = others
    if not apart:
        return
    path, others = next(iter(apart.items()))
    more = f", and so do {len(apart) - 1} more variables" if len(apart) > 1 else ""
    raise RuntimeError(
        f"The workers hold different weights {when}. The same are required on all of them. "
        f"Received: '{path}' on {name_workers(others)} differs from worker 0's{more}. Load "
        "weights on every worker, from a folder that all see; seed what is drawn "
        "(`keras.utils.set_random_seed`); call the model in training mode on all workers or on "
        "none; and give all the same callbacks."
    )


def check_readings(workers, facts: dict[str, str]) -> None:
    """Raises unless all workers read shares of the same data.

    Args:
        workers: The strategy's `ProcessGroup`.
        facts: What `rows_of_worker.Readings` tells of it.

    Raises:
        RuntimeError: On every worker, with what differs.
    """
    if found := differences(dict(enumerate(workers.exchange(facts, "the data of a call")))):
        raise RuntimeError(
            "The workers read different data; the same is required on all of them. Received: "
            + "; ".join(found)
            + ". Give all workers the same arrays or files."
        )


def _is_floating(variable) -> bool:
    return tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).is_floating


def _values(variable) -> np.ndarray:
    return np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).reshape(-1)


def _checksum(variable) -> int | None:
    if isinstance(variable, ShardedVariable):  # The value is one; what was assigned may be several.
        return variable.checksum
    return zlib.crc32(_values(variable).view("uint8"))


def _blocks(variable, most: int) -> list[Any]:
    """Of each block of the values a projection and their size; exact where values are no floats."""
    if not _is_floating(variable) or isinstance(variable, ShardedVariable):
        return [_checksum(variable)]
    values = _values(variable)
    size = max(_LEAST_BLOCK, -(-len(values) // most))
    found = []
    for start in range(0, len(values), size):
        some = values[start : start + size].astype("float64")
        projection = float(some @ np.resize(_PATTERN, len(some)))
        found.append([float(f"{number:.9g}") for number in (projection, np.abs(some).sum())])
    return found


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


def _identities(model, name) -> list[Any]:
    """What `compile` was given for an argument, one after the other, as workers can compare it."""
    given = (compile_arguments(model) or {}).get(name)
    return [_identity(leaf) for leaf in _leaves(given)]


def _leaves(given) -> Iterator[Any]:
    if isinstance(given, dict):
        # Names of layers Keras counts up; and a dictionary may have been made of a set.
        given = sorted(given.values(), key=lambda leaf: str(_identity(leaf)))
    if not isinstance(given, list | tuple):
        yield given
        return
    for inner in given:
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
    """Whether a value of a config says what is computed: a word, and no file or address."""
    return value.isidentifier() if isinstance(value, str) else isinstance(value, _PLAIN)


def _vocabularies(model) -> list[str]:
    """A fingerprint for each lookup layer, by their order."""
    found = []
    for layer in layers_in(model):
        if isinstance(layer, _LOOKUPS):
            try:
                words = [str(word) for word in layer.get_vocabulary()]
            except UnicodeDecodeError:  # Which Keras cannot list; the layer can look them up.
                found.append("words that are no UTF-8")
                continue
            checksum = zlib.crc32("\0".join(words).encode())
            found.append(f"{len(words)} entries, checksum {checksum:08x}")
    return found
