"""Predicts the step time of a mesh, and its memory per device, from the costs of the layers.

    step = overhead + passes + sums of gradients + updates + copies of shards

The passes are those of one replica, from the timeline of the schedule; all replicas run the same
passes at the same time. Devices that share cores slow each other down: while a of them are busy,
each takes max(1, a/S) times as long, where S is the speedup of running side by side:

    passes = ∫ max(1, a(t)/S) dt        a(t) = D · Σ of the parts busy at t

A split layer is on T devices, each with 1/T of what can be divided. Other layers are only on the
first part, while the other parts idle.

With `shard=`, each of N replicas updates 1/N of the state. Whole values are assembled by copies:
the updated weights once or, if weights are sharded too, each weight for the forward pass and again
for the backward pass.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import FORWARD_SHARE, LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.schedule import Schedule, most_held
from tfparallel.layout.simulator import StageSeconds, Timeline, simulate

# What the parts of a split layer sum, as multiples of its outputs and of its inputs.
_SUMS = {
    "column": (0, 1),
    "column, gathered": (1, 1),
    "row": (1, 0),
    "heads": (1, 1),
    "vocabulary": (1, 0),
    "inside": (2, 2),  # As for a transformer block.
}
_WHOLE_AT_ONCE = 2  # Weights gathered one after another: one is in use while the next arrives.


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a batch passes through a mesh.

    Attributes:
        mesh: The mesh.
        batch_size: Number of rows in a batch.
        schedule: The pipeline's schedule, or that of a single device.
        layers_per_stage: Number of consecutive layers in each stage.
        splits: How each split layer is split, by name; other layers are whole.
        recompute: "never", "always" or "except_last".
        is_placed: Whether stages are layers on devices (`model_parallel`): each operation of a step
            runs on the device of its layer.
        shard: What is sharded over the replicas: "optimizer", "parameters", or None.
    """

    mesh: Mesh
    batch_size: int
    schedule: Schedule
    layers_per_stage: Sequence[int]
    splits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recompute: str = "never"
    is_placed: bool = False
    shard: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows in the largest piece."""
        return -(-self.batch_size // (self.mesh.data * self.schedule.num_micro_batches))

    @property
    def all_gradients(self) -> bool:
        """Whether all gradients exist at once, as for sums over pieces or replicas."""
        return self.has_calls or self.mesh.data > 1

    @property
    def has_calls(self) -> bool:
        """Whether pieces pass through calls of stages, as in pipelines and hybrid meshes."""
        if self.is_placed:
            return False
        mesh = self.mesh
        is_alone = mesh.pipeline == mesh.sequence == 1 and (mesh.data == 1 or mesh.tensor == 1)
        return not is_alone or self.schedule.num_micro_batches > 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """The work and memory of one stage, on its busiest part.

    Attributes:
        layers: The layers in order; empty for a stage that only passes its inputs on.
        device: The index of its device.
        state_bytes: Bytes of parameters, gradients and slots.
        activation_bytes: Bytes that a piece keeps for its backward pass.
        received_bytes: Bytes that the stage receives for a piece.
        forward_seconds: Time of the forward pass of a piece.
        backward_seconds: Time of the backward pass of a piece, including a recomputed forward pass.
        parts_at_work: Average number of busy parts while one is busy.
    """

    layers: Sequence[LayerCosts]
    device: int
    state_bytes: float
    activation_bytes: float
    received_bytes: float
    forward_seconds: float
    backward_seconds: float
    parts_at_work: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Returns the stage as JSON values."""
        return {
            "layers": [layer.layer for layer in self.layers],
            "device": self.device,
            "parameter_bytes": sum(layer.parameter_bytes for layer in self.layers),
            "state_bytes": round(self.state_bytes),
            "activation_bytes": round(self.activation_bytes),
            "received_bytes": round(self.received_bytes),
            "forward_seconds": self.forward_seconds,
            "backward_seconds": self.backward_seconds,
        }


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted step of a mesh.

    Attributes:
        overhead_seconds: Time of an almost empty step, plus the overhead of replicas.
        passes_seconds: Time of the forward and backward passes of all pieces.
        sums_seconds: Time to sum gradients over pieces and replicas.
        update_seconds: Time of the optimizer.
        held_bytes: Peak bytes of each device of a replica, on the first part of a stage.
        stages: The stages in order.
        timeline: The timeline of a replica's devices, without slowdown by shared cores.
        copies_seconds: Time to gather shards and to split whole values.
    """

    overhead_seconds: float
    passes_seconds: float
    sums_seconds: float
    update_seconds: float
    held_bytes: tuple[int, ...]
    stages: tuple[Stage, ...] = ()
    timeline: Timeline | None = None
    copies_seconds: float = 0.0

    @property
    def bubble(self) -> float:
        """The fraction of the passes in which stages idle."""
        return 0.0 if self.timeline is None else self.timeline.bubble

    @property
    def step_seconds(self) -> float:
        """The total time of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by category."""
        return {
            "overhead": self.overhead_seconds,
            "passes": self.passes_seconds,
            "sums of gradients": self.sums_seconds,
            "updates": self.update_seconds,
            "copies of shares": self.copies_seconds,
        }


def predict(costs: ModelCosts, pieces: Pieces, machine: Machine) -> Prediction:
    """Predicts the step time of a mesh, and the memory of each device.

    Args:
        costs: The costs of the model.
        pieces: The mesh, and how a batch passes through it.
        machine: What the devices share.
    """
    mesh, schedule = pieces.mesh, pieces.schedule
    stages = list(_stages(costs, pieces, machine))
    seconds = [StageSeconds(stage.forward_seconds, stage.backward_seconds) for stage in stages]
    timeline = simulate(schedule, seconds)
    at_work = [mesh.data * stage.parts_at_work for stage in stages]
    return Prediction(
        overhead_seconds=costs.overhead_seconds + _replicas_seconds(pieces, machine),
        passes_seconds=_slowed(timeline, at_work, machine),
        sums_seconds=_sums_seconds(stages, pieces, machine),
        update_seconds=_update_seconds(costs.update, stages, pieces, machine),
        held_bytes=tuple(_held_bytes(stages, pieces, device) for device in range(mesh.pipeline)),
        stages=tuple(stages),
        timeline=timeline,
        copies_seconds=_copies_seconds(stages, pieces, machine) if pieces.shard else 0.0,
    )


def _replicas_seconds(pieces, machine) -> float:
    """Returns the overhead of replicas, for meshes without calls of stages."""
    replicas = pieces.mesh.data
    return 0.0 if replicas == 1 or pieces.has_calls else replicas * machine.replica_seconds


def _stages(costs, pieces, machine):
    mesh, rows = pieces.mesh, pieces.rows
    bounds = [0, *itertools.accumulate(pieces.layers_per_stage)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        layers = costs.layers[first:last]
        # In addition to the layers: the forward and backward call of the stage, and the final loss.
        seconds, activations = 2 * machine.call_seconds if pieces.has_calls else 0.0, 0.0
        busy = seconds
        if number == len(bounds) - 2:
            # The losses of a divided sequence are computed where its positions are.
            is_divided = costs.layers[-1].layer in pieces.splits
            num_parts = mesh.sequence if is_divided else 1
            seconds += costs.loss(rows) / num_parts
            busy += costs.loss(rows)
            activations = costs.loss_bytes(rows) / num_parts
        forward, state = FORWARD_SHARE * seconds, 0.0
        for index, layer in enumerate(layers, first):
            share = _share(layer, pieces)
            first_part = all_parts = layer.seconds(rows)
            kept_bytes = layer.activation_bytes(rows)
            if mesh.sequence > 1 and layer.layer in pieces.splits:
                # Each device reads the whole weights, and has gradients for all of them.
                sums = machine.sum_seconds(mesh.sequence, layer.trained_bytes)
                part, kept_bytes = layer.seconds(rows / mesh.sequence), kept_bytes / mesh.sequence
                first_part, all_parts = part + sums, mesh.sequence * part + sums
            elif share < 1:
                sums = _sums_of_parts(costs, index, pieces.splits[layer.layer], pieces, machine)
                part = layer.part_seconds(rows, mesh.tensor)
                first_part, all_parts = part + sums, mesh.tensor * part + sums
            seconds += first_part
            busy += all_parts
            forward += layer.forward_share * first_part
            if pieces.shard is None:
                state += share * layer.state_bytes(pieces.all_gradients)
            else:
                state += layer.state_bytes_of_share(pieces.shard, mesh.data)
            activations += share * kept_bytes
        yield Stage(
            layers,
            pieces.schedule.device_of(number),
            state,
            activations,
            rows * costs.received_bytes(first, last),
            forward,
            seconds - forward + (forward if pieces.recompute != "never" else 0.0),
            busy / seconds if seconds else 1.0,
        )


def _sums_of_parts(costs, index, kind, pieces, machine) -> float:
    outputs, inputs = _SUMS.get(kind, (0, 0))
    size = outputs * costs.layers[index].output_bytes
    size += inputs * sum(sent for sent, readers in costs.edges.values() if index in readers)
    return machine.sum_seconds(pieces.mesh.tensor, pieces.rows * size) if size else 0.0


def _copies_seconds(stages, pieces, machine) -> float:
    """Returns the time of N replicas to split and gather, in addition to the sums.

    Copying a byte costs as much as adding one. Each shard of a weight has a fixed cost too.
    """
    replicas = pieces.mesh.data
    layers = [layer for stage in stages for layer in stage.layers]
    of_each = sum(layer.num_trained for layer in layers) * machine.share_seconds
    size = sum(_copied_bytes(layer, pieces) for layer in layers)
    copying = machine.sum_seconds(2, size)
    return replicas * of_each + max(copying, replicas * copying / machine.side_by_side)


def _copied_bytes(layer: LayerCosts, pieces: Pieces) -> float:
    """Returns the bytes of a layer's weights that a replica copies in a step."""
    gathered = sum(layer.shared_bytes) if pieces.shard == "parameters" else 0
    updated = layer.trained_bytes - min(gathered, layer.trained_bytes)
    return 2 * gathered + updated


def _slowed(timeline: Timeline, at_work: Sequence[float], machine: Machine) -> float:
    """Returns the time of the passes, with devices that slow each other down."""
    changes: dict[float, float] = {}
    for instruction, (begin, end) in timeline.seconds.items():
        number = at_work[instruction.stage]
        changes[begin] = changes.get(begin, 0.0) + number
        changes[end] = changes.get(end, 0.0) - number
    times = sorted(changes)
    numbers = itertools.accumulate(changes[time] for time in times)
    return sum(
        (end - begin) * machine.slowed(number)
        for (begin, end), number in zip(itertools.pairwise(times), numbers, strict=False)
    )


def _share(layer: LayerCosts, pieces: Pieces) -> float:
    """Returns the fraction of a layer's weights on the first part of its stage."""
    if layer.layer not in pieces.splits:
        return 1.0
    return layer.whole_weights + (1 - layer.whole_weights) / pieces.mesh.tensor


def _sums_seconds(stages, pieces, machine) -> float:
    """Returns the time to sum gradients over each replica's pieces, then over the replicas.

    Stages do so at the same time, or one after the other if they share cores.
    """
    replicas, more_pieces = pieces.mesh.data, pieces.schedule.num_micro_batches - 1
    longest = total = 0.0
    for stage in stages:
        shares = [_added_bytes(layer, pieces) for layer in stage.layers]
        for_all = sum(layer.trained_bytes for layer in stage.layers)
        for size, is_all in ((sum(shares), False), (for_all, True)):
            of_pieces = more_pieces * machine.sum_seconds(2, size)
            of_replicas = machine.sum_seconds(replicas, size) if replicas > 1 else 0.0
            if is_all:
                total += replicas * of_pieces + of_replicas
            else:
                longest = max(longest, of_pieces + of_replicas)
    return max(longest, total / machine.side_by_side)


def _added_bytes(layer: LayerCosts, pieces: Pieces) -> float:
    """Returns the bytes of a layer's gradients that one device sums."""
    if pieces.shard != "parameters":
        return _share(layer, pieces) * layer.trained_bytes
    shared = min(sum(layer.shared_bytes), layer.trained_bytes)  # Each replica sums its shard.
    return layer.trained_bytes - shared + shared / pieces.mesh.data


def _update_seconds(update: Line, stages, pieces, machine) -> float:
    """Returns the time of updates: each replica updates its copy of the weights, or its shards."""
    mesh = pieces.mesh
    copies = mesh.data if pieces.shard is None else 1
    longest = total = 0.0
    for stage in stages:
        first_part = all_parts = 0.0
        for layer in stage.layers:
            share = _share(layer, pieces) if pieces.shard is None else 1 / mesh.data
            of_weights = layer.num_trained * update.fixed
            of_bytes = layer.trained_bytes * update.each
            first_part += of_weights + share * of_bytes
            all_parts += of_weights / share + of_bytes
        longest = max(longest, first_part)
        total += copies * all_parts
    return max(longest, total / machine.side_by_side)


def _held_bytes(stages, pieces, device) -> int:
    """Returns the peak memory of a device under the schedule."""
    device_stages = [stage for stage in stages if stage.device == device]
    updates = [0.0]
    if not pieces.all_gradients:
        updates += [
            _share(layer, pieces) * layer.update_bytes
            for stage in device_stages
            for layer in stage.layers
        ]

    def sizes(index: int) -> tuple[float, float]:
        activations, sent = stages[index].activation_bytes, stages[index].received_bytes
        return (sent + activations, 0.0) if pieces.recompute == "never" else (sent, activations)

    largest = most_held(pieces.schedule.instructions[device], sizes)
    # Most activations are already freed when a large weight is updated.
    peak = sum(stage.state_bytes for stage in device_stages) + max(largest, *updates)
    return int(peak + _whole_bytes(device_stages, pieces))


def _whole_bytes(stages, pieces) -> int:
    """Returns the bytes of sharded weights and gradients that are temporarily whole."""
    if pieces.shard != "parameters":
        return 0
    layers = [layer for stage in stages for layer in stage.layers if layer.trained_bytes]
    sizes = sorted(size for layer in layers for size in layer.shared_bytes)
    return 2 * sum(sizes[-_WHOLE_AT_ONCE:])
