"""One run of sharded_memory.py, in each process: sets the limit, then trains.

    sharded_memory_run.py LIMIT NUM_LAYERS NUM_STEPS OUTPUT {plain|shares}

`plain` is Keras in one process, and writes its weights beside OUTPUT. `shares` is
`data_parallel(shard="parameters")` on all processes of the job; if there are such weights, its own
are compared with them, one after another. LIMIT is in bytes, 0 for none.
"""

import json
import pathlib
import resource
import sys
import threading

import memory_run
import numpy as np


def main(limit, num_layers, num_steps, output, mode):
    memory_run.reserve_little()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # Before TensorFlow takes any.
    peak = PeakData()
    import keras

    import tfparallel

    keras.utils.set_random_seed(memory_run.SEED)
    if mode == "shares":
        model = tfparallel.data_parallel(lambda: build(num_layers), shard="parameters")
    else:
        model = build(num_layers)
    history = memory_run.trained(model, num_steps)
    report = {"loss": history["loss"][-1], "num_parameters": model.count_params()}
    report["peak_data_bytes"] = peak.stop()
    largest, is_chief = 0.0, mode == "plain" or tfparallel.worker_index() == 0
    for index, weight in enumerate(model.weights):
        path = pathlib.Path(output).with_name(f"weight_{index}.npy")
        if mode == "plain":
            np.save(path, weight)
            continue
        value = np.asarray(weight.value)  # All workers read it, each of which has a share.
        if is_chief and path.exists():
            expected = np.load(path, mmap_mode="r")
            size = float(np.max(np.abs(expected))) or 1.0
            largest = max(largest, float(np.max(np.abs(value - expected))) / size)
    if is_chief:
        report["largest"] = largest
        pathlib.Path(f"{output}.json").write_text(json.dumps(report))


def build(num_layers):
    """Returns dense layers with skip connections: one large weight per layer.

    The activation is smooth, so that rounding cannot switch a unit on or off. Each layer adds
    little, so that the outputs do not grow with the number of layers.
    """
    import keras
    from keras import layers

    inputs = keras.Input((64,), name="pixels")
    x = layers.Dense(memory_run.WIDTH, name="first")(inputs)
    for index in range(num_layers):
        y = layers.Dense(
            memory_run.WIDTH,
            activation="gelu",
            use_bias=False,
            kernel_initializer=keras.initializers.VarianceScaling(0.02),
            name=f"dense{index}",
        )(x)
        x = layers.Add(name=f"add{index}")([x, y])
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="wide")


class PeakData:
    """Samples what RLIMIT_DATA counts, which the system keeps no maximum of."""

    def __init__(self):
        self._most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self):
        while not self._ended.wait(0.01):
            self._most = max(self._most, memory_run.data_bytes())

    def stop(self):
        """Ends the sampling, and returns the most that was counted."""
        self._ended.set()
        self._thread.join()
        return self._most


if __name__ == "__main__":
    *numbers, output, mode = sys.argv[1:]
    main(*map(int, numbers), output, mode)
