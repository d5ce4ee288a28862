"""When each device does what, if each stage takes so many seconds: a pipeline without running it.

An instruction begins when its device is free and all that it needs has arrived; what comes from
another device arrives `transfer` seconds after it was made. So the step of K equal stages, with
forward f and backward b, takes (M + K − 1)(f + b) under GPipe and 1F1B; with unequal ones about
Σ t_k + (M − 1) max t_k.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from tfparallel.layout.schedule import Instruction, Schedule

__all__ = ["StageSeconds", "Timeline", "simulate", "theoretical_bubble"]


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """What a stage takes for one micro-batch.

    Attributes:
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass, a recompute included.
        transfer: Seconds until its outputs are on the device of the next stage; gradients take as
            long on their way back.
    """

    forward: float
    backward: float
    transfer: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each instruction begins and ends.

    Attributes:
        schedule: What is done.
        seconds: Begin and end of each instruction, from the first one's begin.
        around: What a measured call took before the first instruction and behind the last one.
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
        """How long each device works."""
        totals = []
        for own in self.schedule.instructions:
            spans = [self.seconds[instruction] for instruction in own]
            totals.append(sum(end - begin for begin, end in spans))
        return totals

    @property
    def bubble(self) -> float:
        """The share of the time in which devices stand still: 1 − Σ busy / (K · makespan)."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.schedule.num_devices * self.makespan)

    def most_in_flight(self) -> list[int]:
        """The most micro-batches that each device held activations of, stages counted apart."""
        most = []
        for own in self.schedule.instructions:
            # At one time ends come first.
            events = sorted(
                (self.seconds[instruction][0], 1)
                if instruction.kind == "forward"
                else (self.seconds[instruction][1], -1)
                for instruction in own
            )
            held = itertools.accumulate(change for _, change in events)
            most.append(max(held, default=0))
        return most


def simulate(schedule: Schedule, stages: Sequence[StageSeconds]) -> Timeline:
    """Tells when each device does what.

    Args:
        schedule: What each does, in order.
        stages: What each stage takes for a micro-batch.

    Raises:
        ValueError: If there are not as many as the schedule has stages.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(
            f"The seconds of each of the {schedule.num_stages} stages are required. Received: "
            f"{len(stages)} of them."
        )
    free = [0.0] * schedule.num_devices
    found: dict[Instruction, tuple[float, float]] = {}
    for device, instruction in schedule.in_order():
        begin = free[device]
        for needed in schedule.needs(instruction):
            arrives = found[needed][1]
            if schedule.device_of(needed.stage) != device:
                # An edge has one time, both ways: that of the stage which makes the outputs.
                arrives += stages[min(needed.stage, instruction.stage)].transfer
            begin = max(begin, arrives)
        own = stages[instruction.stage]
        seconds = own.forward if instruction.kind == "forward" else own.backward
        found[instruction] = (begin, begin + seconds)
        free[device] = begin + seconds
    start = min((begin for begin, _ in found.values()), default=0.0)
    return Timeline(schedule, {key: (b - start, e - start) for key, (b, e) in found.items()})


def theoretical_bubble(schedule: Schedule) -> float:
    """The bubble of equal stages without transfers: (K − 1)/(vM + K − 1)."""
    idle = schedule.num_devices - 1
    return idle / (schedule.chunks_per_device * schedule.num_micro_batches + idle)
