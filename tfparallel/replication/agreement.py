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
from tfparallel.seams.optimizers import rate_of

# The first batches of a `fit`, `evaluate` or `predict` are compared; another order shows there.
_NUM_STEPS = 2
_KINDS = ("fit", "evaluate", "predict")
_OTHER_BATCH = "The workers were given different batches"

# Relative to the sum of a weight's absolute values. Processors of two kinds may round an update
# differently; weights that were loaded on one worker alone are further apart.
_MOST_APART = 1e-4
_PATTERN = 1.0 + np.arange(101) / 101  # Factors that differ, so that the order of values counts.
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
        "order": getattr(rows_of_worker.readings_of(asked.get("x")), "facts", dict)(),
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
    everyones = workers.exchange({"when": when, "values": list(map(_fingerprint, variables))})
    if any(own.get("when") != when for own in everyones):
        raise RuntimeError(
            "The workers are at different points of the program; the same calls are required on "
            f"all of them. Received: one that compares weights {when}, and one that does not, "
            "perhaps after an error that the program caught. Let such an error end the program."
        )
    values = [own["values"] for own in everyones]
    apart = {}
    for place, variable in enumerate(variables):
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
    if found := differences(dict(enumerate(workers.exchange(facts)))):
        raise RuntimeError(
            "The workers read different data; the same is required on all of them. Received: "
            + "; ".join(found)
            + ". Give all workers the same arrays or files."
        )


def _is_floating(variable) -> bool:
    return tf.as_dtype(keras.backend.standardize_dtype(variable.dtype)).is_floating


def _fingerprint(variable) -> list[float] | int:
    """A checksum of the values; of floating-point ones a projection and their size."""
    values = np.asarray(keras.ops.convert_to_numpy(variable)).reshape(-1)
    if not _is_floating(variable):
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
