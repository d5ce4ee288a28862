"""One run of memory.py or sharded_memory.py, in each process: sets the limit, then trains.

    memory_run.py LIMIT NUM_LAYERS NUM_STEPS OUTPUT {plain|single|placed|start|whole|shares}

`plain` is Keras in one process, `placed` is `model_parallel` on all processes of the job, `single`
the same on one device, `start` measures training next to nothing. LIMIT is in bytes, 0 for none.

`whole` is Keras in one process, and writes its weights beside OUTPUT. `shares` is
`data_parallel(shard="parameters")` on all processes of the job; if there are such weights, its own
are compared with them, one after another.
"""

import json
import os
import pathlib
import resource
import sys
import threading

import numpy as np

WIDTH, BATCH, SEED = 4096, 16, 7
WITH_PEAK = ("whole", "shares")
# RLIMIT_DATA counts what is reserved. TensorFlow's hundred threads would reserve 8 MiB each;
# malloc, once it has seen a large array, would keep what is freed; and oneDNN's allocator takes
# regions each twice the last.
STACK_BYTES = 2 * 2**20
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


def main(limit, num_layers, num_steps, output, mode):
    reserve_little()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # Before TensorFlow takes any.
    peak = PeakData() if mode in WITH_PEAK else None
    import tfparallel

    devices = {"placed": tfparallel.connect_to_cluster, "single": lambda: ["CPU:0"]}.get(mode)
    devices = devices and devices()
    import keras

    from tfparallel.placement.report import held_by_device

    keras.utils.set_random_seed(SEED)
    if mode == "shares":
        model = tfparallel.data_parallel(lambda: build_large(num_layers), shard="parameters")
    elif devices is None:
        model = build_large(num_layers) if mode == "whole" else build(num_layers)
    else:
        model = tfparallel.model_parallel(
            lambda: build(num_layers), devices=devices, batch_size=BATCH
        )
    history = trained(model, num_steps)
    report = {"loss": history["loss"][-1], "num_parameters": model.count_params()}
    if peak is not None:
        report["peak_data_bytes"] = peak.stop()
        report["largest"] = compared(model, output, mode)
        if mode == "shares" and tfparallel.worker_index():
            return
    elif mode == "start":
        report["data_bytes"] = data_bytes()
    elif mode == "placed":
        model.save(output)
        report["held"] = held_by_device(model)
    else:
        model.save_weights(output)
    pathlib.Path(f"{output}.json").write_text(json.dumps(report))


def compared(model, output, mode):
    """Writes the weights, or returns the largest difference from those that were written."""
    largest = 0.0
    for index, weight in enumerate(model.weights):
        path = pathlib.Path(output).with_name(f"weight_{index}.npy")
        if mode == "whole":
            np.save(path, weight)
            continue
        value = np.asarray(weight.value)  # All workers read it, each of which has a share.
        if path.exists():
            expected = np.load(path, mmap_mode="r")
            size = float(np.max(np.abs(expected))) or 1.0
            largest = max(largest, float(np.max(np.abs(value - expected))) / size)
    return largest


def trained(model, num_steps):
    """Trains a model for some steps; returns Keras's history."""
    import keras
    from sklearn.datasets import load_digits

    model.compile(
        # A gradient near zero, whose sign is rounding, must not move its weight by a full step.
        keras.optimizers.Adam(1e-4, epsilon=1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    digits = load_digits()
    number = num_steps * BATCH
    x, y = digits.data[:number].astype("float32") / 16, digits.target[:number]
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=2).history


def build(num_layers):
    """Returns dense layers with skip connections, so that depth does not affect training.

    The activation has a smooth slope. The slope of ReLU jumps where rounding moves one of the
    millions of units here past zero, and such a jump is no rounding error in the optimizer's state.
    """
    import keras
    from keras import layers

    inputs = keras.Input((64,), name="pixels")
    x = layers.Dense(WIDTH, name="first")(inputs)
    for index in range(num_layers):
        y = layers.LayerNormalization(name=f"norm{index}")(x)
        y = layers.Dense(WIDTH, activation="gelu", name=f"dense{index}")(y)
        x = layers.Add(name=f"add{index}")([x, y])
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="wide")


def build_large(num_layers):
    """Returns dense layers with skip connections: one large weight per layer.

    The activation is smooth, so that rounding cannot switch a unit on or off. Each layer adds
    little, so that the outputs do not grow with the number of layers.
    """
    import keras
    from keras import layers

    inputs = keras.Input((64,), name="pixels")
    x = layers.Dense(WIDTH, name="first")(inputs)
    for index in range(num_layers):
        y = layers.Dense(
            WIDTH,
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
            self._most = max(self._most, data_bytes())

    def stop(self):
        """Ends the sampling, and returns the most that was counted."""
        self._ended.set()
        self._thread.join()
        return self._most


def reserve_little():
    """Restarts this program once, with small stacks and a malloc that returns memory."""
    if all(os.environ.get(name) == value for name, value in ENVIRONMENT.items()):
        return
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        del os.environ[name]  # `launch` makes malloc keep freed memory, for speed.
    os.environ.update(ENVIRONMENT)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    os.execv(sys.executable, [sys.executable, *sys.argv])


def data_bytes():
    """The bytes of this process that RLIMIT_DATA counts."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


if __name__ == "__main__":
    *numbers, output, mode = sys.argv[1:]
    main(*map(int, numbers), output, mode)
