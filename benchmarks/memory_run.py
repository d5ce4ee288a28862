"""One run of memory.py, in each of its processes: sets the limit, then trains.

    memory_run.py LIMIT NUM_LAYERS NUM_STEPS OUTPUT {plain|single|placed|start}

`plain` is Keras in one process, `placed` is `model_parallel` on all processes of the job, `single`
the same on one device, `start` measures training next to nothing. LIMIT is in bytes, 0 for none.
"""

import json
import os
import pathlib
import resource
import sys

WIDTH, BATCH, SEED = 4096, 16, 7
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
    import tfparallel

    devices = {"placed": tfparallel.connect_to_cluster, "single": lambda: ["CPU:0"]}.get(mode)
    devices = devices and devices()
    import keras

    from tfparallel.placement.report import held_by_device

    keras.utils.set_random_seed(SEED)
    if devices is None:
        model = build(num_layers)
    else:
        model = tfparallel.model_parallel(
            lambda: build(num_layers), devices=devices, batch_size=BATCH
        )
    history = trained(model, num_steps)
    report = {"loss": history["loss"][-1], "num_parameters": model.count_params()}
    if mode == "start":
        report["data_bytes"] = data_bytes()
    elif mode == "placed":
        model.save(output)
        report["held"] = held_by_device(model)
    else:
        model.save_weights(output)
    pathlib.Path(f"{output}.json").write_text(json.dumps(report))


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
