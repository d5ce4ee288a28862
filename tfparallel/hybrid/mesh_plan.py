"""Which mesh a task should take: its layers measured once, and every mesh predicted from that.

The model is built without storage and never held whole; nothing is trained. Layers run alone, at
the rows of a whole batch and at those of the smallest piece; what lies between is on a line.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfparallel.cluster.environment import available_cores
from tfparallel.collectives.cost_model import CostModel
from tfparallel.devices import list_devices
from tfparallel.hybrid.mesh_overhead import measured_tiny_steps
from tfparallel.hybrid.part_timing import measured_whole_shares
from tfparallel.layers.tensor_parallel import parts_planned
from tfparallel.layout.calibration import calibrated
from tfparallel.layout.costs import LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.ranking import Candidate, Choices, parallelism_of, rank, why_first
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.pipeline.pass_scope import check_state
from tfparallel.placement.costs import bytes_of, layer_costs
from tfparallel.placement.graph import edges, layers_in_order, row_bytes
from tfparallel.placement.model_parallel import check_model
from tfparallel.placement.step_timing import measured_loss, measured_sum, measured_update
from tfparallel.placement.storageless import NeedsStorage, StoragelessModel
from tfparallel.placement.timing import (
    measured_seconds,
    measured_side_by_side,
)
from tfparallel.problems import PlacementError
from tfparallel.update.elementwise import check_elementwise

__all__ = ["MeshPlan", "plan_meshes"]

_NUM_PIECES = 8  # As many as a pipeline makes of a batch.
_ARRAYS_OF_A_LOSS = 2  # Beside the outputs themselves, their gradient.


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """The answer, and what it rests on.

    Attributes:
        ranked: One device and every mesh, the best first.
        choices: What was asked for.
        num_devices: How many devices there are.
        side_by_side: As `Machine` has it; infinite where each device computes by itself.
        num_cores: That logical CPU devices share; None where there are GPUs.
        measured_rows: The numbers of rows that layers were measured at.
        has_loss: Whether the loss was measured.
        seconds: How long the measuring took.
        trial_seconds: How long the trials of meshes took.
    """

    ranked: Sequence[Candidate]
    choices: Choices
    num_devices: int
    side_by_side: float
    num_cores: int | None
    measured_rows: Sequence[int]
    has_loss: bool
    seconds: float
    trial_seconds: float = 0.0

    @property
    def first(self) -> Candidate | None:
        """The fastest that fits; None if nothing does."""
        return self.ranked[0] if self.ranked[0].why_not is None else None

    @property
    def num_trials(self) -> int:
        """How many meshes were tried."""
        return sum(candidate.measured_seconds is not None for candidate in self.ranked)

    @property
    def why(self) -> str:
        """Why the first is first, in a line."""
        return why_first(self.ranked)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {
            "num_devices": self.num_devices,
            **dataclasses.asdict(self.choices),
            "meshes": [candidate.as_json() for candidate in self.ranked],
            "why": self.why,
            "measured": {
                "rows": list(self.measured_rows),
                "side_by_side": None if math.isinf(self.side_by_side) else self.side_by_side,
                "num_cores": self.num_cores,
                "loss": self.has_loss,
                "seconds": self.seconds,
                "trial_seconds": self.trial_seconds,
            },
        }


def plan_meshes(
    build_model: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], None],
    num_devices: int,
    choices: Choices,
    *,
    batch_normalization: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> MeshPlan:
    """Measures a model's layers, and ranks the meshes of so many devices by it.

    Args:
        build_model: Builds a functional or Sequential model.
        compile_model: Compiles it.
        num_devices: How many devices there are.
        choices: What is asked for.
        batch_normalization: As `pipeline_parallel` takes it.
        progress: Is told what is measured, while it is.

    Raises:
        PlacementError: If the model's layers cannot be seen.
    """
    started = time.perf_counter()
    try:
        model = check_model(StoragelessModel(build_model).model)
    except NeedsStorage:
        model = check_model(build_model())
    if not model.compiled:
        compile_model(model)
    sizes = _sizes(num_devices, choices)
    cores = None if list_devices("GPU") else len(available_cores())
    progress("steps of a tiny model")
    tiny_steps = measured_tiny_steps(model.optimizer, num_devices)
    costs, has_loss = _model_costs(model, sizes, progress)
    machine = Machine(sum_seconds=_sum_seconds(progress))
    if num_devices > 1:
        costs = _with_parts(model, costs, num_devices, choices.batch_size, progress)
        machine = _sharing(model, costs, machine, num_devices, cores, sizes[0], progress)
    overhead, machine = calibrated(tiny_steps, costs.update, machine)
    costs = dataclasses.replace(costs, overhead_seconds=overhead)
    ranked = rank(
        costs,
        num_devices,
        choices,
        machine,
        splits_of=lambda mesh: _splits(model, mesh),
        refusal=lambda mesh: _refusal(model, mesh, batch_normalization),
    )
    return MeshPlan(
        ranked,
        choices,
        num_devices,
        machine.side_by_side,
        cores,
        sizes,
        has_loss,
        time.perf_counter() - started,
    )


def _sizes(num_devices: int, choices: Choices) -> list[int]:
    """The rows to measure at: of the batch, and of a small piece."""
    if num_devices == 1:
        return [choices.batch_size]
    most_pieces = max(choices.num_micro_batches or _NUM_PIECES, num_devices)
    return sorted({max(1, choices.batch_size // most_pieces), choices.batch_size})


def _model_costs(model, sizes, progress) -> tuple[ModelCosts, bool]:
    progress("memory of the layers")
    most = max(sizes)
    held = layer_costs(model, most, optimizer=model.optimizer)
    seconds = {
        rows: measured_seconds(
            model, rows, progress=lambda layer, rows=rows: progress(f"{layer}, {rows} rows")
        )
        for rows in sizes
    }
    progress("loss and updates")
    losses = {rows: measured_loss(model, rows) for rows in sizes}
    has_loss = None not in losses.values()
    passed = edges(model)
    of_outputs = row_bytes(model.outputs)
    layers = []
    for index, (layer, cost) in enumerate(zip(layers_in_order(model), held, strict=True)):
        trained = [variable for variable in layer.variables if variable.trainable]
        layers.append(
            LayerCosts(
                cost.layer,
                Line.through({rows: seconds[rows][cost.layer] for rows in sizes}),
                cost.parameter_bytes,
                sum(map(bytes_of, trained)),
                cost.gradient_bytes,
                cost.slot_bytes,
                Line(0.0, cost.activation_bytes / most),
                passed.get(index, (of_outputs, ()))[0],
                len(trained),
                cost.update_bytes,
            )
        )
    costs = ModelCosts(
        layers,
        passed,
        Line.through(losses) if has_loss else Line(),
        Line(0.0, _ARRAYS_OF_A_LOSS * of_outputs),
        Line.through(measured_update(model.optimizer)),
    )
    return costs, has_loss


def _with_parts(model, costs, num_parts, rows, progress) -> ModelCosts:
    """The costs, with what each part of a split layer does whole."""
    progress("parts of layers")
    seconds = {layer.layer: layer.seconds(rows) for layer in costs.layers}
    splits = _splits(model, Mesh(tensor=num_parts))
    shares = measured_whole_shares(model, splits, num_parts, rows, seconds)
    layers = [
        dataclasses.replace(layer, whole_share=shares.get(layer.layer)) for layer in costs.layers
    ]
    return dataclasses.replace(costs, layers=layers)


def _sharing(model, costs, machine, num_devices, num_cores, rows, progress) -> Machine:
    """The machine, with what devices gain that share its cores."""
    if num_cores is None:
        return machine
    progress("layers side by side")
    number = min(num_devices, num_cores)
    seconds = {layer.layer: layer.seconds(rows) for layer in costs.layers}
    more = measured_side_by_side(model, rows, seconds, number) if number > 1 else 1.0
    return dataclasses.replace(machine, side_by_side=more)


def _sum_seconds(progress) -> Callable[[int, float], float]:
    """What a sum of the replicas' gradients takes: on one device, as `data_parallel` has it."""
    progress("sums")
    model = CostModel(alpha=0.0, beta=0.0, gamma=measured_sum(), transport="shared")
    return functools.partial(model.seconds, "reduce_to_one")


def _splits(model, mesh: Mesh) -> Mapping[str, str]:
    """How the layers are split into the parts of a mesh, by name; empty where none is."""
    asked: dict[str, str | None] = {}
    if parallelism_of(mesh) == "hybrid":  # Which leaves these whole.
        asked = {layer.name: None for layer in batch_norms(model)}
    try:
        plans = parts_planned(model, mesh.tensor, (asked, False))
    except PlacementError:
        return {}
    return {name: kind for _, kinds in plans for name, kind in kinds.items()}


def _refusal(model, mesh: Mesh, batch_normalization: str | None) -> str | None:
    """Why a mesh refuses the model; None if it does not."""
    parallelism = parallelism_of(mesh)
    try:
        if parallelism in ("pipeline", "hybrid"):
            check_state(model, batch_normalization)
        if mesh.tensor > 1:
            check_elementwise(model.optimizer, shares=False)
    except PlacementError as error:
        is_pipeline = parallelism in ("pipeline", "hybrid")
        if is_pipeline and batch_norms(model) and batch_normalization is None:
            return "batch normalization, unless --batch_normalization=deferred"
        return str(error).partition(". ")[0]
    return None
