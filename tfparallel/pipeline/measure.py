"""Measures when each instruction of a step runs, with time stamps in the traced step.

An instruction begins when its device is free and all of its inputs have arrived; it ends when all
of its outputs exist. The clocks are those of the devices' hosts; the clocks of several hosts must
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


def measured_timelines(model: keras.Model, data: Any, num_steps: int = 5) -> list[Timeline]:
    """Runs the passes of a step several times, and measures each instruction.

    The passes update nothing.

    Args:
        model: A compiled model from `pipeline_parallel`.
        data: A batch `(x, y[, sample_weight])`.
        num_steps: The number of measured steps, after two warm-up steps.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    arguments = keras.tree.map_structure(
        lambda array: None if array is None else tf.convert_to_tensor(array), (x, y, sample_weight)
    )
    order, timed = timed_passes(model, arguments)
    timelines: list[Timeline] = []
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
            timelines.append(dataclasses.replace(timeline, around=took - timeline.makespan))
    return timelines


def timed_passes(model: keras.Model, batch: tuple) -> tuple[list[Instruction], Callable]:
    """Traces the passes of a step with time stamps.

    Args:
        model: A compiled model from `pipeline_parallel`.
        batch: `(x, y, sample_weight)`, tensors or None.

    Returns:
        The instructions, and a function whose first result is the begin and end of each.
    """
    model.passes(*batch)  # Builds the loss if needed, since that creates variables.
    order: list[Instruction] = []

    def passes():
        step = model.passes(*batch, timed=True)
        result = step.run(*batch)
        order[:] = step.order.stamps
        # TensorFlow prunes results that nothing reads, even those that time stamps wait for.
        gradients = [gradient for gradient in result.gradients if gradient is not None]
        return list(step.order.stamps.values()), result.loss, gradients

    # Not tf.function: it orders the stateful operations of a trace, and time stamps are stateful,
    # so the stages would run one by one.
    return order, model.tracing_once(lambda: tf.compat.v1.wrap_function(passes, signature=[]))


def median_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the timeline with the median makespan."""
    return sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]


def stage_seconds(timelines: Sequence[Timeline]) -> list[StageSeconds]:
    """Returns the median seconds of each stage, at this size of a micro-batch.

    A transfer is the median time from an end to the begin of its reader, where the reader's device
    was idle. If it never was, it is the shortest such time, which is hidden by other work.
    """
    schedule = timelines[0].schedule
    seconds: dict[tuple[int, str], list[float]] = {}
    waits: dict[int, list[float]] = {}
    gaps: dict[int, list[float]] = {}
    for timeline in timelines:
        for instructions in schedule.instructions:
            free = 0.0
            for instruction in instructions:
                begin, end = timeline.seconds[instruction]
                seconds.setdefault((instruction.stage, instruction.kind), []).append(end - begin)
                for needed in schedule.needs(instruction):
                    if schedule.device_of(needed.stage) != schedule.device_of(instruction.stage):
                        sent = timeline.seconds[needed][1]
                        edge = min(needed.stage, instruction.stage)
                        (waits if free <= sent else gaps).setdefault(edge, []).append(begin - sent)
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
