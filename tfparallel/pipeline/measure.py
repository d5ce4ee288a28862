"""When each device really did what: time stamps around each instruction of a traced step.

An instruction's begin is noted once its device is free and all that it reads has come, its end once
all that it makes is there. The clocks are those of the devices' hosts: of several hosts they must
agree.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.pipeline.schedule import Instruction
from tfparallel.pipeline.simulator import StageSeconds, Timeline

__all__ = ["measured_timelines", "median_timeline", "stage_seconds", "timed_passes"]


def measured_timelines(model: keras.Model, data: Any, num_steps: int = 5) -> list[Timeline]:
    """Runs the passes of a step several times, and tells when each instruction was done.

    Nothing is updated.

    Args:
        model: What `pipeline_parallel` returned, compiled.
        data: A batch `(x, y[, sample_weight])`.
        num_steps: How many are measured, after two that are not.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    arguments = keras.tree.map_structure(
        lambda array: None if array is None else tf.convert_to_tensor(array), (x, y, sample_weight)
    )
    order, timed = timed_passes(model, arguments)
    found: list[Timeline] = []
    for index in range(num_steps + 2):
        stamps = [(float(begin), float(end)) for begin, end in timed()[0]]
        if index >= 2:
            start = min(begin for begin, _ in stamps)
            seconds = {
                instruction: (begin - start, end - start)
                for instruction, (begin, end) in zip(order, stamps, strict=True)
            }
            found.append(Timeline(model.schedule, seconds))
    return found


def timed_passes(model: keras.Model, batch: tuple) -> tuple[list[Instruction], Callable]:
    """Traces the passes of a step with time stamps.

    Args:
        model: What `pipeline_parallel` returned, compiled.
        batch: `(x, y, sample_weight)`, tensors or None.

    Returns:
        The instructions, and a function whose first result is the begin and end of each.
    """
    model.passes(*batch)  # Builds the loss, if nothing has yet; that makes variables.
    order: list[Instruction] = []

    def passes():
        step = model.passes(*batch, timed=True)
        _, loss, gradients = step.run(*batch)
        order[:] = step.order.stamps
        # What nobody reads TensorFlow does not compute, even if something is to come behind it.
        return list(step.order.stamps.values()), loss, [g for g in gradients if g is not None]

    # Not tf.function: it has the stateful operations of a trace wait for each other, and a time
    # stamp is one. The stages would run one after the other.
    return order, tf.compat.v1.wrap_function(passes, signature=[])


def median_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """The one whose makespan is the median."""
    return sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]


def stage_seconds(timelines: Sequence[Timeline]) -> list[StageSeconds]:
    """The median seconds of each stage, at this size of a micro-batch.

    A transfer is the least time from an end to the begin of what reads it on another device: the
    rest is waiting for the device.
    """
    schedule = timelines[0].schedule
    found = []
    for stage in range(schedule.num_stages):
        spans: dict[str, list[float]] = {"forward": [], "backward": []}
        gaps = []
        for timeline in timelines:
            for instruction, (begin, end) in timeline.seconds.items():
                if instruction.stage == stage:
                    spans[instruction.kind].append(end - begin)
                for needed in schedule.needs(instruction):
                    if needed.stage != instruction.stage and min(
                        needed.stage, instruction.stage
                    ) == stage:
                        gaps.append(begin - timeline.seconds[needed][1])
        crosses = stage + 1 < schedule.num_stages and schedule.num_devices > 1
        found.append(
            StageSeconds(
                statistics.median(spans["forward"]),
                statistics.median(spans["backward"]),
                max(0.0, min(gaps)) if crosses and gaps else 0.0,
            )
        )
    return found
