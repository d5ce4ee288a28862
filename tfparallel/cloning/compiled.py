"""Compiles a copy of a model like the original, including the optimizer state."""

from collections.abc import Callable
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from tfparallel.cloning.attributes import carry_arguments, has_state
from tfparallel.cloning.verify_clone import NotAlike
from tfparallel.extend import classes_of, original_class
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.keras import layers_in
from tfparallel.seams.optimizers import (
    count_of,
    key_of,
    left_out_of_decay,
    left_out_pattern,
    rate_of,
)
from tfparallel.update.built_optimizers import trained_by, wrapped_by
from tfparallel.update.whole_slots import holds_pieces


def compile_alike(
    model: keras.Model,
    copy: keras.Model,
    prepare: Callable[[keras.Optimizer], None] | None = None,
) -> None:
    """Compiles `copy` like `model`, if compiled: optimizer, loss, metrics, how steps are run.

    Shares the loss and functions; creates new objects for those with a state, and copies the
    optimizer state. `prepare` is called with the copy's optimizer before it is built.

    Raises:
        NotAlike: If the optimizer or a metric cannot be created from its config.
    """
    if not model.compiled or not model.get_compile_config():
        return
    if original_class(model).compile is not keras.Model.compile:
        # A class that overrides `compile` also defines how to compile from a config.
        with keras.saving.custom_object_scope(classes_of(model)):
            original_class(copy).compile_from_config(copy, model.get_compile_config())
        if model.optimizer is not None and copy.optimizer is not None:
            _carry_beside_config(model.optimizer, copy.optimizer, _pairs(model, copy))
        _carry_state(model, copy)
        return
    # The arguments of `compile`, which its config describes less well: a user's own loss is an
    # object, and a lambda has no config.
    arguments = dict(compile_arguments(model))
    arguments["optimizer"] = _optimizer_like(model, copy)
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(metric_like, arguments[name])
    trained = trained_by(model.optimizer)
    if not trained:
        copy.compile(**arguments, auto_scale_loss=False)
        return
    # The optimizer has slots for the weights that were trainable when it was built.
    flags = [variable.trainable for variable in copy.variables]
    frozen = [layer for layer in layers_in(copy) if not layer.trainable]
    try:
        for layer in frozen:
            layer._trainable = True
        for source, target in _pairs(model, copy):
            target.trainable = id(source) in trained
        copy.compile(**arguments, auto_scale_loss=False)
        if prepare is not None and copy.optimizer is not None:
            prepare(copy.optimizer)
        _carry_state(model, copy)
    finally:
        for variable, flag in zip(copy.variables, flags, strict=True):
            variable.trainable = flag
        for layer in frozen:
            layer._trainable = False


def _carry_state(model, copy) -> None:
    if model.optimizer is None or not model.optimizer.built:
        return
    if not copy.optimizer.built:
        copies = {id(source): target for source, target in _pairs(model, copy)}
        # In the order of the slots, which may not be that of the model.
        copy.optimizer.build([copies[i] for i in trained_by(model.optimizer) if i in copies])
    slots, copied = model.optimizer.variables, copy.optimizer.variables
    if _shapes(slots) != _shapes(copied):
        raise NotAlike(
            f"The clone of the optimizer '{model.optimizer.name}' has different variables. An "
            "optimizer that was built for the weights that the model trains is required. Received: "
            f"{len(slots)} variables, but {len(copied)} in its clone. Compile the model again."
        )
    if holds_pieces(model.optimizer) or holds_pieces(copy.optimizer):
        store: dict[str, Any] = {}
        model.optimizer.save_own_variables(store)
        copy.optimizer.load_own_variables(store)
        return
    for source, target in zip(slots, copied, strict=True):
        target.assign(source)


def _shapes(variables) -> list[tuple]:
    """The shapes of variables; for sharded slots, those of the whole."""
    return [tuple(getattr(variable, "_shown", variable).shape) for variable in variables]


def _optimizer_like(model, copy):
    if model.optimizer is None:
        return None
    optimizer = _from_config(model.optimizer, "optimizer")
    _carry_beside_config(model.optimizer, optimizer, _pairs(model, copy))
    return optimizer


def _pairs(model, copy) -> list[tuple[keras.Variable, keras.Variable]]:
    return list(zip(model.variables, copy.variables, strict=True))


def _carry_beside_config(source, target, pairs) -> None:
    """Copies what an optimizer's config omits: exclusions from weight decay, and the step count.

    The step count may be set before the optimizer is built.
    """
    # If an update covers several steps, Keras computes the number of updates from this count.
    count_of(target).assign(count_of(source))
    excluded = left_out_of_decay(source)
    pattern = left_out_pattern(source)
    if excluded or pattern:
        target.exclude_from_weight_decay(
            var_list=[copied for variable, copied in pairs if key_of(source, variable) in excluded],
            var_names=[pattern.pattern] if pattern else None,
        )
    wrapped, copies = wrapped_by(source), wrapped_by(target)
    if len(wrapped) != len(copies):
        raise NotAlike(
            f"The model is compiled with the optimizer '{source.name}', which holds {len(wrapped)} "
            f"optimizers, and {len(copies)} when rebuilt from its config. An optimizer of its own "
            "for each entry of its map, and for the default, is required. Received: a map that "
            "holds an optimizer twice, or that is a function. Clone the model before it is "
            "compiled, and compile the clone."
        )
    for inner, copied in zip(wrapped, copies, strict=True):
        _carry_beside_config(inner, copied, pairs)


def metric_like(metric):
    """Returns a copy of a metric without its state; other values unchanged."""
    return _from_config(metric, "metric") if isinstance(metric, keras.Metric) else metric


def _schedule_of(compiled_object) -> LearningRateSchedule | None:
    """An optimizer's schedule if it has no state; its own config may be incomplete."""
    rate = rate_of(compiled_object) if isinstance(compiled_object, keras.Optimizer) else None
    return rate if isinstance(rate, LearningRateSchedule) and not has_state(rate) else None


def _from_config(source, kind: str):
    """Creates a new object like one that has a state."""
    original = original_class(source)
    try:
        config, schedule = source.get_config(), _schedule_of(source)
        if schedule is not None and "learning_rate" in config:
            config["learning_rate"] = schedule
        copy = original.from_config(config)
        carry_arguments(source, copy)
        if schedule is not None:  # The copy may have created its own.
            copy.learning_rate = schedule
        return copy
    except (TypeError, ValueError, NotImplementedError) as error:
        raise NotAlike(
            f"The model is compiled with the {kind} '{source.name}' of class {original.__name__}, "
            "which cannot be rebuilt from its config. `get_config` and `from_config` are required "
            f"to clone it. Received: {error}. Clone the model before it is compiled, and compile "
            "the clone."
        ) from error
