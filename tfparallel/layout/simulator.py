"""Simulates a pipeline: when each instruction runs, given the seconds of each stage.

An instruction begins when its device is free and its inputs have arrived; a tensor from another
device arrives `transfer` seconds after it is computed. So a step of K equal stages, with forward f
and backward b, takes (M + K − 1)(f + b) under GPipe and 1F1B; with unequal stages about
Σ t_k + (M − 1) max t_k.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from tfparallel.layout.schedule import Instruction, Schedule


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """The seconds that a stage takes for one micro-batch.

    Attributes:
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass, recomputation included.
        transfer: Seconds to send its outputs to the device of the next stage; their gradients take
            as long to return.
    """

    forward: float
    backward: float
    transfer: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each instruction begins and ends.

    Attributes:
        schedule: The schedule.
        seconds: Begin and end of each instruction, relative to the first begin.
        around: Seconds of a measured call before the first and after the last instruction.
    """

    schedule: Schedule
    seconds: dict[Instruction, tuple[float, float]]
    around: float = 0.0

    @property
    def makespan(self) -> float:
        """From the first begin to the last end."""
        return max((end for _, end in self.seconds.values()), default=0.0)

    @property
    def busy(self) -> list[float]:
        """The seconds that each device works."""
        totals = []
        for passes in self.schedule.instructions:
            spans = [self.seconds[instruction] for instruction in passes]
            totals.append(sum(end - begin for begin, end in spans))
        return totals

    @property
    def bubble(self) -> float:
        """The share of the time in which devices are idle: 1 − Σ busy / (K · makespan)."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.schedule.num_devices * self.makespan)

    def most_in_flight(self) -> list[int]:
        """Returns the most activations in flight on each device, one per micro-batch and stage."""
        most = []
        for passes in self.schedule.instructions:
            # Ends sort before begins at the same time.
            events = sorted(
                (self.seconds[instruction][0], 1)
                if instruction.kind == "forward"
                else (self.seconds[instruction][1], -1)
                for instruction in passes
            )
            in_flight = itertools.accumulate(change for _, change in events)
            most.append(max(in_flight, default=0))
        return most


def simulate(schedule: Schedule, stages: Sequence[StageSeconds]) -> Timeline:
    """Computes when each instruction begins and ends.

    Args:
        schedule: The schedule.
        stages: The seconds of each stage for a micro-batch.

    Raises:
        ValueError: If `stages` has another length than the schedule has stages.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(
            f"Each of the {schedule.num_stages} stages needs a time in seconds. Received: "
            f"{len(stages)} of them."
        )
    free = [0.0] * schedule.num_devices
    spans: dict[Instruction, tuple[float, float]] = {}
    for device, instruction in schedule.in_order():
        begin = free[device]
        for needed in schedule.needs(instruction):
            arrives = spans[needed][1]
            if schedule.device_of(needed.stage) != device:
                # An edge takes the same time both ways: that of the stage that sends forward.
                arrives += stages[min(needed.stage, instruction.stage)].transfer
            begin = max(begin, arrives)
        stage = stages[instruction.stage]
        seconds = stage.forward if instruction.kind == "forward" else stage.backward
        spans[instruction] = (begin, begin + seconds)
        free[device] = begin + seconds
    start = min((begin for begin, _ in spans.values()), default=0.0)
    return Timeline(schedule, {key: (b - start, e - start) for key, (b, e) in spans.items()})


def theoretical_bubble(schedule: Schedule) -> float:
    """Returns the bubble of equal stages without transfers: (K − 1)/(vM + K − 1)."""
    idle = schedule.num_devices - 1
    return idle / (schedule.chunks_per_device * schedule.num_micro_batches + idle)
