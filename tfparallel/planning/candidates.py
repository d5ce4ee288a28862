"""Which mesh is the fastest of those that fit: all of them, by predicted steps or by trials.

Candidates are the meshes that take all devices, and one device alone: where devices share cores,
nothing else may be as fast. Replicas of whole models come three times: as they are, sharing out the
optimizer, or the weights too. What the model cannot use, or what exceeds a device's memory, is
listed behind them, with the reason. Where the parallelism is given, they are its own.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfparallel.layout.balance import NoPartition
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import Machine, ModelCosts
from tfparallel.layout.schedule import ScheduleError, make_schedule
from tfparallel.planning.prediction import Pieces, Prediction, predict
from tfparallel.texts import size_text

__all__ = [
    "BALANCES",
    "CLOSE",
    "Candidate",
    "Choices",
    "parallelism_of",
    "meshes_of",
    "rank",
    "with_trials",
]

BALANCES = ("time", "both", "memory")
_NUM_MICRO_BATCHES, _NUM_MICRO_BATCHES_OF_A_REPLICA = 8, 4  # As the builders have it.
CLOSE = 0.05  # Steps that differ by less may be measured the other way round.
_SHARDS = ("optimizer", "parameters")


@dataclasses.dataclass(frozen=True)
class Choices:
    """What was asked for, of every mesh.

    Attributes:
        batch_size: The rows of a batch.
        device_memory: How many bytes a device may hold; None for no limit.
        num_micro_batches: Of a replica, where a mesh has a pipeline; None: as it has by default.
        schedule: "gpipe", "1f1b" or "interleaved".
        chunks_per_device: As `make_schedule` takes it.
        recompute: "never", "always" or "except_last".
        balances: By what a pipeline may be cut, the best that fits is taken: of `BALANCES`.
        parallelism: "auto" for all meshes of all devices, and one device; "pipeline" for one
            pipeline; "model" for layers on one device, on two, and so on.
    """

    batch_size: int
    device_memory: int | None = None
    num_micro_batches: int | None = None
    schedule: str = "1f1b"
    chunks_per_device: int | None = None
    recompute: str = "never"
    balances: Sequence[str] = BALANCES
    parallelism: str = "auto"

    def meshes(self, num_devices: int) -> list[Mesh]:
        """Returns the meshes to choose among."""
        if self.parallelism == "model":
            return [Mesh(pipeline=number) for number in range(1, num_devices + 1)]
        if self.parallelism == "pipeline":
            return [Mesh(pipeline=num_devices)]
        return list(dict.fromkeys([Mesh(), *meshes_of(num_devices)]))

    def shards(self, mesh: Mesh) -> tuple[str | None, ...]:
        """Returns what the replicas of a mesh may share out, None for nothing."""
        are_whole_models = self.parallelism == "auto" and mesh.data == mesh.size > 1
        return (None, *_SHARDS) if are_whole_models else (None,)

    def num_pieces(self, mesh: Mesh) -> int:
        """Returns the micro-batches of a replica: as many as the builder would take."""
        if mesh.pipeline == 1 or self.parallelism == "model":
            return 1
        if self.num_micro_batches is not None:
            return self.num_micro_batches
        is_alone = parallelism_of(mesh) == "pipeline"
        number = _NUM_MICRO_BATCHES if is_alone else _NUM_MICRO_BATCHES_OF_A_REPLICA
        return max(1, min(number, self.batch_size // mesh.data))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, what its replicas share out, and what is said of it.

    Attributes:
        mesh: The mesh.
        num_micro_batches: Of a replica.
        layers_per_stage: Where it is cut; empty where nothing is predicted.
        prediction: Its step and its memory; None where the model cannot use it.
        why_not: Why it cannot be taken; None where it can.
        balance: By what it is cut; None without a pipeline.
        measured_seconds: What a step took when the mesh was tried; None if it was not.
        is_placed: Whether its stages are layers on devices, without micro-batches.
        shard: What its replicas share out: "optimizer", "parameters", or None for nothing.
    """

    mesh: Mesh
    num_micro_batches: int = 1
    layers_per_stage: tuple[int, ...] = ()
    prediction: Prediction | None = None
    why_not: str | None = None
    balance: str | None = None
    measured_seconds: float | None = None
    is_placed: bool = False
    shard: str | None = None

    @property
    def name(self) -> str:
        """The mesh, and what is shared out, in words."""
        return str(self.mesh) + ("" if self.shard is None else f", shard={self.shard}")

    @property
    def parallelism(self) -> str:
        """The parallelism that trains on the mesh, as `--parallel` names it."""
        if self.is_placed and self.mesh.pipeline > 1:
            return "model"
        return parallelism_of(self.mesh)

    @property
    def step_seconds(self) -> float:
        """A step, as measured if the mesh was tried, else as predicted."""
        if self.measured_seconds is not None:
            return self.measured_seconds
        return self.prediction.step_seconds

    @property
    def held_bytes(self) -> int | None:
        """What the fullest device holds."""
        return None if self.prediction is None else max(self.prediction.held_bytes)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it; what is not known is left out."""
        values: dict[str, Any] = {"mesh": dataclasses.asdict(self.mesh), "form": self.parallelism}
        if self.prediction is not None:
            values |= {
                "num_micro_batches": self.num_micro_batches,
                "layers_per_stage": list(self.layers_per_stage),
                "step_seconds": self.prediction.step_seconds,
                "seconds": self.prediction.parts,
                "held_bytes": list(self.prediction.held_bytes),
                "bubble": self.prediction.bubble,
                "stages": [stage.as_json() for stage in self.prediction.stages],
            }
        names = ("shard", "balance", "measured_seconds", "why_not")
        given = {name: getattr(self, name) for name in names}
        return values | {name: value for name, value in given.items() if value is not None}


def parallelism_of(mesh: Mesh) -> str:
    """Returns the parallelism that trains on a mesh, as `--parallel` names it.

    Example:
        >>> [parallelism_of(mesh) for mesh in (Mesh(), Mesh(data=2), Mesh(data=2, pipeline=2))]
        ['none', 'data', 'hybrid']
    """
    axes = [axis for axis, size in dataclasses.asdict(mesh).items() if size > 1]
    if len(axes) > 1 or axes == ["sequence"]:
        return "hybrid"
    return axes[0] if axes else "none"


def meshes_of(num_devices: int) -> Iterator[Mesh]:
    """Yields every mesh of so many devices, the most replicas first.

    Example:
        >>> [str(mesh) for mesh in meshes_of(2)]
        ['data=2', 'pipeline=2', 'tensor=2', 'sequence=2']
    """
    for data in _divisors(num_devices):
        for pipeline in _divisors(num_devices // data):
            parts = num_devices // data // pipeline
            yield Mesh(data, pipeline, tensor=parts)
            if parts > 1:
                yield Mesh(data, pipeline, sequence=parts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(number, 0, -1) if number % n == 0]


def rank(
    costs: ModelCosts,
    num_devices: int,
    choices: Choices,
    machine: Machine,
    *,
    splits_of: Callable[[Mesh], Mapping[str, str]] = lambda mesh: {},
    refusal: Callable[[Mesh, str | None], str | None] = lambda mesh, shard: None,
) -> list[Candidate]:
    """Returns every candidate, the best first.

    Those that can be taken come by their predicted steps, layers on devices by the number of
    devices. What shares out its state comes before the others only if it is faster by more than
    predictions can tell apart, since more works with whole weights; and where replicas send what
    was not measured, not before those that fit and share out less. Then come those that do not
    fit, by their memory, and then what the model cannot use.

    Args:
        costs: Of the model.
        num_devices: How many devices there are.
        choices: What was asked for.
        machine: What the devices share.
        splits_of: How the layers of the model are split on a mesh, by name.
        refusal: Says why a mesh, with what its replicas share out, refuses the model, or None.
    """
    found = [
        _candidate(costs, mesh, shard, choices, machine, splits_of, refusal)
        for mesh in choices.meshes(num_devices)
        if mesh.sequence == 1 or splits_of(mesh)  # Most models have no sequence at all.
        for shard in choices.shards(mesh)
    ]

    seconds = _seconds_to_compare(found, is_sent=math.isinf(machine.side_by_side))

    def place(candidate: Candidate) -> tuple:
        if candidate.prediction is None:
            return (2, 0.0)
        if candidate.why_not is not None:
            return (1, candidate.held_bytes)
        if choices.parallelism == "model":  # As few devices as do, or all.
            return (0, candidate.mesh.size * (-1 if choices.device_memory is None else 1))
        return (0, seconds[candidate.name])

    return sorted(found, key=place)  # Of two alike the one that shares out less stays first.


def _seconds_to_compare(found: Sequence[Candidate], *, is_sent: bool) -> dict[str, float]:
    """Steps of those that can be taken, by name, with what keeps shares from coming first."""
    seconds: dict[str, float] = {}
    least: dict[Mesh, float] = {}
    for candidate in found:  # Of one mesh those that share out more come later.
        if candidate.why_not is None:
            own = candidate.prediction.step_seconds * (1 if candidate.shard is None else 1 + CLOSE)
            own = max(own, least.get(candidate.mesh, 0.0) if is_sent else 0.0)
            seconds[candidate.name] = least[candidate.mesh] = own
    return seconds


def with_trials(
    ranked: Sequence[Candidate], trials: Mapping[str, float | str]
) -> list[Candidate]:
    """Returns candidates in the order of their trials; what was not tried stands behind.

    Args:
        ranked: What `rank` returned.
        trials: The seconds of a step of each one that was tried, by its name, or why it could not
            be trained.
    """

    def tried(candidate: Candidate) -> Candidate:
        found = trials.get(candidate.name)
        if isinstance(found, str):
            return dataclasses.replace(candidate, prediction=None, why_not=found)
        return dataclasses.replace(candidate, measured_seconds=found)

    def place(candidate: Candidate) -> tuple:
        if candidate.prediction is None:
            return (3, 0.0)
        if candidate.why_not is not None:
            return (2, 0.0)  # Those of one number stay in the order that they had.
        if candidate.measured_seconds is None:
            return (1, 0.0)
        return (0, candidate.measured_seconds)

    return sorted(map(tried, ranked), key=place)


def _candidate(costs, mesh, shard, choices, machine, splits_of, refusal) -> Candidate:
    number = choices.num_pieces(mesh)
    splits = splits_of(mesh) if mesh.parts > 1 else {}
    why_not = _cannot_use(costs, mesh, choices, number, splits) or refusal(mesh, shard)
    if why_not is not None:
        return Candidate(mesh, number, why_not=why_not, shard=shard)
    try:
        schedule = _schedule(mesh, choices, number)
    except ScheduleError as error:
        return Candidate(mesh, number, why_not=str(error).partition(". Received")[0])
    is_placed = choices.parallelism == "model"
    pieces = Pieces(
        mesh, choices.batch_size, schedule, (), splits, choices.recompute, is_placed, shard
    )
    found = []
    for balance in choices.balances if mesh.pipeline > 1 else [None]:
        counts, balance = _cut(costs, pieces, balance, choices)
        prediction = predict(costs, dataclasses.replace(pieces, layers_per_stage=counts), machine)
        over = max(prediction.held_bytes) - (choices.device_memory or float("inf"))
        why_not = f"{size_text(over)} too much for a device" if over > 0 else None
        found.append(
            Candidate(
                mesh, number, counts, prediction, why_not, balance, None, is_placed, shard
            )
        )
    fitting = [candidate for candidate in found if candidate.why_not is None]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.prediction.step_seconds)
    return min(found, key=lambda candidate: candidate.held_bytes)


def _schedule(mesh, choices, num_micro_batches):
    if mesh.pipeline == 1 or choices.parallelism == "model":
        return make_schedule("1f1b", mesh.pipeline, 1)
    chunks = choices.chunks_per_device
    return make_schedule(choices.schedule, mesh.pipeline, num_micro_batches, chunks)


def _cannot_use(costs, mesh, choices, num_micro_batches, splits) -> str | None:
    num_pieces, num_stages = mesh.data * num_micro_batches, mesh.pipeline
    if mesh.pipeline > 1 and choices.schedule == "interleaved":
        num_stages *= choices.chunks_per_device or 2
    if num_pieces > choices.batch_size:
        return f"{num_pieces} pieces of a batch of {choices.batch_size} rows"
    # A pipeline that is asked for by name may have stages that pass on what they are given.
    if num_stages > len(costs.layers) and choices.parallelism != "pipeline":
        return f"{num_stages} stages of {len(costs.layers)} layers"
    if mesh.parts > 1 and not splits:
        return f"no layer can be split into {mesh.parts} parts"
    return None


def _cut(costs: ModelCosts, pieces: Pieces, balance: str | None, choices: Choices):
    """The number of layers of each stage, and by what they are cut."""
    if balance is None:
        return (len(costs.layers),), None
    number, rows, at_once = pieces.schedule.num_stages, pieces.rows, pieces.all_gradients
    # Among all meshes, one that is too large for a device is cut by the next balance, too.
    limit = None if choices.parallelism == "auto" else choices.device_memory
    try:
        return tuple(costs.cut(number, rows, balance, limit, all_gradients=at_once)), balance
    except NoPartition:
        return tuple(costs.cut(number, rows, "memory", all_gradients=at_once)), "memory"
