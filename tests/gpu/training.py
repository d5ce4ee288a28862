"""Trains a small network for `make test-gpu`, and compares it with one device."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tests.gpu.networks import Network
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.model_parallel import model_parallel
from tfparallel.replication.data_parallel import data_parallel

TOLERANCE = 1e-3  # Of float32, after some steps of plain SGD; a fault makes 1e-2 and more.
_ROUNDS = 3  # Through the batches.


class Trained(NamedTuple):
    """What came of a training.

    Attributes:
        weights: The model's weights.
        num_steps: How many steps it had.
        num_updates: How many of them changed the weights: a loss scale skips those that overflow.
    """

    weights: list[np.ndarray]
    num_steps: int
    num_updates: int


def kinds(names: list[str]) -> dict[str, Callable[[keras.Model], keras.Model]]:
    """Returns by name what puts a model on devices."""
    pair = names[:2]
    return {
        "data_parallel": lambda model: data_parallel(model, devices=names),
        "model_parallel": lambda model: model_parallel(model, devices=pair),
        "tensor_parallel": lambda model: tensor_parallel(model, devices=pair),
        "pipeline_parallel": lambda model: pipeline_parallel(
            model, devices=pair, num_micro_batches=2, schedule="gpipe"
        ),
    }


def trained(
    network: Network,
    make: Callable[[keras.Model], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.05),
    **options,
) -> Trained:
    """Trains a network from one seed, in the precision that is set.

    Args:
        network: The network and its batches.
        make: Makes the model parallel.
        optimizer: Returns the optimizer.
        options: Further arguments of `compile`.

    Raises:
        RuntimeError: If the model computes in another precision.
    """
    policy = keras.config.dtype_policy()
    keras.backend.clear_session()  # This resets the policy, too.
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = make(network.build())
    if (computes_in := model.layers[-1].compute_dtype) != policy.compute_dtype:
        raise RuntimeError(
            f"The last layer must compute in {policy.compute_dtype}. Received: {computes_in}."
        )
    model.compile(optimizer(), network.loss, **options)
    batches = network.batches() * _ROUNDS
    repeats = options.get("steps_per_execution", 1)
    for x, y in batches:
        data = tf.data.Dataset.from_tensors((x, y)).repeat(repeats)
        model.fit(data, epochs=1, shuffle=False, verbose=0)
    scaled = model.optimizer
    updates = getattr(scaled, "inner_optimizer", scaled).iterations
    return Trained(model.get_weights(), len(batches) * repeats, int(updates))


def apart(expected: list[np.ndarray], received: list[np.ndarray]) -> float:
    """Returns the largest difference of two lists of arrays, relative to each array's largest."""
    largest = 0.0
    for array, value in zip(expected, received, strict=True):
        if np.issubdtype(array.dtype, np.floating) and array.size:
            scale = max(np.max(np.abs(array)), 1e-3)
            # A NaN, which no comparison finds, is a difference without end.
            largest = max(
                largest, float(np.nan_to_num(np.max(np.abs(array - value)), nan=np.inf)) / scale
            )
    return largest


def compared(expected: Trained, received: Trained, tolerance: float = TOLERANCE) -> str:
    """Returns in words that a training gave what one device's gave.

    Raises:
        AssertionError: If it did not.
    """
    if received.num_updates != expected.num_updates:
        raise AssertionError(
            f"{received.num_updates} updates in {received.num_steps} steps; "
            f"on one device {expected.num_updates}"
        )
    largest = apart(expected.weights, received.weights)
    if not largest <= tolerance:
        raise AssertionError(f"weights differ by {largest:.1e} from one device's")
    return f"the weights of one device, up to {largest:.0e}"
