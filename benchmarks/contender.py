"""One contender of a benchmark of `fit`: a process that trains some steps on request.

`contender_process.py` starts it and talks to it in lines of JSON, one reply per request; it ends
when its standard input closes. Each contender has its own process because thread pools and logical
devices belong to a process, and because stock Keras breaks with two strategies in one.

    {"workload": "dispatch_bound", "kind": "ours", …}  ->  {"num_parameters": 7722, …}
    {"steps": 20, "skip": 5}                            ->  {"step_seconds": [0.002, …], …}
"""

import os
import sys
import time

import dialog
import policies

SEED = 7


def build_contender(kind, num_replicas, build_model):
    """Returns the compiled model of a contender, on `num_replicas` logical CPU devices.

    Args:
        kind: `"plain"` for Keras without a strategy, `"stock"` for the same code under
            `tf.distribute.MirroredStrategy`, `"ours"` for `tfparallel.data_parallel`, a name of
            `policies.POLICIES` for the same by that policy, `"placed"` for
            `tfparallel.model_parallel`; "plain_xla" and "ours_xla" with `jit_compile=True`.
        num_replicas: Logical devices to split the CPU into, one replica or one stage each.
        build_model: Function that returns a Keras model.
    """
    import keras

    kind, suffix, _ = kind.partition("_xla")
    is_compiled = bool(suffix)
    if "TF_CONFIG" in os.environ and (kind == "ours" or kind in policies.POLICIES):
        import tfparallel

        model = tfparallel.data_parallel(build_model, **policies.POLICIES.get(kind, {}))
        compile_model(model, is_compiled)
    elif kind == "ours":
        import tfparallel

        names = tfparallel.devices.split_cpu(num_replicas)
        keras.utils.set_random_seed(SEED)
        model = tfparallel.data_parallel(build_model, devices=names)
        compile_model(model, is_compiled)
    elif kind == "placed":
        import tfparallel

        names = tfparallel.devices.split_cpu(num_replicas)
        keras.utils.set_random_seed(SEED)
        model = tfparallel.model_parallel(build_model, devices=names)
        compile_model(model, is_compiled)
    elif kind == "stock":
        with stock_strategy(num_replicas).scope():
            keras.utils.set_random_seed(SEED)
            model = build_model()
            compile_model(model, is_compiled)
    else:
        keras.utils.set_random_seed(SEED)
        model = build_model()
        compile_model(model, is_compiled)
    return model


def stock_strategy(num_replicas):
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(num_replicas)]
    )
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])


def compile_model(model, for_xla=False):
    """Compiles as a user would: Adam, cross-entropy on logits, accuracy.

    The learning rate is low, so that the losses of thousands of steps can still be compared.
    """
    import keras

    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=for_xla,
    )


def make_clock():
    """Returns a Keras callback that only reads the clock at the end of each step."""
    import keras

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.readings = []

        def on_train_batch_end(self, batch, logs=None):
            self.readings.append(time.perf_counter())

    return Clock()


def num_traces(train_function):
    """Returns the total number of traces of the programs behind Keras's `train_function`.

    Keras keeps them in closures: the step, within a function of the iterator.
    """
    seen, waiting, total = set(), [train_function], 0
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if hasattr(function, "experimental_get_tracing_count"):
            total += function.experimental_get_tracing_count()
            waiting.append(function.python_function)
        waiting.append(getattr(function, "__wrapped__", None))
        waiting.extend(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    if not total:
        raise RuntimeError(
            "No traced program was found behind Keras's `train_function`, so traces cannot be "
            f"counted. Received: {train_function!r}. Has Keras's trainer changed?"
        )
    return total


def fit(model, dataset, clock, steps, skip):
    """Trains `steps` steps, and returns the measurements; the first `skip` are not timed."""
    sent_before = sent_bytes()
    cpu_before = time.process_time()
    history = model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock]).history
    cpu_seconds = time.process_time() - cpu_before
    return {
        "step_seconds": dialog.step_seconds(clock.readings, skip),
        # Of all threads and all steps.
        "cpu_seconds_a_step": cpu_seconds / steps,
        "sent_bytes_a_step": (sent_bytes() - sent_before) / steps,
        "loss": history["loss"][-1],
    }


def sent_bytes():
    """Returns the bytes sent to other workers so far; 0 if there are none."""
    joined = sys.modules.get("tfparallel.collectives.process_group")
    workers = joined.ProcessGroup.of_process if joined is not None else None
    return 0 if workers is None else sum(workers.traffic.read().values())


def serve(reply, model, dataset):
    """Answers each request by a `fit` of the requested steps."""
    import psutil

    process = psutil.Process()
    clock = make_clock()
    for request in dialog.requests():
        reply(
            **fit(model, dataset, clock, **request),
            num_traces=num_traces(model.train_function),
            rss_mib=process.memory_info().rss / 2**20,
            peak_mib=dialog.peak_mib(),
        )


def main():
    order, reply = dialog.begin()  # Before TensorFlow makes its threads.
    import keras
    import tensorflow as tf
    import workloads

    workload = workloads.WORKLOADS[order["workload"]]
    model = build_contender(order["kind"], order["num_replicas"], workload.build_model)
    # Ready-made batches, in memory, without end.
    num_workers = int(os.environ.get("WORLD_SIZE", 1))
    batches = workload.batches(num_workers)
    dataset = tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(2)
    reply(
        description=workload.description,
        num_parameters=model.count_params(),
        gradient_bytes=workload.gradient_bytes(model),
        global_batch_size=workload.global_batch_size,
        tensorflow=tf.__version__,
        keras=keras.__version__,
    )
    serve(reply, model, dataset)


if __name__ == "__main__":
    main()
