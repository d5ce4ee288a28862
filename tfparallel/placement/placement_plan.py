"""What a task needs: which parallelism, how many devices, which layers where. Nothing is trained.

The model, compiled, is built without storage; its bytes come from shapes and a trace, its seconds
from layers that are run one by one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfparallel.layout.balance import NoPartition
from tfparallel.placement import stages
from tfparallel.placement.costs import LayerCost, held_bytes, layer_costs
from tfparallel.placement.graph import edges, layers_in_order
from tfparallel.placement.model_parallel import check_model
from tfparallel.placement.storageless import StoragelessModel
from tfparallel.placement.timing import measured_overhead

__all__ = ["Plan", "Stage", "plan"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one device is to hold.

    Attributes:
        layers: The names of its layers, in order.
        parameter_bytes: Of their variables.
        held_bytes: All that it holds: parameters, gradients, slots, activations, what it is sent.
        seconds: Forward and backward, for a batch.
        received_bytes: Of the tensors that it is sent for a batch; as many go back, as gradients.
    """

    layers: list[str]
    parameter_bytes: int
    held_bytes: int
    seconds: float
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer, and what it rests on.

    Attributes:
        stages: Of the cut that is taken; one stage where one device is enough. Empty if nothing
            fits.
        largest: By number of stages, from 1: the bytes of the largest stage of the best cut.
        device_memory: What a device may hold; None for no limit.
        batch_size: The examples of a batch.
        overhead_seconds: What a step takes with next to nothing to do.
    """

    stages: list[Stage]
    largest: dict[int, int]
    device_memory: int | None
    batch_size: int
    overhead_seconds: float

    @property
    def step_seconds(self) -> float:
        """The predicted step: the stages work one after the other."""
        return self.overhead_seconds + sum(stage.seconds for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return dataclasses.asdict(self) | {"step_seconds": self.step_seconds}


def plan(
    build_model: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], None],
    *,
    num_devices: int,
    batch_size: int,
    device_memory: int | None = None,
    balance: str = "memory",
) -> Plan:
    """Finds the smallest number of devices whose best cut fits, and that cut.

    Args:
        build_model: Builds a functional or Sequential model.
        compile_model: Compiles it; its optimizer says how many slots there are.
        num_devices: How many devices there are at most.
        batch_size: The examples of a batch.
        device_memory: How many bytes each device may hold. None: all devices are taken.
        balance: "memory", "time" or "both".

    Raises:
        PlacementError: If the model's layers cannot be seen, or are fewer than the devices.
    """
    model = check_model(StoragelessModel(build_model).model)
    if not model.compiled:
        compile_model(model)
    layers = layers_in_order(model)
    if num_devices > len(layers):
        raise stages.PlacementError(
            f"Each device needs a layer. Received: {num_devices} devices for {len(layers)} layers."
        )
    costs = layer_costs(model, batch_size, optimizer=model.optimizer, measure=True)
    passed = edges(model)
    largest, chosen = {}, None
    for number in range(1, num_devices + 1):
        counts = stages.cut(costs, passed, number, batch_size, "memory")
        found = _stages(costs, passed, counts, batch_size)
        largest[number] = max(stage.held_bytes for stage in found)
        # Without a limit all devices are taken.
        if chosen is None and (device_memory is not None or number == num_devices):
            try:
                counts = stages.cut(costs, passed, number, batch_size, balance, device_memory)
            except NoPartition:
                continue
            chosen = _stages(costs, passed, counts, batch_size)
    overhead = measured_overhead(model.optimizer)
    return Plan(chosen or [], largest, device_memory, batch_size, overhead)


def _stages(
    costs: Sequence[LayerCost], passed, counts: Sequence[int], batch_size: int
) -> list[Stage]:
    found, start = [], 0
    for count in counts:
        end = start + count
        own = costs[start:end]
        received = batch_size * sum(
            size
            for producer, (size, readers) in passed.items()
            if producer < start and any(start <= reader < end for reader in readers)
        )
        found.append(
            Stage(
                [cost.layer for cost in own],
                sum(cost.parameter_bytes for cost in own),
                held_bytes(own) + received,
                sum(cost.seconds for cost in own),
                received,
            )
        )
        start = end
    return found
