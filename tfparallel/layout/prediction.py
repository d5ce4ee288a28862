"""The step of a mesh, and what its devices hold, from what the layers cost: nothing is run.

    step = overhead + passes + sums of gradients + updates

The passes are those of one replica, by the schedule's timeline: all replicas do the same at the
same time. Where devices share cores, they slow each other down. While a of them are at work each
takes max(1, a/S) times as long, if S is how much more is done side by side:

    passes = ∫ max(1, a(t)/S) dt        a(t) = D · Σ of the parts at work at t

A split layer is on T devices, each with 1/T of what can be divided; the others are on the first
part alone, and the other parts stand still.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from tfparallel.layout.costs import LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.schedule import Schedule, most_held
from tfparallel.layout.simulator import StageSeconds, Timeline, simulate

__all__ = ["Pieces", "Prediction", "predict"]

# A forward pass is one of the three products of a pass: outputs, and the gradients of inputs and of
# weights.
_FORWARD_SHARE = 1 / 3
# What a split layer's parts add up, as multiples of its outputs and of its inputs.
_SUMS = {
    "column": (0, 1),
    "column, gathered": (1, 1),
    "row": (1, 0),
    "heads": (1, 1),
    "vocabulary": (1, 0),
}


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
    """

    mesh: Mesh
    batch_size: int
    schedule: Schedule
    layers_per_stage: Sequence[int]
    splits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recompute: str = "never"

    @property
    def rows(self) -> int:
        """Of the largest piece."""
        return -(-self.batch_size // (self.mesh.data * self.schedule.num_micro_batches))

    @property
    def has_calls(self) -> bool:
        """Whether pieces go through calls of stages, as in pipelines and hybrid meshes."""
        mesh = self.mesh
        is_alone = mesh.pipeline == 1 and (mesh.data == 1 or mesh.tensor == 1)
        return not is_alone or self.schedule.num_micro_batches > 1


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A mesh's step.

    Attributes:
        overhead_seconds: Of a step with next to nothing to do, and of what replicas add to it.
        passes_seconds: Forward and backward, of all pieces.
        sums_seconds: Of the gradients of pieces and replicas.
        update_seconds: Of the optimizer.
        held_bytes: The most that each device of a replica holds, the first part of a stage.
        bubble: The share of the passes in which stages stand still.
    """

    overhead_seconds: float
    passes_seconds: float
    sums_seconds: float
    update_seconds: float
    held_bytes: tuple[int, ...]
    bubble: float = 0.0

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
        }


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The layers of one stage, with what they have been found to cost."""

    layers: Sequence[LayerCosts]
    received_bytes: int  # For a row.
    seconds: float  # Of a piece, on the part that works longest.
    busy: float  # Of a piece, on all parts.


def predict(costs: ModelCosts, pieces: Pieces, machine: Machine) -> Prediction:
    """Predicts the step of a mesh, and what each device holds.

    Args:
        costs: Of the model.
        pieces: The mesh, and how a batch goes through it.
        machine: What the devices share.
    """
    mesh, schedule = pieces.mesh, pieces.schedule
    stages = list(_stages(costs, pieces, machine))
    seconds = [_seconds(stage, pieces.recompute) for stage in stages]
    timeline = simulate(schedule, seconds)
    at_work = [mesh.data * stage.busy / (stage.seconds or 1.0) for stage in stages]
    return Prediction(
        overhead_seconds=costs.overhead_seconds + _replicas_seconds(pieces, machine),
        passes_seconds=_slowed(timeline, at_work, machine),
        sums_seconds=_sums_seconds(stages, pieces, machine),
        update_seconds=_update_seconds(costs.update, stages, pieces, machine),
        held_bytes=tuple(
            _held_bytes(costs, stages, pieces, device) for device in range(mesh.pipeline)
        ),
        bubble=timeline.bubble,
    )


def _replicas_seconds(pieces, machine) -> float:
    """What replicas add where no calls of stages do."""
    replicas = pieces.mesh.data
    return 0.0 if replicas == 1 or pieces.has_calls else replicas * machine.replica_seconds


def _stages(costs, pieces, machine):
    mesh, rows = pieces.mesh, pieces.rows
    bounds = [0, *itertools.accumulate(pieces.layers_per_stage)]
    for first, last in itertools.pairwise(bounds):
        layers = costs.layers[first:last]
        seconds = busy = 2 * machine.call_seconds if pieces.has_calls else 0.0  # Forward, backward.
        for index, layer in enumerate(layers, first):
            kind = pieces.splits.get(layer.layer)
            if kind is None or mesh.tensor == 1:
                own = all_parts = layer.seconds(rows)
            else:
                sums = _sums_of_parts(costs, index, kind, pieces, machine)
                part = layer.part_seconds(rows, mesh.tensor)
                own, all_parts = part + sums, mesh.tensor * part + sums
            seconds += own
            busy += all_parts
        if last == len(costs.layers):
            seconds += costs.loss(rows)
            busy += costs.loss(rows)
        yield _Stage(layers, costs.received_bytes(first, last), seconds, busy)


def _sums_of_parts(costs, index, kind, pieces, machine) -> float:
    outputs, inputs = _SUMS.get(kind, (0, 0))
    size = outputs * costs.layers[index].output_bytes
    size += inputs * sum(sent for sent, readers in costs.edges.values() if index in readers)
    return machine.sum_seconds(pieces.mesh.tensor, pieces.rows * size) if size else 0.0


def _seconds(stage, recompute) -> StageSeconds:
    forward = _FORWARD_SHARE * stage.seconds
    again = forward if recompute != "never" else 0.0
    return StageSeconds(forward, stage.seconds - forward + again)


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
    """The share of a layer that is on the first part of its stage."""
    is_split = layer.layer in pieces.splits and pieces.mesh.tensor > 1
    return 1 / pieces.mesh.tensor if is_split else 1.0


def _sums_seconds(stages, pieces, machine) -> float:
    """Each replica adds up its pieces', then the replicas' are added up.

    Stages do so at the same time; where they share cores it is one after the other.
    """
    replicas, more_pieces = pieces.mesh.data, pieces.schedule.num_micro_batches - 1
    longest = total = 0.0
    for stage in stages:
        size = sum(layer.trained_bytes for layer in stage.layers)
        of_pieces = more_pieces * machine.sum_seconds(2, size)
        of_replicas = machine.sum_seconds(replicas, size) if replicas > 1 else 0.0
        longest = max(longest, of_pieces + of_replicas)
        total += replicas * of_pieces + of_replicas
    return max(longest, total / machine.side_by_side)


def _update_seconds(update: Line, stages, pieces, machine) -> float:
    """Each device updates what it holds; each replica its own copies."""
    mesh = pieces.mesh
    longest = total = 0.0
    for stage in stages:
        own = all_parts = 0.0
        for layer in stage.layers:
            share = _share(layer, pieces)
            of_weights = layer.num_trained * update.fixed
            of_bytes = layer.trained_bytes * update.each
            own += of_weights + share * of_bytes
            all_parts += of_weights / share + of_bytes
        longest = max(longest, own)
        total += mesh.data * all_parts
    return max(longest, total / machine.side_by_side)


def _held_bytes(costs, stages, pieces, device) -> int:
    """The most that a device holds at one time, as the schedule has it."""
    schedule, rows = pieces.schedule, pieces.rows
    # Those of pieces and replicas are added up, and so all of them are there before an update.
    all_gradients = pieces.has_calls or pieces.mesh.data > 1
    total = update = 0.0
    for index, stage in enumerate(stages):
        if schedule.device_of(index) == device:
            for layer in stage.layers:
                share = _share(layer, pieces)
                total += share * layer.state_bytes(all_gradients)
                update = max(update, 0.0 if all_gradients else share * layer.update_bytes)

    def sizes(index: int) -> tuple[float, float]:
        stage = stages[index]
        made = sum(_share(layer, pieces) * layer.activation_bytes(rows) for layer in stage.layers)
        if index == schedule.num_stages - 1:
            made += costs.loss_bytes(rows)
        sent = rows * stage.received_bytes
        return (sent + made, 0.0) if pieces.recompute == "never" else (sent, made)

    largest = most_held(schedule.instructions[device], sizes)
    # Most activations are gone when a large weight is updated.
    return int(total + max(largest, update))
