"""One measurement of `bench pipeline`, in separate processes with one core each.

`bench pipeline` starts them: `tfparallel bench pipeline_job TASK.py --parallel=…`.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import flags

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.command_line.options import TrainOptions
from tfparallel.commands.parallelism import start_parallelism
from tfparallel.data.batches import first_batches
from tfparallel.device_memory import peak_bytes_of_gpus, peak_tensor_bytes
from tfparallel.devices import list_devices
from tfparallel.diagnostics.report import peak_memory_bytes, versions, write_report
from tfparallel.layout.simulator import simulate, theoretical_bubble
from tfparallel.pipeline.measure import measured_timelines, median_timeline, stage_seconds
from tfparallel.placement.report import held_by_device
from tfparallel.seams.keras import storage_of
from tfparallel.task import load_task

_NUM_WARM_UP_STEPS = 3
_NUM_TIMELINES = 7


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Measures the pipeline given by the flags, and writes the result as JSON.

    Processes other than 0 write the peak bytes of their tensors when process 0 ends, to the
    report's path with their rank appended.
    """
    (path,) = positional
    if hasattr(os, "sched_setaffinity"):  # Before TensorFlow creates its threads.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[Cluster.from_env().worker_index % len(cores)]})
    try:
        parallelism = start_parallelism(TrainOptions.of(values), {"command": "bench pipeline"})
    except SystemExit as ended:
        if not ended.code:
            write_report(f"{values.report}.{os.environ['RANK']}", _peaks_of_this_process())
        raise
    keras.utils.set_random_seed(values.seed)
    task = load_task(path)
    data, _ = task.load_data()
    batch, _ = first_batches(  # The last batch is short.
        data, global_batch_size=values.global_batch_size, seed=values.seed, num_batches=2
    )
    batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
    model = parallelism.build(task.build_model)
    task.compile_model(model)
    result: dict[str, Any] = {
        "versions": versions(),
        "num_parameters": model.count_params(),
        "num_examples": len(keras.tree.flatten(batch)[0]),
    }
    model._symbolic_build(data_batch=batch)  # Creates the metrics' variables, as `fit` does first.
    model.make_train_function()  # Builds the optimizer, which a step of its own must find built.
    step = tf.function(model.train_step, autograph=False)
    result["step_seconds"] = _median_seconds(lambda: step(batch), values.steps)
    if parallelism.name == "pipeline":
        result |= _pipeline_results(model, batch, result["step_seconds"])
    else:
        result["peak_memory_bytes"] = [peak_memory_bytes()]
        result |= {name: [peak] for name, peak in _peaks_of_this_process().items()}
    write_report(values.report, result)
    return 0


def _peaks_of_this_process() -> dict[str, Any]:
    """Returns the peak bytes of this process's tensors, on the host and on each GPU."""
    return {
        "peak_tensor_bytes": peak_tensor_bytes(),
        "peak_gpu_bytes": peak_bytes_of_gpus(list_devices("GPU")),
    }


def _pipeline_results(model, batch, step_seconds) -> dict[str, Any]:
    # Before the measurements below allocate memory.
    local_peaks = _peaks_of_this_process()
    peaks = [entry.get("peak_memory_bytes", 0) for entry in held_by_device(model)]
    timelines = measured_timelines(model, batch, _NUM_TIMELINES)
    passes, stages = median_timeline(timelines), stage_seconds(timelines)
    simulated = simulate(model.schedule, stages)
    update = _update_seconds(model)
    around = statistics.median(timeline.around for timeline in timelines)
    number = model.schedule.num_micro_batches
    serial = number * sum(stage.forward + stage.backward for stage in stages)
    return {
        "peak_memory_bytes": peaks,
        **{name: [peak] for name, peak in local_peaks.items()},
        "stages": [vars(stage) for stage in stages],
        "passes_seconds": passes.makespan,
        "update_seconds": update,
        "around_seconds": around,
        "bubble": passes.bubble,
        "bubble_of_equal_stages": theoretical_bubble(model.schedule),
        "simulated_bubble": simulated.bubble,
        "simulated_step_seconds": around + simulated.makespan + update,
        "one_after_the_other_seconds": around + serial + update,
        "over_one_after_the_other": (around + serial + update) / step_seconds,
        "ideal_over_one_after_the_other": serial / simulated.makespan,
        "most_in_flight": passes.most_in_flight(),
    }


def _update_seconds(model) -> float:
    """Times the optimizer alone. The weights serve as gradients: zeros would be faster."""

    @tf.function(autograph=False)
    def update():
        gradients = []
        for variable in model.trainable_variables:
            with tf.device(storage_of(variable).device):
                gradients.append(tf.identity(storage_of(variable)))
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": tf.zeros([])}

    return _median_seconds(update, 10)


def _median_seconds(step: Callable[[], dict[str, Any]], num_steps: int) -> float:
    seconds = []
    for _ in range(_NUM_WARM_UP_STEPS + num_steps):
        started = time.perf_counter()
        for value in keras.tree.flatten(step()):
            value.numpy()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_NUM_WARM_UP_STEPS:])
