"""One training of a parity check, and its results."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfparallel.callbacks.step_measures import SentBytes
from tfparallel.checkpoint.state import summed_values
from tfparallel.data.batches import batches_dataset
from tfparallel.diagnostics.compare import TOLERANCES, UNITS, owner_of_slot
from tfparallel.diagnostics.layers import turn_off_draws
from tfparallel.seams.keras import layers_in

Build = Callable[[], keras.Model]


@dataclasses.dataclass(frozen=True)
class State:
    """One weight, or one variable of an optimizer, after training.

    Attributes:
        path: Its Keras path.
        value: Its value.
        owner: The index in `model.weights` of the weight itself, or of the weight that a slot
            belongs to; None for other optimizer variables.
        kind: `"weight"`, or the kind of slot: `"adam/momentum"`.
    """

    path: str
    value: np.ndarray
    owner: int | None
    kind: str


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a training after one step.

    Attributes:
        states: Weights, then the optimizers' variables, by a key that is the same in every run
            (names are not: Keras numbers models and layers within a process).
        values: Losses and metrics, by name.
    """

    states: dict[tuple[int | None, str], State]
    values: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a training.

    Attributes:
        snapshots: Snapshots after steps 1, 2, 4, 8, … and the last, which also has the losses and
            metrics of `evaluate`.
        running_loss: Keras's running mean of the loss, one entry per step.
        sent_bytes: Bytes that a step passes to other workers, by kind; None without other workers.
        model: The trained model.
    """

    snapshots: dict[int, Snapshot]
    running_loss: list[float]
    sent_bytes: dict[str, int] | None
    model: keras.Model

    @property
    def last(self) -> Snapshot:
        """The snapshot at the end of the training."""
        return list(self.snapshots.values())[-1]


def plain(build_model: Build) -> keras.Model:
    """Builds the model on one device, as the reference."""
    return build_model()


class Trial:
    """Trains a model repeatedly from the same weights on the same batches.

    The arguments are those of `check_parity`.
    """

    def __init__(
        self,
        build_model: Build,
        compile_model: Callable[[keras.Model], None],
        batches: list[tuple[Any, ...]],
        seed: int,
    ):
        self._build_model = build_model
        self._compile_model = compile_model
        self._batches = batches
        self._seed = seed
        self._initial: list[np.ndarray] | None = None

    def build(self, *, draws: bool = True) -> keras.Model:
        """Returns the model with the initial weights, random layers on or off."""
        model = self._build_model()
        if not draws:
            turn_off_draws(model)
        if self._initial is not None and model.built:
            model.set_weights(self._initial)
        return model

    def run(
        self,
        make_model: Callable[[Build], keras.Model],
        *,
        draws: bool = True,
        moved_by: int = 0,
        in_float32: bool = False,
    ) -> Outcome:
        """Trains once.

        Args:
            make_model: Takes a function that builds the model; returns the model to train.
            draws: Whether random layers are on.
            moved_by: Units in the last place by which the initial weights are nudged; the seed
                determines the signs.
            in_float32: Whether to run layers that use mixed precision in float32 instead.

        Raises:
            ValueError: If the parallel model has different weights.
        """
        batches = self._batches
        keras.utils.set_random_seed(self._seed)
        with _computing_in_float32() if in_float32 else contextlib.nullcontext():
            model = make_model(lambda: self.build(draws=draws))
        if not model.built:
            with model.distribute_strategy.scope():
                model(batches[0][0])
        self._set_initial_weights(model)
        if moved_by:
            model.set_weights(_nudged_weights(model, moved_by, self._seed))
        self._compile_model(model)
        if not model.compiled:
            raise ValueError(
                "`compile_model` must compile the model it receives. Received: a model that is not "
                "compiled afterwards. Call `model.compile(optimizer=..., loss=...)` in it."
            )
        # Again, because building draws random numbers for each weight on every replica.
        keras.utils.set_random_seed(self._seed)
        sent = SentBytes()
        recorder = _Snapshots(len(batches))
        dataset = batches_dataset(batches)
        history = model.fit(dataset, shuffle=False, verbose=0, callbacks=[sent, recorder]).history
        evaluated = model.evaluate(dataset, verbose=0, return_dict=True)
        values = {f"fit: {name}": float(values[-1]) for name, values in history.items()}
        values |= {f"evaluate: {name}": float(value) for name, value in evaluated.items()}
        last = recorder.snapshots.get(len(batches))
        states = last.states if last is not None else _states(model)
        recorder.snapshots[len(batches)] = Snapshot(states, values)
        return Outcome(recorder.snapshots, recorder.running_loss, sent.in_a_step, model)

    def _set_initial_weights(self, model: keras.Model) -> None:
        if self._initial is None:
            self._initial = model.get_weights()
            return
        shapes = [tuple(value.shape) for value in self._initial]
        received = [tuple(weight.shape) for weight in model.weights]
        if shapes != received:
            raise ValueError(
                "A parallel model must have the same weights, in the same order, as on one device. "
                f"Received: shapes {received}; on one device: {shapes}."
            )
        model.set_weights(self._initial)


@contextlib.contextmanager
def _computing_in_float32() -> Iterator[None]:
    """Makes layers created in this context compute in float32, unless they specify a dtype."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _nudged_weights(model: keras.Model, num_units: int, seed: int) -> list[np.ndarray]:
    """Returns the weights, each nudged up or down at random by `num_units` in the last place.

    The unit is that of the coarsest dtype of the model: a float32 weight that is cast to bfloat16
    loses float32's last places. Zeros and integers do not change.
    """
    generator = np.random.default_rng(seed)
    move = num_units * UNITS[coarsest_dtype(model)]
    moved = []
    for weight in model.weights:
        value = weight.numpy()
        if keras.backend.is_float_dtype(weight.dtype):
            exact = value.astype("float64")
            # |x| = mantissa * 2**exponent with 1/2 <= mantissa < 1.
            moves = np.ldexp(move, np.frexp(exact)[1] - 1) * (exact != 0)
            signs = generator.choice([-1.0, 1.0], value.shape)
            value = (exact + signs * moves).astype(value.dtype)
        moved.append(value)
    return moved


def coarsest_dtype(model: keras.Model) -> str:
    """Returns the coarsest dtype in which a layer computes or a trainable weight is stored.

    The two can differ: Keras stores LoRA weights in float32 even in a float64 model.
    """
    layers = layers_in(model, include_self=False)
    types = {getattr(layer, "compute_dtype", None) for layer in layers}
    types |= {keras.backend.standardize_dtype(weight.dtype) for weight in model.trainable_weights}
    dtypes = [dtype for dtype in TOLERANCES if dtype in types]
    return dtypes[-1] if dtypes else keras.config.floatx()


class _Snapshots(keras.callbacks.Callback):
    """Takes snapshots after steps 1, 2, 4, 8, … and the last."""

    def __init__(self, num_steps: int):
        super().__init__()
        self.snapshots: dict[int, Snapshot] = {}
        self.running_loss: list[float] = []
        self._num_steps = num_steps
        self._next = 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        values = {f"fit: {name}": float(value) for name, value in (logs or {}).items()}
        if "fit: loss" in values:
            self.running_loss.append(values["fit: loss"])
        step = batch + 1  # The last of them, if `steps_per_execution` is above 1.
        if step >= self._next or step == self._num_steps:
            self.snapshots[step] = Snapshot(_states(self.model), values)
            self._next = 2 * step


def _states(model: keras.Model) -> dict[tuple[int | None, str], State]:
    states = {}
    for index, weight in enumerate(model.weights):
        states[index, "weight"] = State(weight.path, weight.numpy(), index, "weight")
    paths = [weight.path for weight in model.weights]
    summed = summed_values(model)
    for name, optimizer in _optimizers(model).items():
        for position, variable in enumerate(optimizer.variables):
            owner = owner_of_slot(variable.path, paths)
            slot = variable.path.rpartition("/")[2]
            if owner is None:
                kind = f"{name}/{slot}"
                # Two variables may share a name, such as the step counters of a
                # LossScaleOptimizer and of its inner optimizer.
                key = (None, kind if (None, kind) not in states else f"{kind}_{position}")
            else:
                kind = f"{name}/{slot.removeprefix(paths[owner].replace('/', '_') + '_')}"
                key = (owner, kind)
            value = summed[id(variable)] if id(variable) in summed else variable.numpy()
            states[key] = State(variable.path, value, owner, kind)
    return states


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    # A model with a custom train_step may have several.
    attributes = {"optimizer": getattr(model, "optimizer", None), **vars(model)}
    optimizers: dict[str, keras.optimizers.Optimizer] = {}
    for name, value in attributes.items():
        is_new = not any(value is other for other in optimizers.values())
        if isinstance(value, keras.optimizers.Optimizer) and is_new:
            optimizers[name] = value
    return optimizers
