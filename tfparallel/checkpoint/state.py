"""The state of a run: its variables, as named arrays.

Six groups, which are read and written at different times:

* `training`: weights, the random layers' counters, the optimizers' slots, steps and accumulators;
* `metrics`: the running sums of the epoch, which Keras resets at its start;
* `seeds`: the counter of Keras's global seed generator, for layers without their own;
* `unsent`: the errors of the workers' compressed gradients (`collectives/compression.py`), and the
  variables of the synchronization policy (`replication/sync/`): those that determine the number of
  steps per update (`noise_scale.py`) or its learning rate (`adascale.py`), or the momentum of the
  outer step (`outer_step.py`);
* `losses`: variables that Keras does not track: those that losses read, and others
  (`untracked_variables.py`);
* `callbacks`: arrays of other callbacks (`callbacks/callback_states.py`).

Keras's weights files hold only the first group, without the counters, so a run resumed from one
would repeat its dropout masks.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.checkpoint.untracked_variables import untracked_variables
from tfparallel.cloning.copy_state import without_draws
from tfparallel.collectives.group import workers_of
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    make_global_seed_generator,
)
from tfparallel.tracing.trial_trace import traced_apart
from tfparallel.update.built_optimizers import optimizers_of, wrapped_by
from tfparallel.update.whole_slots import assign, holds_pieces, value, wait_to_save

GROUPS = ("training", "metrics", "seeds", "unsent", "losses", "callbacks")
_SHOWN = 8


def build(model: keras.Model) -> None:
    """Creates all variables of the training, so that they can be compared with a checkpoint.

    Raises:
        ValueError: If the model, or an optimizer of a custom `train_step`, is not built.
    """
    if not model.built:
        raise ValueError(
            "The model has no variables yet, so they cannot be compared with the checkpoint. A "
            f"built model is required. Received: {model.name!r}, unbuilt. Call it on one batch "
            "before `fit`, or start it with a keras.Input."
        )
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    unbuilt = [other.name for other in _optimizers(model) if not other.built]
    if unbuilt:
        raise ValueError(
            "An optimizer is not built, and only the model's own train_step knows which weights it "
            f"updates. Built optimizers are required. Received: {unbuilt}. Call "
            "`optimizer.build(weights)` on each before `fit`."
        )


def describe(model: keras.Model) -> dict[str, list[list[Any]]]:
    """Returns `[name, shape, dtype]` of each variable, by group, in the order of `capture`."""
    specs = {
        group: [_spec(variable) for variable in variables]
        for group, variables in _variables(model).items()
    }
    workers, compression = _compression(model)
    unsent = compression.describe(workers, model.trainable_variables) if compression else []
    policy = [[k, v.shape.as_list(), v.dtype.name] for k, v in _policy_state(model).items()]
    losses = [[name, *_spec(variable)[1:]] for name, variable in _untracked(model)]
    return specs | {"unsent": [*unsent, *policy], "losses": losses}


def capture(model: keras.Model) -> dict[str, Iterator[np.ndarray]]:
    """Returns the values by group, each read lazily, so that no host needs to hold the model.

    Every worker must consume them in this order: reading sums accumulators over the workers and
    gathers shards.
    """
    pieces = _in_pieces(model)
    for _, places in itertools.islice(pieces.values(), 1):  # The same for all pieces of a model.
        if places.workers is not None:
            wait_to_save(places.workers, "optimizer")

    def read(variable):
        if id(variable) in pieces:
            return value(*pieces[id(variable)])
        return tf.convert_to_tensor(variable.value).numpy()

    values = {group: map(read, variables) for group, variables in _variables(model).items()}
    workers, compression = _compression(model)
    unsent = compression.capture(workers, model.trainable_variables) if compression else []
    policy = (variable.numpy() for variable in _policy_state(model).values())
    losses = (tf.convert_to_tensor(variable).numpy() for _, variable in _untracked(model))
    return values | {"unsent": itertools.chain(unsent, policy), "losses": losses}


def summed_values(model: keras.Model) -> dict[int, np.ndarray]:
    """Returns the values of variables that are distributed over devices, by `id`.

    Every worker must call it: it sums accumulators over the workers and gathers shards.
    """
    return {key: value(*pieces) for key, pieces in _in_pieces(model).items()}


def _in_pieces(model) -> dict[int, tuple]:
    """Returns the accessors of optimizer variables that consist of shards or terms, by `id`."""
    pieces: dict[int, tuple] = {}
    for optimizer in filter(holds_pieces, _optimizers(model)):
        pieces |= optimizer.in_pieces()
    return pieces


def restore_training(
    model: keras.Model, training: Iterable[np.ndarray], seeds: Sequence[np.ndarray]
) -> None:
    """Restores the values of `capture` into a built model, its optimizers and Keras's seed."""
    pieces = _in_pieces(model)
    with model.distribute_strategy.scope():
        for variable, array in zip(_training_variables(model), training, strict=True):
            if id(variable) in pieces:
                group, places = pieces[id(variable)]
                assign(group, array, places)
            else:
                variable.assign(array)
        if seeds and not _seed_variables():
            with without_draws():  # A new generator would draw its seed from Python's.
                make_global_seed_generator()
    getattr(model, "state_was_restored", lambda: None)()
    for seed in seeds:  # Outside the scope: an earlier model's strategy may own the variable.
        _seed_variables()[0].assign(seed)


def restore_unsent(model: keras.Model, names: Sequence[str], arrays: Iterable[np.ndarray]) -> None:
    """Restores the group `unsent`; drops state that this run does not use."""
    workers, compression = _compression(model)
    policy, others = _policy_state(model), {}
    for name, array in zip(names, arrays, strict=True):
        if name in policy:
            policy[name].assign(array)
        else:
            others[name] = array
    if compression is not None:
        compression.restore(workers, model.trainable_variables, list(others), others.values())


def restore_losses(model: keras.Model, arrays: Iterable[np.ndarray]) -> None:
    """Restores the group `losses`, in the order of `capture`."""
    with model.distribute_strategy.scope():
        for (_, variable), array in zip(_untracked(model), arrays, strict=True):
            variable.assign(array)


def _policy_state(model) -> dict[str, tf.Variable]:
    """Returns the variables of the synchronization policy."""
    return model.kept_between_updates() if hasattr(model, "kept_between_updates") else {}


def _compression(model):
    workers = workers_of(model)
    return workers, getattr(workers, "compression", None)


def restore_metrics(model: keras.Model, arrays: Sequence[np.ndarray], batch: Any) -> bool:
    """Restores the metrics from `capture`; returns False if the model has different metrics.

    Metrics that are not built yet are built for the shapes of `batch`, `(x, y[, sample_weight])`.
    """
    if not _metrics_fit(model, arrays):
        # Keras itself does this under a strategy only. If it raises, because the model has a custom
        # `build`, the metrics stay unbuilt.
        with contextlib.suppress(RuntimeError, ValueError), model.distribute_strategy.scope():
            shapes = keras.tree.map_structure(
                lambda rows: keras.KerasTensor((None, *rows.shape[1:]), rows.dtype.name), batch
            )
            with traced_apart():
                model._symbolic_build(data_batch=shapes)
    if not _metrics_fit(model, arrays):
        return False
    # The step is a program. Outside a program, assigning a sum would split it over the replicas.
    strategy = model.distribute_strategy
    with strategy.program() if hasattr(strategy, "program") else strategy.scope():
        for variable, array in zip(_metric_variables(model), arrays, strict=True):
            variable.assign(array)
    return True


def _metrics_fit(model, arrays) -> bool:
    shapes = [tuple(variable.shape) for variable in _metric_variables(model)]
    return shapes == [array.shape for array in arrays]


def differences(expected: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]]) -> list[str]:
    """Describes how the variables of a checkpoint differ from those of a model.

    It ignores the numbers in Keras's names (`dense_3`), which depend on how many layers the process
    has created before.

    Args:
        expected: `[name, shape, dtype]` of the model's variables, in order.
        saved: The same for the checkpoint.

    Returns:
        Lines to show; empty if there is no difference.
    """
    model_keys, saved_keys = [[_key(spec) for spec in specs] for specs in (expected, saved)]
    if model_keys == saved_keys:
        return []
    lines = []
    for head, keys, other_keys in (
        ("only the checkpoint has", saved_keys, model_keys),
        ("only the model has", model_keys, saved_keys),
    ):
        extra = list((Counter(keys) - Counter(other_keys)).elements())
        texts = [f"{name} {shape} {dtype}" for name, shape, dtype in extra[:_SHOWN]]
        if len(extra) > _SHOWN:
            texts.append(f"{len(extra) - _SHOWN} more")
        if texts:
            lines.append(f"{head} {', '.join(texts)}")
    return lines or ["the same variables, in another order"]


def specs_of(
    group: str, num_arrays: Sequence[int], specs: Sequence[list[Any]]
) -> Sequence[list[Any]] | None:
    """Returns the specs of a group in a checkpoint; None if an earlier version wrote it without.

    Args:
        group: One of GROUPS.
        num_arrays: The number of arrays in each group of the checkpoint.
        specs: `[name, shape, dtype]` of all of them.
    """
    index = GROUPS.index(group)
    if index >= len(num_arrays):
        return None
    return specs[sum(num_arrays[:index]) : sum(num_arrays[: index + 1])]


def specs_of_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Returns `[name, shape, dtype]` of arrays by name."""
    return [[name, list(array.shape), array.dtype.name] for name, array in arrays.items()]


def _key(spec):
    name, shape, dtype = spec
    return re.sub(r"_\d+(?=/|_|$)", "", name), tuple(shape), dtype


def _spec(variable) -> list[Any]:
    whole = getattr(variable, "_shown", variable)  # The whole slot, for a replica's shard of it.
    path = getattr(variable, "path", variable.name)  # A `tf.Variable` has no path.
    return [path, list(whole.shape), keras.backend.standardize_dtype(variable.dtype)]


def _variables(model) -> dict[str, list[keras.Variable]]:
    return {
        "training": _training_variables(model),
        "metrics": _metric_variables(model),
        "seeds": _seed_variables(),
    }


def _training_variables(model):
    by_id = {id(variable): variable for variable in model.variables}
    for optimizer in _optimizers(model):
        by_id |= {id(variable): variable for variable in optimizer.variables}
    return list(by_id.values())


def _metric_variables(model):
    training_ids = set(map(id, _training_variables(model)))
    return [variable for variable in model.metrics_variables if id(variable) not in training_ids]


def _untracked(model) -> list[tuple[str, keras.Variable | tf.Variable]]:
    """Returns the variables that Keras does not track and that are in no other group, by name."""
    others = {id(variable) for group in _variables(model).values() for variable in group}
    return [pair for pair in untracked_variables(model) if id(pair[1]) not in others]


def _seed_variables():
    generator = get_global(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def _optimizers(model) -> list[keras.Optimizer]:
    """Returns the optimizers of a model, each followed by the optimizers it wraps."""
    waiting, by_id = optimizers_of(model), {}
    while waiting:
        optimizer = waiting.pop(0)
        if id(optimizer) not in by_id:
            by_id[id(optimizer)] = optimizer
            waiting = wrapped_by(optimizer) + waiting
    return list(by_id.values())
