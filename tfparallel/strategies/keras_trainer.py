"""Who is calling the strategy: Keras's own training loop, or the user's.

Answers one gap of Keras 3 on TensorFlow: `fit`, `evaluate` and `predict` hand their steps and
data sets to `strategy.run` and `strategy.experimental_distribute_dataset` without saying for
which model, and there is no hook for a strategy that wants to know. `calling_model` finds the
model in the frames of the call. It rests on the place of the trainer
(`keras.src.backend.tensorflow.trainer`); `tests/strategies/test_keras_trainer.py` fails on the
day that it moves.
"""

import sys

import keras

_TRAINER_MODULE = "keras.src.backend.tensorflow.trainer"
_NUM_FRAMES = 16  # From the strategy up to `fit`; tracing puts some 10 frames in between.

# What an optimizer does to a gradient before the update, and must do after the reduction.
_BEFORE_UPDATE = ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")


def calling_model() -> keras.Model | None:
    """Returns the model whose Keras training loop is calling, or None for anyone else."""
    frame = sys._getframe(2)
    for _ in range(_NUM_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _TRAINER_MODULE:
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.Model):
                return owner
        frame = frame.f_back
    return None


def refuse_unprepared_optimizer(update, strategy) -> None:
    """Raises if a Keras optimizer clips or accumulates each replica's own gradient.

    Args:
        update: The function that the optimizer gave to `strategy.extended.update`; its closure
            holds the optimizer.
        strategy: The strategy; in a program gradients are global, and nothing is refused.

    Raises:
        ValueError: In a custom loop, for an optimizer that clips or accumulates and was not
            prepared by `tfparallel.distribute_optimizer`.
    """
    if strategy.program_is_running:
        return
    optimizer = _optimizer_of(update)
    if optimizer is None or getattr(optimizer, "is_distributed", False):
        return
    received = {
        name: getattr(optimizer, name) for name in _BEFORE_UPDATE if getattr(optimizer, name, None)
    }
    if received:
        raise ValueError(
            f"{type(optimizer).__name__} clips or accumulates gradients, and in a custom loop it "
            "does so on each replica, before the replicas' gradients are summed: the weights would "
            "differ from one device's. The optimizer must be prepared first. Received: "
            f"{received}. Write `optimizer = tfparallel.distribute_optimizer(optimizer)`, or train "
            "with `model.fit`."
        )


def _optimizer_of(update):
    names = getattr(getattr(update, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(update, "__closure__", None) or (), strict=False):
        if name == "self" and isinstance(cell.cell_contents, keras.Optimizer):
            return cell.cell_contents
    return None
