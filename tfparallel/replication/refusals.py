"""Early errors for what data parallelism cannot do exactly, and for unusable input."""

import numbers
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.collectives import cross_device
from tfparallel.extend import original_class
from tfparallel.keras_compat import ACTIVITY_IS_SUMMED
from tfparallel.seams.keras import layers_in
from tfparallel.variables.sharded import ShardedVariable


def check_model(model: keras.Model, strategy) -> None:
    """Raises if the model keeps a state per example, which shards cannot.

    Raises:
        ValueError: For a stateful recurrent layer.
    """
    stateful = [
        layer.name for layer in layers_in(model) if getattr(layer, "stateful", False)
    ]
    if stateful:
        raise ValueError(
            "Stateful recurrent layers keep a state for each row of the batch, and the rows move "
            "between replicas when a batch is uneven. Layers without `stateful=True` are required "
            f"on {strategy.num_replicas} replicas. Received: {stateful}. Train on one device, or "
            "pass the state as an input."
        )


def check_scales(model: keras.Model) -> None:
    """Raises if a layer scales by the values of its last calls.

    Raises:
        ValueError: For a float8 layer.
    """
    scaled = [
        layer.name
        for layer in layers_in(model)
        if getattr(layer, "quantization_mode", None) == "float8"
    ]
    if scaled:
        raise ValueError(
            "A float8 layer scales by the largest values of its last calls, but a call sees only "
            "some rows of the batch. Layers of another precision, such as float16 or int8 with "
            f"LoRA, are required. Received: {scaled}. Change their precision, or use "
            "`tfparallel.model_parallel`."
        )


def check_activity(model: keras.Model) -> None:
    """Raises if a layer adds the sum of its activity over the batch to the loss.

    Raises:
        ValueError: For an activity regularizer, before Keras 3.14.
    """
    regularized = [layer.name for layer in layers_in(model) if layer.activity_regularizer]
    if ACTIVITY_IS_SUMMED and regularized:
        raise ValueError(
            f"Keras {keras.__version__} sums an activity regularizer over the batch, but the parts "
            "of a batch are combined as means. Keras 3.14 or later, which takes the mean, or "
            f"layers without `activity_regularizer` are required. Received: {regularized}. Run "
            "`pip install 'keras>=3.14'`, or use `tfparallel.model_parallel`."
        )


def check_compile(model: keras.Model, strategy) -> None:
    """Raises for options of a compiled model that several replicas cannot honour.

    Raises:
        ValueError: For `steps_per_execution` above 1 with an all-reduce algorithm that cannot run
            in a loop; or if XLA programs should sum the gradients, but a step has none.
    """
    name = getattr(strategy, "all_reduce_name", None)
    if model.compiled and model.steps_per_execution > 1 and name in cross_device.NOT_IN_LOOPS:
        raise ValueError(
            "`steps_per_execution` above 1 runs the steps in a loop, in which TensorFlow's "
            "collectives cannot run (keras#19246). Another algorithm, or 1, is required. Received: "
            f"steps_per_execution={model.steps_per_execution}, all_reduce={name!r}. Use "
            "all_reduce='ring', or remove `all_reduce`."
        )
    if not model.compiled or not strategy.sums_in_programs:
        return
    if model.run_eagerly:
        raise ValueError(
            "XLA sums gradients inside the programs that it compiles, and an eager step has none. "
            f"run_eagerly=False is required. Received: run_eagerly=True, all_reduce={name!r}. "
            "Remove one of them."
        )
    if not model.jit_compile:
        raise ValueError(
            "XLA sums gradients inside the programs that it compiles, but it does not compile this "
            "model. `jit_compile=True` and layers that XLA supports are required. Received: "
            f"all_reduce={name!r}, jit_compile={model.jit_compile}. Call `compile(..., "
            "jit_compile=True)`, or remove `all_reduce`."
        )
    step = original_class(model).train_step
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        raise ValueError(
            "XLA sums gradients inside the programs that a step is cut into, and a step that is "
            "itself a `tf.function` cannot be cut. A plain method is required; `fit` traces it. "
            f"Received: `{original_class(model).__name__}.train_step`, a tf.function, "
            f"all_reduce={name!r}. Remove `@tf.function` or `all_reduce`."
        )


def check_scope(strategy, caller: str) -> None:
    """Raises inside the scope of another strategy.

    Args:
        strategy: The strategy that trains the model.
        caller: What was called, for the message.

    Raises:
        ValueError: If another strategy is in scope.
    """
    scope = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() or scope is strategy:
        return
    raise ValueError(
        f"{caller} uses its own strategy, so it must be called outside another strategy's scope. "
        f"Received: {type(scope).__name__} in scope. Move the call, and the model's `compile` and "
        "`fit`, out of the `with` block; or keep the block, use tfparallel's strategy of that "
        "name, and build the plain Keras model in it."
    )


def check_variables(model: keras.Model, strategy, made_by_function: bool = False) -> None:
    """Raises if the model trains a variable that does not belong to the strategy.

    Args:
        model: A compiled model, or one about to be trained.
        strategy: The strategy that trains it.
        made_by_function: Whether a function passed to `data_parallel` made the model.

    Raises:
        ValueError: For a variable that was created outside the strategy's scope: all of them, by
            `enable_lora`, or by a layer that was added later; for a float8 layer; before
            Keras 3.14, for an activity regularizer.
    """
    check_scales(model)
    if strategy.num_replicas > 1:
        check_activity(model)
    outside = _outside(model.trainable_variables, strategy)
    if outside and made_by_function and (parts := _parts_outside(model, strategy)):
        it = "it" if len(parts) == 1 else "them"
        raise ValueError(
            f"Model '{model.name}' contains layers that were built before the function passed to "
            f"`data_parallel` was called. {_required(strategy)}, so the function must create all "
            f"layers. Received: {_listed(parts)}, built outside the function. Create {it} inside "
            "the function, or pass the built model."
        )
    if outside and len(outside) == len(model.trainable_variables):
        raise ValueError(_built_outside(f"Model '{model.name}'", outside, strategy))
    if outside:
        raise ValueError(
            f"Model '{model.name}' trains variables that were created outside its strategy's "
            f"scope. {_required(strategy)}. Received: {', '.join(outside)}. Add layers, and call "
            "`enable_lora`, within `with model.distribute_strategy.scope():`, or before you pass "
            "the model to the builder."
        )


def check_updated(variables, strategy, model: keras.Model | None) -> None:
    """Raises if an optimizer would be built for a variable that is not the strategy's.

    With one replica, a model that was built outside the scope is only detected here.

    Args:
        variables: The trainable Keras variables.
        strategy: The strategy of the optimizer.
        model: The model that Keras trains; None in a custom loop.

    Raises:
        ValueError: For a variable that was created outside the strategy's scope.
    """
    outside = _outside(variables, strategy)
    if outside:
        trained = "A model" if model is None else f"Model '{model.name}'"
        raise ValueError(_built_outside(trained, outside, strategy))


def _built_outside(model: str, outside: list[str], strategy) -> str:
    weights = "1 weight" if len(outside) == 1 else f"{len(outside)} weights"
    return (
        f"{model} was built outside the scope of the strategy that trains it. "
        f"{_required(strategy)}. Received: {weights} outside the scope, such as {outside[0]}. "
        "Build the model within `with strategy.scope():`, or write `model = "
        "tfparallel.data_parallel(model)`, which needs no scope."
    )


def _required(strategy) -> str:
    if strategy.num_replicas == 1:
        return "Weights that belong to the strategy are required"
    return f"A copy of each weight on each of {strategy.num_replicas} replicas is required"


def _outside(variables, strategy) -> list[str]:
    """The paths of the variables that do not belong to a strategy."""
    return [
        variable.path
        for variable in variables
        if getattr(_storage(variable), "distribute_strategy", None) is not strategy
    ]


def _storage(variable: keras.Variable):
    """The variable that stores the value of a Keras variable, or a share of it."""
    return variable.share.value if isinstance(variable, ShardedVariable) else variable.value


def _parts_outside(layer, strategy) -> list[str]:
    """The names of the outermost layers within a layer that lie wholly outside the strategy."""
    names = []
    for part in layers_in(layer, include_self=False, recursive=False):
        outside = _outside(part.variables, strategy)
        if outside and len(outside) == len(part.variables):
            names.append(part.name)
        elif outside:
            names += _parts_outside(part, strategy)
    return names


def _listed(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def check_data(x, batch_size, steps_per_epoch, method: str) -> None:
    """Raises for unusable training data.

    Args:
        x: The first argument of `fit`.
        batch_size: The requested global batch size, or None.
        steps_per_epoch: The requested steps, or None.
        method: The name of the caller, for messages.

    Raises:
        ValueError: If the global batch size is below 1, the data is empty, or it is infinite and
            `steps_per_epoch` is missing.
    """
    if batch_size is not None and (not isinstance(batch_size, numbers.Integral) or batch_size < 1):
        raise ValueError(
            f"The global batch size of `{method}` must be an integer of at least 1: the examples "
            f"of one step, over all replicas. Received: batch_size={batch_size!r}. Pass, for "
            "example, batch_size=64."
        )
    if isinstance(x, tf.data.Dataset):
        _check_dataset(x, steps_per_epoch, method)
        return
    leaves = [leaf for leaf in keras.tree.flatten(x) if getattr(leaf, "shape", ()) != ()]
    sizes = [leaf.shape[0] for leaf in leaves]
    if sizes and max(sizes) == 0:
        raise ValueError(
            f"The data given to `{method}` is empty. At least one example is required. Received: "
            f"arrays of {sizes} examples. Check how the data is loaded and filtered."
        )


def _check_dataset(dataset, steps_per_epoch, method):
    cardinality = int(dataset.cardinality())
    if cardinality == 0:
        raise ValueError(
            f"The data set given to `{method}` is empty. At least one batch is required. Received: "
            f"{dataset} of 0 batches. Check how the data is loaded, filtered and batched "
            "(`drop_remainder=True` drops a data set smaller than one batch)."
        )
    if cardinality == tf.data.INFINITE_CARDINALITY and steps_per_epoch is None:
        raise ValueError(
            f"The data set given to `{method}` is infinite, so an epoch would never end. "
            "`steps_per_epoch` is required with it. Received: steps_per_epoch=None. Pass "
            "steps_per_epoch, or remove `.repeat()` from the data set."
        )


def refuse_callbacks(callbacks, *, are_sharded: bool) -> None:
    """Raises for callbacks of `fit` that need whole values where replicas have shares.

    Args:
        callbacks: The callbacks.
        are_sharded: Whether the weights are also sharded over several workers.

    Raises:
        ValueError: If one swaps optimizer state with the weights, or reads the weights only on
            the chief.
    """
    if are_sharded and any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ValueError(
            "BackupAndRestore restores the weights on the chief only, but under shard='parameters' "
            "every worker must restore them. `tfparallel.callbacks.Checkpoint` is required. "
            "Received: BackupAndRestore. Use Checkpoint, which can also resume within an epoch."
        )
    if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks):
        raise ValueError(
            "SwapEMAWeights swaps the weights with their averages, but `shard` divides the "
            "averages between the replicas. An optimizer with whole averages is required. "
            "Received: SwapEMAWeights with `shard`. Remove one of them."
        )


def refuse_state(layer: keras.Layer, written: Sequence) -> Sequence:
    """Raises if one of several calls per update wrote variables; else returns an empty sequence."""
    if written:
        raise ValueError(
            "When the gradients of several steps are accumulated, a layer that changes its state "
            "in each call does so once per step; with one larger batch it would do so once per "
            f"update. Layers without such a state are required. Received: layer '{layer.name}', "
            f"which writes {len(written)} variables when it is called. Use sync='every_step', with "
            "the optimizer's `gradient_accumulation_steps`."
        )
    return written
