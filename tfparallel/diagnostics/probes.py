"""The doctor's probes of TensorFlow and Keras, which run in subprocesses.

    python -m tfparallel.diagnostics.probes NAME [NAME …]

prints a line of JSON for each. A probe reproduces a known fault: it trains the same small network
on one device, with TensorFlow's strategy and with tfparallel's, and compares the weights.
`cluster_probe.py` starts the probes of several workers, and does not import TensorFlow itself.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel import devices
from tfparallel.replication.drop_in_strategies import MirroredStrategy, MultiWorkerMirroredStrategy

# Logical CPUs, so that the probes run on any machine, even while a job uses its GPUs.
_DEVICES = ["CPU:0", "CPU:1"]
_ERROR_CHARACTERS = 2000
# How each known fault trains.
_FAULTS: dict[str, dict[str, Any]] = {
    # Keras's accumulation, which crashes if a replica calls `merge_call` (keras#20582).
    "gradient_accumulation": {
        "optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    },
    # Several steps per call, in control flow that breaks the collectives (keras#19246).
    "steps_per_execution": {"steps_per_execution": 2},
    # Clipping, which happens on each replica before the sum.
    "gradient_clipping": {"optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01)},
    # A last batch that does not divide by the number of replicas.
    "uneven_batches": {"num_examples": 41},
}


def installation() -> dict[str, Any]:
    """Runs an operation on each device; returns the versions and the devices."""
    build = tf.sysconfig.get_build_info()
    result = {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        # Without the second logical CPU, which the probes create.
        "devices": [name for name in devices.list_devices() if name not in _DEVICES[1:]],
        "cuda": build.get("cuda_version") if build.get("is_cuda_build") else None,
    }
    for device in result["devices"]:
        with tf.device(device):
            tf.debugging.assert_equal(tf.reduce_sum(tf.ones([2, 2]) @ tf.ones([2, 2])), 8.0)
    return result


def trained_by_workers(whose: str) -> dict[str, Any]:
    """Runs `fit` in one of several workers; returns the deviation from one device.

    `whose` selects the strategy: "ours", or "theirs" for TensorFlow's (keras#20585).
    """
    strategies = {"ours": MultiWorkerMirroredStrategy}
    strategies["theirs"] = tf.distribute.MultiWorkerMirroredStrategy
    weights = _train(strategies[whose]().scope())
    # Runs after the strategy, which must be created before any computation.
    return _difference(_train(contextlib.nullcontext()), lambda: weights)


def main(names: Sequence[str]) -> None:
    """Runs probes one after the other, and prints their results."""
    if set(names) != {"installation"}:
        devices.split_cpu(len(_DEVICES))
    for name in names:
        result = installation() if name == "installation" else _compare(**_FAULTS[name])
        print(json.dumps({"probe": name, **result}), flush=True)


def _compare(**options) -> dict[str, Any]:
    expected = _train(tf.device(_DEVICES[0]), **options)
    return {
        "theirs": _difference(
            expected, lambda: _train(tf.distribute.MirroredStrategy(_DEVICES).scope(), **options)
        ),
        "ours": _difference(
            expected, lambda: _train(MirroredStrategy(_DEVICES).scope(), **options)
        ),
    }


def _difference(expected, train) -> dict[str, Any]:
    """Returns the largest difference of a weight, or the error that training raised."""
    try:
        weights = train()
    # Any error is a valid outcome of the probe.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
    pairs = zip(weights, expected, strict=True)
    return {"difference": max(float(np.max(np.abs(ours - alone))) for ours, alone in pairs)}


def _train(scope, *, optimizer=None, num_examples=48, **compile_options) -> list[np.ndarray]:
    """Trains a small network in float64, where reordered sums make no relevant difference.

    XLA is off: if there is a GPU, Keras compiles for it, but these weights are on the CPU.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 8))
    y = x.sum(axis=1, keepdims=True)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        options = {"jit_compile": False, **compile_options}
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), "mse", **options)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


if __name__ == "__main__":
    main(sys.argv[1:])
