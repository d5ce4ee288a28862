"""One contender of a benchmark of `fit`: a process that trains some steps on request.

`contender_process.py` starts it and talks to it in lines of JSON, one reply per request; it ends
when its standard input closes. Each contender has its own process because thread pools and logical
devices belong to a process, and because stock Keras breaks with two strategies in one.

    {"workload": "dispatch_bound", "kind": "ours", …}  ->  {"num_parameters": 7722, …}
    {"steps": 20, "skip": 5}                            ->  {"step_seconds": [0.002, …], …}
    {"steps": 0}, of a pipeline                         ->  {"serial_seconds": 0.3, …}
    {"first_steps": 8}, before any other                ->  {"tracing_seconds": 2.1, …}
"""

import os
import statistics
import sys
import time

import dialog

SEED = 7
NUM_TIMELINES = 5
START = 64  # Steps that sum gradients before `post_local_sgd` averages weights instead.
POST_LOCAL = f"post_local_sgd:{START},8"
# When workers synchronize, and what they send: arguments of `tfparallel.data_parallel`.
POLICIES = {
    "every_step": {},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "topk:0.01": {"compression": "topk:0.01"},
    "powersgd:2": {"compression": "powersgd:2"},
    "accumulate:4": {"sync": "accumulate:4"},
    "accumulate:4, powersgd:2": {"sync": "accumulate:4", "compression": "powersgd:2"},
    "local_sgd:8": {"sync": "local_sgd:8"},
    "diloco:8": {"sync": "diloco:8"},
    POST_LOCAL: {"sync": POST_LOCAL},
}
# What each worker holds a share of; likewise.
SHARDS = {
    "replicated": {},
    "optimizer": {"shard": "optimizer"},
    "parameters": {"shard": "parameters"},
}


def steps_that_trace(policy):
    """Returns the steps, from 0, that trace a program and so say nothing about a policy."""
    return (0, START) if policy == POST_LOCAL else (0,)


def build_contender(kind, num_replicas, build_model):
    """Returns the compiled model of a contender, on `num_replicas` logical CPU devices.

    Args:
        kind: `"plain"` for Keras without a strategy, `"stock"` for the same code under
            `tf.distribute.MirroredStrategy`, `"ours"` for `tfparallel.data_parallel`, a name of
            `POLICIES` or `SHARDS` for the same with those arguments, `"placed"` for
            `tfparallel.model_parallel`, `"pipeline:8"` for two stages and 8 micro-batches;
            "plain_xla" and "ours_xla" with `jit_compile=True`.
        num_replicas: Logical devices to split the CPU into, one replica or one stage each.
        build_model: Function that returns a Keras model.
    """
    import keras

    kind, suffix, _ = kind.partition("_xla")
    is_compiled = bool(suffix)
    if kind == "stock":
        with stock_strategy(num_replicas).scope():
            keras.utils.set_random_seed(SEED)
            model = build_model()
            compile_model(model, is_compiled)
        return model
    if kind != "plain":
        build_model = parallel(kind, num_replicas, build_model)
    keras.utils.set_random_seed(SEED)
    model = build_model()
    compile_model(model, is_compiled)
    return model


def parallel(kind, num_replicas, build_model):
    """Takes the devices of a contender of ours; returns the function that builds its model."""
    import tfparallel

    is_job = "TF_CONFIG" in os.environ
    if is_job and not kind.startswith("pipeline"):
        arguments = (POLICIES | SHARDS).get(kind, {})
        return lambda: tfparallel.data_parallel(build_model, **arguments)
    # In a job this returns in process 0 alone; the others serve it.
    split_cpu = tfparallel.devices.split_cpu
    names = tfparallel.connect_to_cluster() if is_job else split_cpu(num_replicas)
    if kind == "ours":
        return lambda: tfparallel.data_parallel(build_model, devices=names)
    if kind == "placed":
        return lambda: tfparallel.model_parallel(build_model, devices=names)
    import workloads

    return lambda: tfparallel.pipeline_parallel(
        build_model,
        names,
        num_micro_batches=int(kind.partition(":")[2]),
        schedule="1f1b",
        layers_per_stage=workloads.layers_per_stage(),
    )


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


def stage_times(model, batch):
    """The stages' seconds at this micro-batch size, and the predicted time of their schedule."""
    from tfparallel.layout.simulator import simulate
    from tfparallel.pipeline.measure import measured_timelines, median_timeline, stage_seconds

    timelines = measured_timelines(model, batch, NUM_TIMELINES)
    stages = stage_seconds(timelines)
    number = model.schedule.num_micro_batches
    return {
        "serial_seconds": number * sum(stage.forward + stage.backward for stage in stages),
        "passes_seconds": median_timeline(timelines).makespan,
        "simulated_seconds": simulate(model.schedule, stages).makespan,
        "bubble": median_timeline(timelines).bubble,
    }


def first_epoch(model, dataset, steps):
    """Trains the first steps of the process, and returns what they took."""
    clock = make_clock()
    began, began_cpu = time.perf_counter(), time.process_time()
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    ended, cpu_seconds = time.perf_counter(), time.process_time() - began_cpu
    first, *later = dialog.step_seconds([began, *clock.readings], 0)
    return {
        # The extra time of the first step: tracing, and preparing the graph.
        "tracing_seconds": first - statistics.median(later),
        "epoch_seconds": ended - began,
        "cpu_seconds": cpu_seconds,
        "peak_mib": dialog.peak_mib(),
    }


def serve(reply, model, dataset, batch):
    """Answers each request: by a `fit` of the requested steps, as a rule."""
    import psutil

    process = psutil.Process()
    clock = make_clock()
    for request in dialog.requests():
        if "first_steps" in request:
            reply(**first_epoch(model, dataset, request["first_steps"]))
            continue
        if request["steps"] == 0:
            reply(**stage_times(model, batch))
            continue
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
    is_pipeline = order["kind"].startswith("pipeline")
    batches = workload.batches(1 if is_pipeline else int(os.environ.get("WORLD_SIZE", 1)))
    dataset = tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(2)
    reply(
        description=workload.description,
        num_parameters=model.count_params(),
        gradient_bytes=workload.gradient_bytes(model),
        global_batch_size=workload.global_batch_size,
        tensorflow=tf.__version__,
        keras=keras.__version__,
    )
    serve(reply, model, dataset, [each[0] for each in batches])


if __name__ == "__main__":
    main()
