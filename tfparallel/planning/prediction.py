"""The step of a mesh, and what its devices hold, from what the layers cost: nothing is run.

    step = overhead + passes + sums of gradients + updates + copies of shares

The passes are those of one replica, by the schedule's timeline: all replicas do the same at the
same time. Where devices share cores, they slow each other down. While a of them are at work each
takes max(1, a/S) times as long, if S is how much more is done side by side:

    passes = ∫ max(1, a(t)/S) dt        a(t) = D · Σ of the parts at work at t

A split layer is on T devices, each with 1/T of what can be divided; the others are on the first
part alone, and the other parts stand still.

N replicas that share out a state (`shard=`) each update 1/N of it. What is whole in between is
copied: the updated weights once, or, of weights that are shared out too, each one for the forward
and again for the backward pass.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import FORWARD_SHARE, LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.schedule import Schedule, most_held
from tfparallel.layout.simulator import StageSeconds, Timeline, simulate

__all__ = ["Pieces", "Prediction", "Stage", "predict"]

# What a split layer's parts add up, as multiples of its outputs and of its inputs.
_SUMS = {
    "column": (0, 1),
    "column, gathered": (1, 1),
    "row": (1, 0),
    "heads": (1, 1),
    "vocabulary": (1, 0),
    "inside": (2, 2),  # As of a transformer's block.
}
_WHOLE_AT_ONCE = 2  # Of weights that are joined one after another: one is used, one arrives.


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a batch goes through a mesh.

    Attributes:
        mesh: The mesh.
        batch_size: The rows of a batch.
        schedule: What each device of a pipeline does; that of one device where there is none.
        layers_per_stage: How many consecutive layers each stage has.
        splits: How each split layer is split, by name; the others are whole.
        recompute: "never", "always" or "except_last".
        is_placed: Whether stages are layers on devices (`model_parallel`): each operation of one
            step, on the device of its layer.
        shard: What replicas share out: "optimizer", "parameters", or None for nothing.
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
        """Of the largest piece."""
        return -(-self.batch_size // (self.mesh.data * self.schedule.num_micro_batches))

    @property
    def all_gradients(self) -> bool:
        """Whether all gradients are held at once, as sums over pieces or replicas are."""
        return self.has_calls or self.mesh.data > 1

    @property
    def has_calls(self) -> bool:
        """Whether pieces go through calls of stages, as in pipelines and hybrid meshes."""
        if self.is_placed:
            return False
        mesh = self.mesh
        is_alone = mesh.pipeline == mesh.sequence == 1 and (mesh.data == 1 or mesh.tensor == 1)
        return not is_alone or self.schedule.num_micro_batches > 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one stage does, and what is held for it, on the part that works and holds most.

    Attributes:
        layers: In order; none in a stage that passes on what it is given.
        device: The index of its device.
        state_bytes: Of parameters, gradients and slots.
        activation_bytes: What a piece leaves for its backward pass.
        received_bytes: What the stage is sent for a piece.
        forward_seconds: Of a piece.
        backward_seconds: Of a piece, with the forward pass where that is computed again.
        parts_at_work: How many parts work while one does.
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
        """All of it, as JSON holds it."""
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
    """A mesh's step.

    Attributes:
        overhead_seconds: Of a step with next to nothing to do, and of what replicas add to it.
        passes_seconds: Forward and backward, of all pieces.
        sums_seconds: Of the gradients of pieces and replicas.
        update_seconds: Of the optimizer.
        held_bytes: The most that each device of a replica holds, the first part of a stage.
        stages: In order.
        timeline: When each device of a replica does what, by itself.
        copies_seconds: Of what replicas share out, to wholes and back.
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
        """The share of the passes in which stages stand still."""
        return 0.0 if self.timeline is None else self.timeline.bubble

    @property
    def step_seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what takes them."""
        return {
            "overhead": self.overhead_seconds,
            "passes": self.passes_seconds,
            "sums of gradients": self.sums_seconds,
            "updates": self.update_seconds,
            "copies of shares": self.copies_seconds,
        }


def predict(costs: ModelCosts, pieces: Pieces, machine: Machine) -> Prediction:
    """Predicts the step of a mesh, and what each device holds.

    Args:
        costs: Of the model.
        pieces: The mesh, and how a batch goes through it.
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
    """What replicas add where no calls of stages do."""
    replicas = pieces.mesh.data
    return 0.0 if replicas == 1 or pieces.has_calls else replicas * machine.replica_seconds


def _stages(costs, pieces, machine):
    mesh, rows = pieces.mesh, pieces.rows
    bounds = [0, *itertools.accumulate(pieces.layers_per_stage)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        layers = costs.layers[first:last]
        # Beside the layers: the calls of a stage, forward and backward, and the loss behind all.
        seconds = 2 * machine.call_seconds if pieces.has_calls else 0.0
        seconds += costs.loss(rows) if number == len(bounds) - 2 else 0.0
        made = costs.loss_bytes(rows) if number == len(bounds) - 2 else 0.0
        busy, forward, state = seconds, FORWARD_SHARE * seconds, 0.0
        for index, layer in enumerate(layers, first):
            share = _share(layer, pieces)
            own = all_parts = layer.seconds(rows)
            held = layer.activation_bytes(rows)
            if mesh.sequence > 1 and layer.layer in pieces.splits:
                # Each device reads the whole weights, and has gradients for all of them.
                sums = machine.sum_seconds(mesh.sequence, layer.trained_bytes)
                part, held = layer.seconds(rows / mesh.sequence), held / mesh.sequence
                own, all_parts = part + sums, mesh.sequence * part + sums
            elif share < 1:
                sums = _sums_of_parts(costs, index, pieces.splits[layer.layer], pieces, machine)
                part = layer.part_seconds(rows, mesh.tensor)
                own, all_parts = part + sums, mesh.tensor * part + sums
            seconds += own
            busy += all_parts
            forward += layer.forward_share * own
            if pieces.shard is None:
                state += share * layer.state_bytes(pieces.all_gradients)
            else:
                state += layer.state_bytes_of_share(pieces.shard, mesh.data)
            made += share * held
        yield Stage(
            layers,
            pieces.schedule.device_of(number),
            state,
            made,
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
    """What N replicas do to cut and to join, beside the sums: a copied byte takes as an added one.

    A share of a weight is something to do in itself, whatever its size.
    """
    replicas = pieces.mesh.data
    layers = [layer for stage in stages for layer in stage.layers]
    of_each = sum(layer.num_trained for layer in layers) * machine.share_seconds
    size = sum(_copied_bytes(layer, pieces) for layer in layers)
    own = machine.sum_seconds(2, size)
    return replicas * of_each + max(own, replicas * own / machine.side_by_side)


def _copied_bytes(layer: LayerCosts, pieces: Pieces) -> float:
    """What a replica copies of a layer's weights in a step."""
    gathered = sum(layer.shared_bytes) if pieces.shard == "parameters" else 0
    updated = layer.trained_bytes - min(gathered, layer.trained_bytes)
    return 2 * gathered + updated


def _slowed(timeline: Timeline, at_work: Sequence[float], machine: Machine) -> float:
    """The passes' time, with devices that slow each other down."""
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
    """The share of a layer's weights that is on the first part of its stage."""
    if layer.layer not in pieces.splits:
        return 1.0
    return layer.whole_weights + (1 - layer.whole_weights) / pieces.mesh.tensor


def _sums_seconds(stages, pieces, machine) -> float:
    """Each replica adds up its pieces', then the replicas' are added up.

    Stages do so at the same time; where they share cores it is one after the other.
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
    """The gradients of a layer that one device adds up."""
    if pieces.shard != "parameters":
        return _share(layer, pieces) * layer.trained_bytes
    shared = min(sum(layer.shared_bytes), layer.trained_bytes)  # Each adds up its own.
    return layer.trained_bytes - shared + shared / pieces.mesh.data


def _update_seconds(update: Line, stages, pieces, machine) -> float:
    """Each device updates what it holds; each replica its own copies, or shares of one."""
    mesh = pieces.mesh
    copies = mesh.data if pieces.shard is None else 1
    longest = total = 0.0
    for stage in stages:
        own = all_parts = 0.0
        for layer in stage.layers:
            share = _share(layer, pieces) if pieces.shard is None else 1 / mesh.data
            of_weights = layer.num_trained * update.fixed
            of_bytes = layer.trained_bytes * update.each
            own += of_weights + share * of_bytes
            all_parts += of_weights / share + of_bytes
        longest = max(longest, own)
        total += copies * all_parts
    return max(longest, total / machine.side_by_side)


def _held_bytes(stages, pieces, device) -> int:
    """The most that a device holds at one time, as the schedule has it."""
    own = [stage for stage in stages if stage.device == device]
    updates = [0.0]
    if not pieces.all_gradients:
        updates += [
            _share(layer, pieces) * layer.update_bytes for stage in own for layer in stage.layers
        ]

    def sizes(index: int) -> tuple[float, float]:
        made, sent = stages[index].activation_bytes, stages[index].received_bytes
        return (sent + made, 0.0) if pieces.recompute == "never" else (sent, made)

    largest = most_held(pieces.schedule.instructions[device], sizes)
    # Most activations are gone when a large weight is updated.
    held = sum(stage.state_bytes for stage in own) + max(largest, *updates)
    return int(held + _whole_bytes(own, pieces))


def _whole_bytes(stages, pieces) -> int:
    """The weights and gradients that are whole for a moment, of those that replicas share out."""
    if pieces.shard != "parameters":
        return 0
    layers = [layer for stage in stages for layer in stage.layers if layer.trained_bytes]
    sizes = sorted(size for layer in layers for size in layer.shared_bytes)
    return 2 * sum(sizes[-_WHOLE_AT_ONCE:])
