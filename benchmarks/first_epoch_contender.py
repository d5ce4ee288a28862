"""One contender of `first_epoch.py`: a process that trains a model's first epoch, and ends."""

import functools
import statistics
import time

import dialog

SEED = 7
NUM_DEVICES, NUM_MICRO_BATCHES = 2, 8
NUM_STEPS, NUM_IMAGES, NUM_PIXELS, NUM_CLASSES = 8, 32, 64, 10


def image_task():
    """Returns MobileNetV2 for 64 pixels, and as many images as it reads in an epoch."""
    import keras
    import numpy as np

    build = functools.partial(
        keras.applications.MobileNetV2,
        (NUM_PIXELS, NUM_PIXELS, 3),
        alpha=0.35,
        weights=None,
        classes=NUM_CLASSES,
        classifier_activation=None,
    )
    generator = np.random.default_rng(SEED)
    shape = (NUM_STEPS * NUM_IMAGES, NUM_PIXELS, NUM_PIXELS, 3)
    x = generator.standard_normal(shape).astype("float32")
    y = generator.integers(NUM_CLASSES, size=len(x)).astype("int32")
    return build, (x, y), NUM_IMAGES


def text_task():
    """Returns the transformer of `pipeline.py`, and as much text as it reads in an epoch."""
    import numpy as np
    import pipeline_contender as pipeline

    generator = np.random.default_rng(SEED)
    size = (NUM_STEPS * pipeline.NUM_SEQUENCES, pipeline.SEQUENCE_LENGTH)
    x, y = (generator.integers(pipeline.NUM_BYTES, size=size).astype("int32") for _ in range(2))
    return pipeline.build_transformer, (x, y), pipeline.NUM_SEQUENCES


TASKS = {"mobilenet_v2": image_task, "transformer": text_task}


def build_contender(kind, build_model):
    """Returns the compiled model of a contender, on two logical devices of the CPU or on one."""
    import contender
    import keras

    if kind in ("plain", "ours"):
        return contender.build_contender(kind, NUM_DEVICES, build_model)
    import pipeline_contender

    import tfparallel

    names = tfparallel.devices.split_cpu(NUM_DEVICES)
    keras.utils.set_random_seed(SEED)
    model = tfparallel.pipeline_parallel(
        build_model,
        names,
        NUM_MICRO_BATCHES,
        schedule="1f1b",
        layers_per_stage=pipeline_contender.layers_per_stage(),
    )
    contender.compile_model(model)
    return model


def main():
    order, reply = dialog.begin()
    import keras
    import tensorflow as tf
    from contender import make_clock

    build_model, (x, y), batch_size = TASKS[order["workload"]]()
    model = build_contender(order["kind"], build_model)
    reply(num_parameters=model.count_params(), tensorflow=tf.__version__, keras=keras.__version__)
    clock = make_clock()
    for _ in dialog.requests():
        began, began_cpu = time.perf_counter(), time.process_time()
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[clock])
        ended, cpu_seconds = time.perf_counter(), time.process_time() - began_cpu
        first, *later = dialog.step_seconds([began, *clock.readings], 0)
        reply(
            # The extra time of the first step: tracing, and preparing the graph.
            tracing_seconds=first - statistics.median(later),
            epoch_seconds=ended - began,
            cpu_seconds=cpu_seconds,
            peak_mib=dialog.peak_mib(),
        )


if __name__ == "__main__":
    main()
