"""The state of a run: its variables, by name, as arrays.

Four groups, which are read and written at different moments:

* `training`: weights, the random layers' counters, the optimizers' slots, steps and accumulators;
* `metrics`: the running sums of the epoch, which Keras resets when it begins;
* `seeds`: the counter of Keras's own generator, from which layers without one draw;
* `unsent`: what the workers' compressed gradients have left over (`collectives/compression.py`),
  and what decides how many steps an update is of (`replication/noise_scale.py`).

Keras's weights files hold the first of them without the counters, so that a run resumed from one
would repeat its dropout masks.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.cloning.copy_state import without_draws
from tfparallel.collectives.group import workers_of
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    make_global_seed_generator,
)
from tfparallel.tracing.apart import traced_apart
from tfparallel.update.built import optimizers_of, wrapped_by
from tfparallel.update.files import assign, holds_pieces, value, wait_to_save

__all__ = [
    "GROUPS",
    "build",
    "capture",
    "describe",
    "differences",
    "restore_metrics",
    "restore_training",
    "restore_unsent",
    "summed_values",
]

GROUPS = ("training", "metrics", "seeds", "unsent")
_SHOWN = 8


def build(model: keras.Model) -> None:
    """Makes sure that all variables of the training exist, which others can be compared with.

    Raises:
        ValueError: If the model, or an optimizer that only the user's step knows, is not built.
    """
    if not model.built:
        raise ValueError(
            "The model has no variables yet, and a checkpoint is compared with them before "
            f"training. A built model is required. Received: {model.name!r}, unbuilt. Call it on "
            "one batch before `fit`, or give it a keras.Input."
        )
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    unbuilt = [other.name for other in _optimizers(model) if not other.built]
    if unbuilt:
        raise ValueError(
            "An optimizer has no variables yet, and which weights it updates only the model's own "
            f"train_step knows. Built optimizers are required. Received: {unbuilt}. Call "
            "`optimizer.build(weights)` for each before `fit`."
        )


def describe(model: keras.Model) -> dict[str, list[list[Any]]]:
    """Returns `[name, shape, dtype]` of each variable, by group, in the order of `capture`."""
    found = {
        group: [_spec(variable) for variable in variables]
        for group, variables in _variables(model).items()
    }
    workers, compression = _compression(model)
    unsent = compression.describe(workers, model.trainable_variables) if compression else []
    kept = [[name, [], variable.dtype.name] for name, variable in _kept(model).items()]
    return found | {"unsent": [*unsent, *kept]}


def capture(model: keras.Model) -> dict[str, Iterator[np.ndarray]]:
    """Returns the values by group, each read when it is asked for: no host need hold a model.

    Every worker must ask for them, in this order: accumulators are summed over them, and shares
    are joined.
    """
    pieces = _in_pieces(model)
    for _, places in itertools.islice(pieces.values(), 1):  # Of one model they are the same.
        if places.workers is not None:
            wait_to_save(places.workers, "optimizer")

    def read(variable):
        if id(variable) in pieces:
            return value(*pieces[id(variable)])
        return tf.convert_to_tensor(variable.value).numpy()

    found = {group: map(read, variables) for group, variables in _variables(model).items()}
    workers, compression = _compression(model)
    unsent = compression.capture(workers, model.trainable_variables) if compression else []
    kept = (variable.numpy() for variable in _kept(model).values())
    return found | {"unsent": itertools.chain(unsent, kept)}


def summed_values(model: keras.Model) -> dict[int, np.ndarray]:
    """Returns the values that no copy of a variable holds alone, by the `id` of the variable.

    Every worker must call it: accumulators are summed over them, and shares are joined.
    """
    return {key: value(*pieces) for key, pieces in _in_pieces(model).items()}


def _in_pieces(model) -> dict[int, tuple]:
    """Of the optimizers that hold shares or terms, by `id`, what reads and writes a variable."""
    found: dict[int, tuple] = {}
    for optimizer in filter(holds_pieces, _optimizers(model)):
        found |= optimizer.in_pieces()
    return found


def restore_training(
    model: keras.Model, training: Iterable[np.ndarray], seeds: Sequence[np.ndarray]
) -> None:
    """Gives a built model, its optimizers and Keras's generator the values of `capture`."""
    pieces = _in_pieces(model)
    with model.distribute_strategy.scope():
        for variable, array in zip(_training_variables(model), training, strict=True):
            if id(variable) in pieces:
                group, places = pieces[id(variable)]
                assign(group, array, places)
            else:
                variable.assign(array)
        if seeds and not _seed_variables():
            with without_draws():  # A new generator takes its seed from Python's.
                make_global_seed_generator()
    for seed in seeds:  # Outside the scope: an earlier model's strategy may have made it.
        _seed_variables()[0].assign(seed)


def restore_unsent(model: keras.Model, names: Sequence[str], arrays: Iterable[np.ndarray]) -> None:
    """Gives the workers what was left over; what a run has no use for is dropped."""
    workers, compression = _compression(model)
    kept, others = _kept(model), {}
    for name, array in zip(names, arrays, strict=True):
        if name in kept:
            kept[name].assign(array)
        else:
            others[name] = array
    if compression is not None:
        compression.restore(workers, model.trainable_variables, list(others), others.values())


def _kept(model) -> dict[str, tf.Variable]:
    """What decides how many steps an update is of."""
    return model.kept_between_updates() if hasattr(model, "kept_between_updates") else {}


def _compression(model):
    workers = workers_of(model)
    return workers, getattr(workers, "compression", None)


def restore_metrics(model: keras.Model, arrays: Sequence[np.ndarray], batch: Any) -> bool:
    """Gives the metrics the values of `capture`; False if they are others.

    Metrics that are not yet built are built of the batch's shapes; it is `(x, y[, sample_weight])`.
    """
    if not _metrics_fit(model, arrays):
        # Keras calls it itself, under a strategy only; with the error it raises for a model that
        # is built in its own way, the metrics stay as they are.
        with contextlib.suppress(RuntimeError, ValueError), model.distribute_strategy.scope():
            shapes = keras.tree.map_structure(
                lambda own: keras.KerasTensor((None, *own.shape[1:]), own.dtype.name), batch
            )
            with traced_apart():
                model._symbolic_build(data_batch=shapes)
    if not _metrics_fit(model, arrays):
        return False
    # Outside a program, which the step is, a sum would be shared out to the replicas.
    strategy = model.distribute_strategy
    with strategy.program() if hasattr(strategy, "program") else strategy.scope():
        for variable, array in zip(_metric_variables(model), arrays, strict=True):
            variable.assign(array)
    return True


def _metrics_fit(model, arrays) -> bool:
    shapes = [tuple(variable.shape) for variable in _metric_variables(model)]
    return shapes == [array.shape for array in arrays]


def differences(expected: Sequence[Sequence[Any]], found: Sequence[Sequence[Any]]) -> list[str]:
    """Says in what a checkpoint's variables and a model's differ.

    The numbers that Keras gives names (`dense_3`), which depend on how many layers the process
    has made before, do not count.

    Args:
        expected: `[name, shape, dtype]` of the model's variables, in order.
        found: The same of the checkpoint's.

    Returns:
        Lines to show; none if they are alike.
    """
    mine, theirs = [[_key(spec) for spec in specs] for specs in (expected, found)]
    if mine == theirs:
        return []
    lines = []
    for head, ours, others in (
        ("only the checkpoint has", theirs, mine),
        ("only the model has", mine, theirs),
    ):
        extra = list((Counter(ours) - Counter(others)).elements())
        shown = [f"{name} {shape} {dtype}" for name, shape, dtype in extra[:_SHOWN]]
        if len(extra) > _SHOWN:
            shown.append(f"{len(extra) - _SHOWN} more")
        if shown:
            lines.append(f"{head} {', '.join(shown)}")
    return lines or ["the same variables, in another order"]


def _key(spec):
    name, shape, dtype = spec
    return re.sub(r"_\d+(?=/|_|$)", "", name), tuple(shape), dtype


def _spec(variable) -> list[Any]:
    whole = getattr(variable, "_shown", variable)  # Of a replica's share of a slot.
    return [variable.path, list(whole.shape), keras.backend.standardize_dtype(variable.dtype)]


def _variables(model) -> dict[str, list[keras.Variable]]:
    return {
        "training": _training_variables(model),
        "metrics": _metric_variables(model),
        "seeds": _seed_variables(),
    }


def _training_variables(model):
    found = {id(variable): variable for variable in model.variables}
    for optimizer in _optimizers(model):
        found |= {id(variable): variable for variable in optimizer.variables}
    return list(found.values())


def _metric_variables(model):
    known = set(map(id, _training_variables(model)))
    return [variable for variable in model.metrics_variables if id(variable) not in known]


def _seed_variables():
    generator = get_global(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def _optimizers(model) -> list[keras.Optimizer]:
    """The optimizers that a model holds, and behind each those that do its work."""
    waiting, found = optimizers_of(model), {}
    while waiting:
        optimizer = waiting.pop(0)
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            waiting = wrapped_by(optimizer) + waiting
    return list(found.values())
