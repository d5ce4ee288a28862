"""What a pipeline of a task would be: its stages, their memory, and its step. Nothing is trained.

A stage holds its weights, their gradients and slots, and of each micro-batch in flight what its
backward pass reads. How many are in flight says the schedule: K − d on device d under 1F1B, M under
GPipe. With a recompute only what was sent is held of each, and one micro-batch's activations.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfparallel.layout.schedule import Schedule, most_held
from tfparallel.layout.simulator import StageSeconds, Timeline, simulate, theoretical_bubble
from tfparallel.pipeline.pipeline_parallel import stages_by_layer
from tfparallel.placement.costs import layer_costs
from tfparallel.placement.graph import edges, layers_in_order
from tfparallel.placement.model_parallel import check_model
from tfparallel.placement.storageless import StoragelessModel
from tfparallel.placement.timing import measured_seconds

__all__ = ["PipelinePlan", "PlannedStage", "plan_pipeline"]


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """One stage.

    Attributes:
        layers: The names of its layers, in order.
        device: The index of its device.
        parameter_bytes: Of their variables.
        state_bytes: Of parameters, gradients and slots.
        activation_bytes: What one micro-batch leaves for its backward pass.
        received_bytes: What is sent to the stage for a micro-batch.
        forward_seconds: Of a micro-batch, measured layer by layer.
        backward_seconds: Likewise, a recompute included.
    """

    layers: list[str]
    device: int
    parameter_bytes: int
    state_bytes: int
    activation_bytes: int
    received_bytes: int
    forward_seconds: float
    backward_seconds: float


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The answer.

    Attributes:
        stages: In order.
        schedule: What each device would do.
        timeline: When, with the stages' seconds.
        recompute: "never", "always" or "except_last".
        batch_size: The examples of a batch.
    """

    stages: list[PlannedStage]
    schedule: Schedule
    timeline: Timeline
    recompute: str
    batch_size: int

    @property
    def one_after_the_other(self) -> float:
        """Seconds of a batch's micro-batches through the stages one after the other."""
        return sum(self.timeline.busy)

    def held_bytes(self, device: int) -> int:
        """The most that a device holds at one time, as the schedule has it."""
        own = [stage for stage in self.stages if stage.device == device]
        total = sum(stage.state_bytes for stage in own)

        def sizes(index: int) -> tuple[int, int]:
            stage = self.stages[index]
            if self.recompute == "never":
                return stage.activation_bytes, 0
            return stage.received_bytes, stage.activation_bytes

        return total + int(most_held(self.schedule.instructions[device], sizes))

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        devices = range(self.schedule.num_devices)
        return {
            "schedule": self.schedule.name,
            "num_devices": self.schedule.num_devices,
            "num_micro_batches": self.schedule.num_micro_batches,
            "recompute": self.recompute,
            "batch_size": self.batch_size,
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "held_bytes": [self.held_bytes(device) for device in devices],
            "most_in_flight": self.schedule.most_in_flight(),
            "step_seconds": self.timeline.makespan,
            "one_after_the_other_seconds": self.one_after_the_other,
            "bubble": self.timeline.bubble,
            "bubble_of_equal_stages": theoretical_bubble(self.schedule),
        }


def plan_pipeline(
    build_model: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], None],
    schedule: Schedule,
    *,
    batch_size: int,
    recompute: str = "never",
    balance: str = "time",
    device_memory: int | None = None,
) -> PipelinePlan:
    """Cuts a model as `pipeline_parallel` would, and simulates its step.

    A model with fewer layers than stages has stages without a layer, and a plan shows them.

    Args:
        build_model: Builds a functional or Sequential model.
        compile_model: Compiles it; its optimizer says how many slots there are.
        schedule: What each device does.
        batch_size: The examples of a batch.
        recompute: As `pipeline_parallel` takes it.
        balance: Likewise.
        device_memory: Likewise.

    Raises:
        ValueError: If the model's layers cannot be seen, or nothing meets `device_memory`.
    """
    model = check_model(StoragelessModel(build_model).model)
    if not model.compiled:
        compile_model(model)
    size = -(-batch_size // schedule.num_micro_batches)
    stage_of = stages_by_layer(
        model,
        schedule,
        allow_empty_stages=True,
        balance=balance,
        device_memory=device_memory,
        batch_size=size,
    )
    costs = layer_costs(model, size, optimizer=model.optimizer, all_gradients=True)
    forward = measured_seconds(model, size, backward=False)
    both = measured_seconds(model, size)
    names = [layer.name for layer in layers_in_order(model)]
    found = []
    for index in range(schedule.num_stages):
        own = [cost for cost in costs if stage_of[cost.layer] == index]
        ahead = sum(forward[cost.layer] for cost in own)
        back = max(sum(both[cost.layer] for cost in own) - ahead, 0.0)
        received = sum(
            sent
            for producer, (sent, readers) in edges(model).items()
            if stage_of[names[producer]] != index
            and any(stage_of[names[reader]] == index for reader in readers)
        )
        state = sum(c.parameter_bytes + c.gradient_bytes + c.slot_bytes for c in own)
        found.append(
            PlannedStage(
                [cost.layer for cost in own],
                schedule.device_of(index),
                sum(cost.parameter_bytes for cost in own),
                state,
                sum(cost.activation_bytes for cost in own),
                size * received,
                ahead,
                back + (ahead if recompute != "never" else 0.0),
            )
        )
    seconds = [StageSeconds(stage.forward_seconds, stage.backward_seconds) for stage in found]
    return PipelinePlan(found, schedule, simulate(schedule, seconds), recompute, batch_size)
