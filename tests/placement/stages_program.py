"""What the processes of a job run in test_processes.py: process 0 goes on, the others serve.

python stages_program.py OUTPUT.json [kill]
"""

import json
import os
import signal
import sys

import numpy as np

import tfparallel

SEED, BATCH = 7, 10


def build():
    import keras
    from keras import layers

    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", name="first", kernel_regularizer="l2")(inputs)
    y = layers.BatchNormalization(name="normalize")(x)
    y = layers.Dropout(0.3, name="drop")(y)
    y = layers.Dense(8, name="second")(y)
    return keras.Model(inputs, layers.Dense(3, name="logits")(layers.Add(name="skip")([x, y])))


def compiled(model):
    import keras

    model.compile(
        keras.optimizers.AdamW(global_clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def trained(model, **kwargs):
    import keras

    draw = np.random.default_rng(0)
    keras.utils.set_random_seed(SEED)
    data = draw.normal(size=(44, 6)), draw.integers(0, 3, 44)
    model.fit(*data, epochs=3, batch_size=BATCH, verbose=0, **kwargs)
    return model


def process_ids(devices):
    import tensorflow as tf

    ids = []
    for device in devices:
        with tf.device(device):
            status = tf.io.read_file("/proc/self/status").numpy().decode()
        ids.append(int(status.split("\nPid:")[1].split()[0]))
    return ids


def main(output, *flags):
    devices = tfparallel.connect_to_cluster(start_timeout=60)
    import keras

    from tfparallel.placement.report import held_by_device

    keras.config.set_floatx("float64")
    ids = process_ids(devices)
    models = []
    for place in (None, devices):
        keras.utils.set_random_seed(SEED)
        model = tfparallel.model_parallel(build, devices=place) if place else build()
        models.append(compiled(model))
    plain, placed = models
    if flags:
        victim = len(devices) - 1
        kill = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda step, logs: (
                os.kill(ids[victim], signal.SIGKILL) if step == 3 else None
            )
        )
        trained(placed, callbacks=[kill])
        raise AssertionError("the training went on without a process")
    trained(plain), trained(placed)
    placed.save(f"{output}.keras")
    report = tfparallel.placement_report(placed, (np.zeros((BATCH, 6)), np.zeros(BATCH)))
    differences = [
        float(np.abs(one.numpy() - other.numpy()).max())
        for one, other in zip(plain.variables, placed.variables, strict=True)
    ]
    with open(output, "w") as file:
        json.dump(
            {
                "devices": devices,
                "processes": ids,
                "num_interop_threads": os.environ["TF_NUM_INTEROP_THREADS"],
                "differences": differences,
                "audited": report.num_audited,
                "elsewhere": [str(noted) for noted in report.elsewhere],
                "held": held_by_device(placed),
                "weights": [weight.tolist() for weight in placed.get_weights()],
                "history": [plain.history.history, placed.history.history],
            },
            file,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
