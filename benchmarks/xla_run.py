"""One way of xla.py, in its process.

    xla_run.py NETWORK WAY GPU|CPU PRECISION MEMORY_MIB WARM_STEPS STEPS

compiles and prints the cost of the first step, as JSON; waits for a line; continues to train, and
prints all results. MEMORY_MIB is that of a part of the GPU, or 0 for all of it.
"""

import collections
import contextlib
import json
import resource
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tfparallel

COMPILED_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
NUM_STAGE_PIECES = 2  # Micro-batches.
SIZES = {
    "resnet50": {"GPU": (32, 224, 1000), "CPU": (4, 64, 10)},  # Rows a replica, pixels, classes.
    # Rows a replica, blocks, width, tokens, words.
    "transformer": {"GPU": (16, 6, 512, 256, 8192), "CPU": (4, 2, 32, 16, 100)},
}


def resnet50(rows, pixels, num_classes):
    """ResNet-50 (He et al., 2016): the function that builds it, and a batch."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, pixels, pixels, 3)).astype("float32")
    return lambda: keras.applications.ResNet50(
        weights=None,
        input_shape=(pixels, pixels, 3),
        classes=num_classes,
        classifier_activation=None,
    ), (x, draw.integers(0, num_classes, rows))


def transformer(rows, num_blocks, width, num_tokens, num_words):
    """A transformer that predicts the next word (Vaswani et al., 2017), and a batch."""
    layers = keras.layers

    def build():
        words = keras.Input((num_tokens,), dtype="int32")
        x = layers.Embedding(num_words, width)(words)
        for _ in range(num_blocks):
            y = layers.LayerNormalization()(x)
            y = layers.MultiHeadAttention(8, width // 8)(y, y, use_causal_mask=True)
            x = layers.Add()([x, y])
            y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(width)(y)])
        return keras.Model(words, layers.Dense(num_words)(layers.LayerNormalization()(x)))

    words = np.random.default_rng(0).integers(0, num_words, (rows, num_tokens + 1))
    return build, (words[:, :-1].astype("int32"), words[:, 1:])


def replicated(build, devices, **options):
    return tfparallel.data_parallel(build, devices=devices, **options)


# (devices, times the batch, `jit_compile`, what makes the model of `build` and the devices).
WAYS = {
    "plain": (1, 1, True, lambda build, devices: build()),
    "one": (1, 1, True, lambda build, devices: build()),
    "two": (2, 2, True, lambda b, d: replicated(b, d, synchronize_batch_norm=True)),
    "two_own": (2, 2, True, lambda b, d: replicated(b, d, synchronize_batch_norm=False)),
    "two_uncompiled": (2, 2, False, lambda b, d: replicated(b, d, synchronize_batch_norm=True)),
    "mirrored": (2, 2, False, lambda build, devices: build()),
    "model": (2, 1, True, lambda b, d: tfparallel.model_parallel(b(), d)),
    "tensor": (2, 1, True, lambda b, d: tfparallel.tensor_parallel(b(), d)),
    "pipeline": (2, 1, True, lambda b, d: tfparallel.pipeline_parallel(b(), d, NUM_STAGE_PIECES)),
}
SCOPES = {"one": tfparallel.MirroredStrategy, "mirrored": tf.distribute.MirroredStrategy}


class Steps(keras.callbacks.Callback):
    """Times each step up to its loss, for which the host waits."""

    def __init__(self):
        super().__init__()
        self.seconds, self.losses, self._begin = [], [], 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.seconds.append(time.perf_counter() - self._begin)


def main(network, way, kind, precision, memory_mib, num_warm_steps, num_steps):
    num_devices, times, is_compiled, make = WAYS[way]
    devices = devices_of(kind, num_devices, memory_mib)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
    build, batch = globals()[network](*SIZES[network][kind])
    # Each replica has the same rows, so that the first loss of every way is that of `plain`. The
    # next ones are of one another where the batch is as large: Keras's Adam squares the gradients
    # of an embedding slice by slice, so that to repeat rows changes an update.
    x, y = (np.concatenate([array] * times) for array in batch)
    row = {"network": network, "way": way, "precision": precision, "rows": len(x)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with SCOPES[way](devices).scope() if way in SCOPES else contextlib.nullcontext():
        model = make(build, devices)
        model.compile("adam", loss, jit_compile=is_compiled)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    steps = Steps()

    def fit(number):
        model.fit(data, steps_per_epoch=number, verbose=0, callbacks=[steps])

    begin, cpu = time.perf_counter(), cpu_seconds()
    row["programs"] = programs_of(lambda: fit(1))
    row["first_seconds"] = round(time.perf_counter() - begin, 1)
    row["first_cpu_seconds"] = round(cpu_seconds() - cpu, 1)
    row["losses"] = list(steps.losses)
    print(json.dumps(row), flush=True)
    sys.stdin.readline()  # Until nothing else runs.
    fit(num_warm_steps)
    row["losses"] += steps.losses[1:3]  # Keras's: the mean of this `fit` so far.
    steps.seconds.clear()
    begin, cpu = time.perf_counter(), cpu_seconds()
    fit(num_steps)
    row["step_cpu_ms"] = round(1e3 * (cpu_seconds() - cpu) / num_steps, 1)
    row["step_ms"] = round(1e3 * statistics.median(steps.seconds), 2)
    row["peak_mib"] = peak_mib(devices, kind)
    print(json.dumps(row), flush=True)


def devices_of(kind, number, memory_mib):
    if kind == "CPU":
        return tfparallel.devices.split_cpu(number)[:number]
    if number == 1 and not memory_mib:
        return ["GPU:0"]
    return tfparallel.devices.split_gpu(number, memory_mib or None)[:number]


def programs_of(train):
    """Trains, and returns how many XLA programs a step has on each device.

    A program is a cluster of marked operations or a call that must be compiled. Both appear in the
    graphs that TensorFlow runs, which only a private interface shows: the one that
    `tf.summary.trace_on` uses.
    """
    context.enable_graph_collection()
    try:
        context.export_run_metadata()  # Discards what was collected.
        train()
        functions = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    counts = [
        collections.Counter(
            node.device.rpartition("device:")[2]
            for graph in function.partition_graphs
            for node in graph.node
            if node.op == "_XlaCompile"
            or (node.op in COMPILED_CALLS and node.attr["_XlaMustCompile"].b)
        )
        for function in functions
    ]
    return dict(sorted(max(counts, key=lambda count: count.total()).items()))  # The step's.


def cpu_seconds():
    """The processor time of this process and of its compilers that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_mib(devices, kind):
    """Returns the peak of each GPU's tensors, or of the process where there is none."""
    if kind == "CPU":
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
    info = tf.config.experimental.get_memory_info
    return {device: info(device)["peak"] >> 20 for device in devices}


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
