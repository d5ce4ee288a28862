"""Measures the memory per device, and the time, of sequences S times as long on S devices.

    .venv/bin/python benchmarks/long_sequences.py

Plain Keras trains a language model of two blocks on sequences of T positions and of S·T, and a mesh
of `sequence=S` trains it on those of S·T. Each run is a new process, whose S logical devices share
two cores. TensorFlow counts the memory of all devices of a process together.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

import contest

WIDTH, HEADS, WORDS, BATCH, SEED = 64, 8, 256, 1, 7
DEADLINE_SECONDS = 900
MIB = 2**20


def main(arguments):
    if arguments[:1] == ["--run"]:
        print(json.dumps(run(*map(int, arguments[1:]))))
        return
    options = parse(arguments)
    number, length = options.num_devices, options.length
    runs = {"short": (1, length), "long": (1, number * length), "ours": (number, number * length)}
    results = {name: {} for name in runs}
    for index in range(options.num_rounds):
        for name in contest.in_turn(list(runs), index):
            print(f"round {index}: {name}", file=sys.stderr)
            for key, value in in_a_process(*runs[name], options.num_steps).items():
                results[name].setdefault(key, []).append(value)
    figures = {
        "memory": results["ours"]["peak"][0] / number / results["short"]["peak"][0],
        "step": statistics.median(results["ours"]["step"])
        / statistics.median(results["long"]["step"]),
    }
    flags = ("num_devices", "length", "num_rounds", "num_steps")
    lines = page(results, runs, figures)
    contest.publish("long_sequences", lines, results, options, *flags, figures=figures)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=3)
    parser.add_argument("--num_devices", type=contest.positive, default=8, help="S (8)")
    parser.add_argument("--length", type=contest.positive, default=1024, help="T (1024)")
    parser.add_argument("--num_steps", type=contest.positive, default=4, help="timed steps (4)")
    return contest.parse(parser, arguments)


def in_a_process(number, length, num_steps):
    command = [sys.executable, __file__, "--run", str(number), str(length), str(num_steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, cwd=contest.TOP
    )
    if done.returncode:
        raise RuntimeError(f"a run failed, exit code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(number, length, num_steps):
    """Trains, and returns the peak bytes of tensors, the seconds of a step, and the loss."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import tfparallel

    tfparallel.devices.split_cpu(max(number, 2))
    keras.utils.set_random_seed(SEED)
    if number > 1:
        model = tfparallel.hybrid_parallel(lambda: build(length), {"sequence": number})
    else:
        model = build(length)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    random = np.random.default_rng(SEED)
    words = random.integers(0, WORDS, (BATCH, length + 1))
    seconds = []
    for _ in range(2 + num_steps):
        begun = time.perf_counter()
        value = model.train_on_batch(words[:, :-1], words[:, 1:])
        seconds.append(time.perf_counter() - begun)
        if len(seconds) == 1:  # Memory held while a step is prepared does not count.
            tf.config.experimental.reset_memory_stats("CPU:0")
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"peak": peak, "step": statistics.median(seconds[2:]), "loss": float(value)}


def build(length):
    import keras
    from keras import layers

    words = keras.Input((length,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(2):
        attend = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = layers.LayerNormalization()(x + attend(x, x, use_causal_mask=True))
        hidden = layers.Dense(4 * WIDTH, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))
    return keras.Model(words, layers.Dense(WORDS)(x))


def page(results, runs, figures):
    words = {"short": "plain Keras", "long": "plain Keras", "ours": "`Mesh(sequence=S)`"}
    rows = [
        [
            *(words[name], f"{length:,}", number),
            f"{statistics.median(results[name]['peak']) / MIB / number:,.0f} MiB",
            f"{statistics.median(results[name]['step']):.2f} s",
            f"{results[name]['loss'][0]:.6f}",
        ]
        for name, (number, length) in runs.items()
    ]
    head = ("what", "positions", "devices", "most memory, a device", "step", "loss at the end")
    reached = "reached" if figures["memory"] <= 1 else "**missed**"
    return [
        "## Long sequences",
        "",
        "A language model of two blocks, causal attention of 8 heads, one row a step; plain Keras",
        "on one device, and sequences divided over S. Written by `benchmarks/long_sequences.py`.",
        "",
        *contest.table(head, *rows),
        "",
        f"Memory a device over that of the short sequence: {figures['memory']:.2f}, to reach at "
        f"most 1: {reached}. Step over plain Keras's on the long one, on the same cores: "
        f"{figures['step']:.2f}.",
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    contest.run(main)
