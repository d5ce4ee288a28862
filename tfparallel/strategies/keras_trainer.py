"""Detects whether Keras's training loop or the user's own code calls the strategy.

Fills a gap of Keras 3 on TensorFlow: `fit`, `evaluate` and `predict` pass their steps and data sets
to `strategy.run` and `strategy.experimental_distribute_dataset` without naming the model, `compile`
does not call the strategy at all, and there is no hook. `calling_model` and `compiling_model` find
the model in the stack frames of the call. They rely on the modules of the trainer
(`seams.keras.TRAINER_MODULE`, `COMPILE_MODULE`); `tests/strategies/test_keras_trainer.py` fails
once one moves.
"""

import sys
import weakref

import keras
import tensorflow as tf

from tfparallel.seams.keras import (
    BATCH_NORMALIZATION_MODULE,
    COMPILE_MODULE,
    LOSS_MODULE,
    LOSS_SCALER,
    OPTIMIZER_MODULE,
    TRAINER_MODULE,
)

# Packages that may be on the stack between the strategy and Keras; others are the user's code.
_PASSED = ("keras", "tensorflow", "tfparallel", "contextlib", "functools", "optree", "tree")

# Options that change a gradient before the update, and must act after the reduction.
_BEFORE_UPDATE = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")

# For an optimizer in a custom loop.
MADE_OUTSIDE = (
    "The optimizer was created outside the scope of the strategy that runs the custom loop. An "
    "optimizer that belongs to this strategy is required."
)
MAKE_WITHIN = (
    "Create it within `with strategy.scope():`, or write `optimizer = "
    "tfparallel.distribute_optimizer(optimizer)` there."
)

# Replica contexts, each of one `strategy.run`, in which Keras divided a loss by their number.
_replicas_with_divided_losses = weakref.WeakSet()

# Replica contexts in which a batch normalization used the moments of all replicas.
_replicas_with_shared_moments = weakref.WeakSet()


def calling_model() -> keras.Model | None:
    """Returns the model whose Keras training loop is calling; None for any other caller."""
    return _caller(TRAINER_MODULE, keras.Model)


def compiling_model() -> keras.Model | None:
    """Returns the model that is being compiled, once its optimizer and losses are set."""
    model = _caller(COMPILE_MODULE, keras.Model)
    return model if model is not None and model.compiled else None


def refuse_made_outside(optimizer: keras.Optimizer, strategy) -> None:
    """Raises if an optimizer that updates in a replica belongs to another strategy, or to none.

    Raises:
        ValueError: In this case, since each replica would update the same slots.
    """
    if optimizer._distribution_strategy is not strategy:
        raise ValueError(f"{MADE_OUTSIDE} Received: {type(optimizer).__name__}. {MAKE_WITHIN}")


def refuse_unprepared_optimizer(strategy) -> None:
    """Raises if a Keras optimizer is calling whose update would differ from that on one device.

    Raises:
        ValueError: For an optimizer that was created outside the scope; or that clips or
            accumulates the gradient of each replica, and was not prepared by
            `tfparallel.distribute_optimizer`.
    """
    optimizer = _caller(OPTIMIZER_MODULE, keras.Optimizer)
    if optimizer is None or getattr(optimizer, "is_distributed", False):
        return
    refuse_made_outside(optimizer, strategy)
    received = {
        name: getattr(optimizer, name) for name in _BEFORE_UPDATE if getattr(optimizer, name, None)
    }
    if received:
        raise ValueError(
            f"{type(optimizer).__name__} clips or accumulates gradients, and in a custom loop it "
            "does so on each replica, before the replicas' gradients are summed, so the weights "
            "would differ from those of one device. The optimizer must be prepared first. "
            f"Received: {received}. Write `optimizer = "
            "tfparallel.distribute_optimizer(optimizer)`, or train with `model.fit`."
        )


def refuse_own_moments() -> None:
    """Raises if a batch normalization is calling that averages the moments of each replica.

    Raises:
        ValueError: If it is not synchronized, in a custom loop.
    """
    layer = _caller(BATCH_NORMALIZATION_MODULE, keras.layers.BatchNormalization)
    if layer is None:
        return
    if layer.synchronized:
        if not tf.distribute.in_cross_replica_context():
            _replicas_with_shared_moments.add(tf.distribute.get_replica_context())
        return
    raise ValueError(
        f"Layer '{layer.name}' normalizes each replica's rows by their own statistics in a custom "
        "loop, so the weights would differ from those of one device. Statistics of the global "
        "batch are required. Received: BatchNormalization(synchronized=False) under "
        "`strategy.run`. Pass `synchronized=True`, divide each replica's loss by the number of "
        "examples in the global batch before the tape ends (`tf.nn.compute_average_loss`), and "
        "call `reduce_gradients(gradients)` without a weight; or train with `model.fit`."
    )


def moments_are_shared() -> bool:
    """Whether a batch normalization in this replica used the moments of all replicas."""
    return tf.distribute.get_replica_context() in _replicas_with_shared_moments


def note_divided_loss() -> None:
    """Records whether a Keras loss object reads the number of replicas in this replica.

    Call it only in `num_replicas_in_sync`: it inspects the caller of its caller.
    """
    frame = sys._getframe(2)
    name = frame.f_globals.get("__name__"), frame.f_code.co_name
    if name == (LOSS_MODULE, LOSS_SCALER) and not tf.distribute.in_cross_replica_context():
        _replicas_with_divided_losses.add(tf.distribute.get_replica_context())


def refuse_divided_loss() -> None:
    """Raises if a Keras loss object divided its mean in this replica.

    Raises:
        ValueError: In this case, since the mean over the replicas would divide again.
    """
    replica = tf.distribute.get_replica_context()
    if replica not in _replicas_with_divided_losses:
        return
    number = replica.num_replicas_in_sync
    raise ValueError(
        "`reduce_gradients` with a weight requires gradients of the mean loss over this replica's "
        "own examples. Received: a step in which a Keras loss object, such as "
        "`keras.losses.MeanSquaredError()`, or `compute_loss` has divided its mean by the "
        f"{number} replicas, so the update would be 1/{number} of that on one device. Use the "
        "function (`tf.reduce_mean(keras.losses.mean_squared_error(y, outputs))`), or the object "
        'with `reduction="none"` and your own mean. An object that is only used for logging may be '
        "called after `reduce_gradients`."
    )


def _caller(module: str, owner_type: type):
    """Returns the object of `owner_type` whose method in `module` is calling."""
    frame = sys._getframe(2)
    while frame is not None:
        name, owner = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        if name == module and isinstance(owner, owner_type):
            return owner
        is_strategy = isinstance(owner, tf.distribute.Strategy)  # The user may subclass it.
        if name.partition(".")[0] not in _PASSED and not is_strategy:
            return None
        frame = frame.f_back
    return None
