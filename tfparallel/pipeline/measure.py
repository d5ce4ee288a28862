"""When each device really did what: time stamps around each instruction of a traced step.

An instruction's begin is noted once its device is free and all that it reads has come, its end once
all that it makes is there. The clocks are those of the devices' hosts: of several hosts they must
agree.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.layout.schedule import Instruction
from tfparallel.layout.simulator import StageSeconds, Timeline

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
        called = time.perf_counter()
        stamps = [(float(begin), float(end)) for begin, end in timed()[0]]
        took = time.perf_counter() - called
        if index >= 2:
            start = min(begin for begin, _ in stamps)
            seconds = {
                instruction: (begin - start, end - start)
                for instruction, (begin, end) in zip(order, stamps, strict=True)
            }
            timeline = Timeline(model.schedule, seconds)
            found.append(dataclasses.replace(timeline, around=took - timeline.makespan))
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
        found = step.run(*batch)
        order[:] = step.order.stamps
        # What nobody reads TensorFlow does not compute, even if something is to come behind it.
        made = [gradient for gradient in found.gradients if gradient is not None]
        return list(step.order.stamps.values()), found.loss, made

    # Not tf.function: it has the stateful operations of a trace wait for each other, and a time
    # stamp is one. The stages would run one after the other.
    return order, model.tracing_once(lambda: tf.compat.v1.wrap_function(passes, signature=[]))


def median_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """The one whose makespan is the median."""
    return sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]


def stage_seconds(timelines: Sequence[Timeline]) -> list[StageSeconds]:
    """The median seconds of each stage, at this size of a micro-batch.

    A transfer is the median time from an end to the begin of what reads it, wherever the reader's
    device stood waiting. Where it never did, it is the least time, which hides behind other work.
    """
    schedule = timelines[0].schedule
    seconds: dict[tuple[int, str], list[float]] = {}
    waits: dict[int, list[float]] = {}
    gaps: dict[int, list[float]] = {}
    for timeline in timelines:
        for own in schedule.instructions:
            free = 0.0
            for instruction in own:
                begin, end = timeline.seconds[instruction]
                seconds.setdefault((instruction.stage, instruction.kind), []).append(end - begin)
                for needed in schedule.needs(instruction):
                    if schedule.device_of(needed.stage) != schedule.device_of(instruction.stage):
                        made = timeline.seconds[needed][1]
                        edge = min(needed.stage, instruction.stage)
                        (waits if free <= made else gaps).setdefault(edge, []).append(begin - made)
                free = end
    return [
        StageSeconds(
            statistics.median(seconds[stage, "forward"]),
            statistics.median(seconds[stage, "backward"]),
            _transfer(waits.get(stage, []), gaps.get(stage, [])),
        )
        for stage in range(schedule.num_stages)
    ]


def _transfer(waits, gaps) -> float:
    return max(0.0, statistics.median(waits) if waits else min(gaps, default=0.0))
