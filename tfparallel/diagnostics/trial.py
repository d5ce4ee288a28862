"""One training of a parity check, and everything that it leaves behind."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.data.batches import batches_dataset
from tfparallel.diagnostics.compare import owner_of_slot
from tfparallel.diagnostics.layers import turn_off_draws

__all__ = ["Build", "Outcome", "State", "Trial", "plain"]

Build = Callable[[], keras.Model]

# Below this fraction of the model's largest gradient a gradient is rounding
# noise in float32, whose sums of thousands of terms carry errors of 1e-7 each.
_NO_GRADIENT = 1e-6


@dataclasses.dataclass(frozen=True)
class State:
    """One weight, or one variable of an optimizer, after training.

    Attributes:
        path: Its Keras path.
        value: Its value.
        owner: The index, in `model.weights`, of the weight itself or of the
            one that a slot belongs to; None for the rest of an optimizer.
        kind: `"weight"`, or what the slot is: `"adam/momentum"`.
    """

    path: str
    value: np.ndarray
    owner: int | None
    kind: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training left behind.

    Attributes:
        states: Weights, then the optimizers' variables, by a key that is the
            same in every run: model and layer names count up within a process.
        values: Losses and metrics of `fit` and `evaluate`.
        running_loss: Keras's running mean of the loss, one entry a step.
        model: The trained model.
    """

    states: dict[tuple[int | None, str], State]
    values: dict[str, float]
    running_loss: list[float]
    model: keras.Model


def plain(build_model: Build) -> keras.Model:
    """Builds a model on one device: the form that all others are held against."""
    return build_model()


class Trial:
    """Trains a model again and again from the same weights on the same batches.

    Args:
        build_model: Returns the model, not compiled.
        compile_model: Compiles it in place.
        batches: The steps, each `(x, y[, sample_weight])` in NumPy arrays.
        seed: Seeds the weights and the random layers.
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
        held: frozenset[int] = frozenset(),
        num_steps: int | None = None,
    ) -> Outcome:
        """Trains once.

        Args:
            make_model: Puts a function that builds a model under a form.
            draws: Whether random layers draw.
            held: Weights that are not trained, by index in `model.weights`.
            num_steps: How many of the batches; all by default.

        Returns:
            The weights and everything else that came of it.

        Raises:
            ValueError: If the form gives a model with other weights.
        """
        batches = self._batches[:num_steps]
        keras.utils.set_random_seed(self._seed)
        model = make_model(lambda: self.build(draws=draws))
        if not model.built:
            model(batches[0][0])
        self._set_initial_weights(model)
        for index in held:
            model.weights[index].trainable = False
        self._compile_model(model)
        # Again: building draws as often as there are weights, on every replica.
        keras.utils.set_random_seed(self._seed)
        losses = _RunningLoss()
        dataset = batches_dataset(batches)
        history = model.fit(dataset, shuffle=False, verbose=0, callbacks=[losses]).history
        evaluated = model.evaluate(dataset, verbose=0, return_dict=True)
        values = {f"fit: {name}": float(values[-1]) for name, values in history.items()}
        values |= {f"evaluate: {name}": float(value) for name, value in evaluated.items()}
        return Outcome(_states(model), values, losses.values, model)

    def without_gradient(self, outcome: Outcome) -> frozenset[int]:
        """Returns the trained weights whose true gradient is zero.

        A bias before batch normalization or the bias of an attention key
        changes nothing: what is computed as its gradient is rounding noise,
        and an optimizer such as Adam scales noise up to full steps. Such a
        weight has a gradient that is tiny against the others', both before
        and after training (a layer whose weights start at zero has none
        before).

        Args:
            outcome: A training on one device.

        Returns:
            Their indices in `model.weights`.
        """
        batch = self._batches[0]
        fresh = self.build()
        if not fresh.built:
            fresh(batch[0])
            fresh.set_weights(self._initial)
        self._compile_model(fresh)
        # The trained model's moving statistics change in this; it is thrown away.
        before, after = _gradient_sizes(fresh, batch), _gradient_sizes(outcome.model, batch)
        if not before or not after:
            return frozenset()
        floors = [_NO_GRADIENT * max(sizes.values()) for sizes in (before, after)]
        return frozenset(
            index for index in before if before[index] <= floors[0] and after[index] <= floors[1]
        )

    def _set_initial_weights(self, model: keras.Model) -> None:
        if self._initial is None:
            self._initial = model.get_weights()
            return
        shapes = [tuple(value.shape) for value in self._initial]
        received = [tuple(weight.shape) for weight in model.weights]
        if shapes != received:
            raise ValueError(
                "The form must keep the model's weights and their order. "
                f"Received: shapes {received}; on one device they are {shapes}."
            )
        model.set_weights(self._initial)


class _RunningLoss(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if logs and "loss" in logs:
            self.values.append(float(logs["loss"]))


def _states(model: keras.Model) -> dict[tuple[int | None, str], State]:
    states = {}
    for index, weight in enumerate(model.weights):
        states[index, "weight"] = State(weight.path, weight.numpy(), index, "weight")
    paths = [weight.path for weight in model.weights]
    for name, optimizer in _optimizers(model).items():
        for position, variable in enumerate(optimizer.variables):
            owner = owner_of_slot(variable.path, paths)
            slot = variable.path.rpartition("/")[2]
            if owner is None:
                kind = f"{name}/{slot}"
                # Two variables of one name, such as the two counters of a
                # LossScaleOptimizer and its inner one.
                key = (None, kind if (None, kind) not in states else f"{kind}_{position}")
            else:
                kind = f"{name}/{slot.removeprefix(paths[owner].replace('/', '_') + '_')}"
                key = (owner, kind)
            states[key] = State(variable.path, variable.numpy(), owner, kind)
    return states


def _optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    # A model with its own train_step may hold several.
    held = {"optimizer": getattr(model, "optimizer", None), **vars(model)}
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, value in held.items():
        is_new = not any(value is other for other in found.values())
        if isinstance(value, keras.optimizers.Optimizer) and is_new:
            found[name] = value
    return found


def _gradient_sizes(model: keras.Model, batch: tuple[Any, ...]) -> dict[int, float]:
    """The largest gradient of each weight that a step hands to an optimizer, eagerly run."""
    positions = {id(weight): index for index, weight in enumerate(model.weights)}
    sizes: dict[int, float] = {}

    def watch(optimizer):
        apply = optimizer.apply

        def watched(grads, trainable_variables=None):
            grads = list(grads)
            held = trainable_variables or optimizer._trainable_variables
            for weight, gradient in zip(held, grads, strict=False):
                if gradient is not None and id(weight) in positions:
                    largest = np.max(np.abs(tf.convert_to_tensor(gradient)), initial=0.0)
                    index = positions[id(weight)]
                    sizes[index] = max(sizes.get(index, 0.0), float(largest))
            return apply(grads, trainable_variables)

        object.__setattr__(optimizer, "apply", watched)

    for optimizer in _optimizers(model).values():
        watch(optimizer)
    model.run_eagerly = True
    model.train_function = None
    model.fit(batches_dataset([batch]), shuffle=False, verbose=0)
    return sizes
