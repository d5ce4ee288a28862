"""Ranks the candidate meshes by predicted or measured step time.

The candidates are the meshes that use all devices, and a single device, which may be the fastest if
devices share cores. Meshes of replicas only have three variants: plain, with a sharded optimizer,
and with sharded weights too. Meshes that the model cannot use, or that exceed a device's memory,
come last, with the reason. If a parallelism is requested, only its meshes are candidates.
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

BALANCES = ("time", "both", "memory")
_NUM_MICRO_BATCHES, _NUM_MICRO_BATCHES_OF_A_REPLICA = 8, 4  # The defaults of the builders.
CLOSE = 0.05  # A smaller difference of predicted steps may be reversed by a measurement.
_SHARDS = ("optimizer", "parameters")


@dataclasses.dataclass(frozen=True)
class Choices:
    """The user's settings, which apply to every mesh.

    Attributes:
        batch_size: Number of rows in a batch.
        device_memory: Bytes that a device may hold; None for no limit.
        num_micro_batches: Micro-batches per replica, for meshes with a pipeline; None for the
            default.
        schedule: "gpipe", "1f1b" or "interleaved".
        chunks_per_device: As for `make_schedule`.
        recompute: "never", "always" or "except_last".
        balances: The criteria for cutting a pipeline, from `BALANCES`; the best that fits is used.
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
        """Returns the candidate meshes."""
        if self.parallelism == "model":
            return [Mesh(pipeline=number) for number in range(1, num_devices + 1)]
        if self.parallelism == "pipeline":
            return [Mesh(pipeline=num_devices)]
        return list(dict.fromkeys([Mesh(), *meshes_of(num_devices)]))

    def shards(self, mesh: Mesh) -> tuple[str | None, ...]:
        """Returns the options for sharding over the replicas of a mesh; None means no sharding."""
        are_whole_models = self.parallelism == "auto" and mesh.data == mesh.size > 1
        return (None, *_SHARDS) if are_whole_models else (None,)

    def num_pieces(self, mesh: Mesh) -> int:
        """Returns the number of micro-batches per replica, as the builder would choose it."""
        if mesh.pipeline == 1 or self.parallelism == "model":
            return 1
        if self.num_micro_batches is not None:
            return self.num_micro_batches
        is_alone = parallelism_of(mesh) == "pipeline"
        number = _NUM_MICRO_BATCHES if is_alone else _NUM_MICRO_BATCHES_OF_A_REPLICA
        return max(1, min(number, self.batch_size // mesh.data))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh with a sharding option, and its evaluation.

    Attributes:
        mesh: The mesh.
        num_micro_batches: Micro-batches per replica.
        layers_per_stage: The cut into stages; empty without a prediction.
        prediction: Predicted step time and memory; None if the model cannot use the mesh.
        why_not: Why it cannot be used; None if it can.
        balance: The criterion of the cut; None without a pipeline.
        measured_seconds: Step time in a trial of the mesh; None without a trial.
        is_placed: Whether its stages are layers on devices, without micro-batches.
        shard: What is sharded over the replicas: "optimizer", "parameters", or None.
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
        """The mesh and its sharding, as text."""
        return str(self.mesh) + ("" if self.shard is None else f", shard={self.shard}")

    @property
    def parallelism(self) -> str:
        """The parallelism of the mesh, as a value of `--parallel`."""
        if self.is_placed and self.mesh.pipeline > 1:
            return "model"
        return parallelism_of(self.mesh)

    @property
    def step_seconds(self) -> float:
        """The measured step time if there was a trial, else the predicted one."""
        if self.measured_seconds is not None:
            return self.measured_seconds
        return self.prediction.step_seconds

    @property
    def held_bytes(self) -> int | None:
        """Bytes on the device that holds most; None without a prediction."""
        return None if self.prediction is None else max(self.prediction.held_bytes)

    def as_json(self) -> dict[str, Any]:
        """Returns the candidate as JSON values, without unknown ones."""
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
        optional = {name: getattr(self, name) for name in names}
        return values | {name: value for name, value in optional.items() if value is not None}


def parallelism_of(mesh: Mesh) -> str:
    """Returns the parallelism of a mesh, as a value of `--parallel`.

    Example:
        >>> [parallelism_of(mesh) for mesh in (Mesh(), Mesh(data=2), Mesh(data=2, pipeline=2))]
        ['none', 'data', 'hybrid']
    """
    axes = [axis for axis, size in dataclasses.asdict(mesh).items() if size > 1]
    if len(axes) > 1 or axes == ["sequence"]:
        return "hybrid"
    return axes[0] if axes else "none"


def meshes_of(num_devices: int) -> Iterator[Mesh]:
    """Yields every mesh of `num_devices` devices, those with most replicas first.

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
    """Returns all candidates, best first.

    Usable candidates are ordered by predicted step time, or by the number of devices for layers on
    devices. Sharding ranks before no sharding only if it is faster by more than the accuracy of the
    predictions, since more features work with whole weights. If communication between replicas was
    not measured, it never ranks before candidates of the same mesh that fit and shard less. Then
    come the candidates that do not fit, by memory, and then those that the model cannot use.

    Args:
        costs: The costs of the model.
        num_devices: Number of devices.
        choices: The user's settings.
        machine: What the devices share.
        splits_of: Returns how the layers of the model are split on a mesh, by name.
        refusal: Returns why a mesh with a sharding option cannot train the model, or None.
    """
    candidates = [
        _candidate(costs, mesh, shard, choices, machine, splits_of, refusal)
        for mesh in choices.meshes(num_devices)
        if mesh.sequence == 1 or splits_of(mesh)  # Most models have no sequences.
        for shard in choices.shards(mesh)
    ]

    seconds = _seconds_to_compare(candidates, is_sent=math.isinf(machine.side_by_side))

    def place(candidate: Candidate) -> tuple:
        if candidate.prediction is None:
            return (2, 0.0)
        if candidate.why_not is not None:
            return (1, candidate.held_bytes)
        if choices.parallelism == "model":  # As few devices as suffice, or all of them.
            return (0, candidate.mesh.size * (-1 if choices.device_memory is None else 1))
        return (0, seconds[candidate.name])

    return sorted(candidates, key=place)  # A stable sort: among equals, less sharding is first.


def _seconds_to_compare(candidates: Sequence[Candidate], *, is_sent: bool) -> dict[str, float]:
    """Returns the step times of usable candidates, by name, with a penalty for sharding."""
    seconds: dict[str, float] = {}
    least: dict[Mesh, float] = {}
    for candidate in candidates:  # Within one mesh, more sharding comes later.
        if candidate.why_not is None:
            step = candidate.prediction.step_seconds * (1 if candidate.shard is None else 1 + CLOSE)
            step = max(step, least.get(candidate.mesh, 0.0) if is_sent else 0.0)
            seconds[candidate.name] = least[candidate.mesh] = step
    return seconds


def with_trials(
    ranked: Sequence[Candidate], trials: Mapping[str, float | str]
) -> list[Candidate]:
    """Returns the candidates in the order of their trials, followed by those without a trial.

    Args:
        ranked: The result of `rank`.
        trials: For each candidate that was tried, by name, the seconds per step, or why it could
            not be trained.
    """

    def tried(candidate: Candidate) -> Candidate:
        outcome = trials.get(candidate.name)
        if isinstance(outcome, str):
            return dataclasses.replace(candidate, prediction=None, why_not=outcome)
        return dataclasses.replace(candidate, measured_seconds=outcome)

    def place(candidate: Candidate) -> tuple:
        if candidate.prediction is None:
            return (3, 0.0)
        if candidate.why_not is not None:
            return (2, 0.0)  # A stable sort: equal keys keep their order.
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
    candidates = []
    for balance in choices.balances if mesh.pipeline > 1 else [None]:
        counts, balance = _cut(costs, pieces, balance, choices)
        prediction = predict(costs, dataclasses.replace(pieces, layers_per_stage=counts), machine)
        over = max(prediction.held_bytes) - (choices.device_memory or float("inf"))
        why_not = f"{size_text(over)} too much for a device" if over > 0 else None
        candidates.append(
            Candidate(
                mesh, number, counts, prediction, why_not, balance, None, is_placed, shard
            )
        )
    fitting = [candidate for candidate in candidates if candidate.why_not is None]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.prediction.step_seconds)
    return min(candidates, key=lambda candidate: candidate.held_bytes)


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
        return f"{num_pieces} pieces, but a batch of {choices.batch_size} rows"
    # An explicitly requested pipeline may have empty stages.
    if num_stages > len(costs.layers) and choices.parallelism != "pipeline":
        return f"{num_stages} stages, but {len(costs.layers)} layers"
    if mesh.parts > 1 and not splits:
        return f"no layer can be split into {mesh.parts} parts"
    return None


def _cut(costs: ModelCosts, pieces: Pieces, balance: str | None, choices: Choices):
    """Returns the number of layers in each stage, and the criterion of the cut."""
    if balance is None:
        return (len(costs.layers),), None
    number, rows, at_once = pieces.schedule.num_stages, pieces.rows, pieces.all_gradients
    # With "auto", no limit is needed: if this cut exceeds it, the next criterion is tried anyway.
    limit = None if choices.parallelism == "auto" else choices.device_memory
    try:
        return tuple(costs.cut(number, rows, balance, limit, all_gradients=at_once)), balance
    except NoPartition:
        return tuple(costs.cut(number, rows, "memory", all_gradients=at_once)), "memory"
