"""How the passes of a pipeline's step are made."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.layout.schedule import Schedule
from tfparallel.pipeline.stages import Stage
from tfparallel.step.metrics import StepMetrics


class PassOptions(NamedTuple):
    """How to make the passes of a step, the same in each replica.

    Attributes:
        model: The pipelined model.
        stages: Its stages.
        schedule: The schedule.
        devices: The first device of each pipeline coordinate, in the first replica.
        recompute: "never", "always" or "except_last".
        metrics: The compiled metrics; None if outputs are joined for loss and metrics.
        traces_each: Whether to trace each micro-batch, or only the first.
        has_parts: Whether stages are on several devices, which their gradients follow.
        timed: Whether to record when each instruction begins and ends.
        writable: The variables that layers may write, by id.
        parts_of: Returns the parts of an output that is divided by positions; None if it is whole.
    """

    model: keras.Model
    stages: Sequence[Stage]
    schedule: Schedule
    devices: Sequence[str]
    recompute: str
    metrics: StepMetrics | None
    traces_each: bool
    has_parts: bool
    timed: bool
    writable: dict[int, keras.Variable]
    parts_of: Callable[[tf.Tensor], list[tf.Tensor] | None]

    @property
    def begins_joined(self) -> bool:
        """Whether the backward passes begin with the loss of the joined outputs."""
        return self.schedule.name == "gpipe" and self.metrics is None
