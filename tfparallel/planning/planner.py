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
from tfparallel.layers.tensor_parallel import SplitRequest, parts_planned, splits_of
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import Line, Machine, ModelCosts
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.pipeline.pass_writes import check_state
from tfparallel.placement.graph import layers_in_order
from tfparallel.placement.layer_costs import bytes_of, model_costs
from tfparallel.placement.layer_timing import measured_side_by_side
from tfparallel.placement.model_parallel import check_model
from tfparallel.planning.calibration import calibrated
from tfparallel.planning.candidates import Candidate, Choices, parallelism_of, rank
from tfparallel.planning.part_timing import measured_whole_shares
from tfparallel.planning.reasons import Remedy, remedies, why_first
from tfparallel.planning.step_timing import measured_loss, measured_sum, measured_update
from tfparallel.planning.tiny_model import measured_tiny_steps
from tfparallel.problems import PlacementError
from tfparallel.replication.sharding import large_weights
from tfparallel.seams.keras import layers_in
from tfparallel.update.optimizer_kinds import check_elementwise
from tfparallel.variables.storageless import NeedsStorage, StoragelessModel

__all__ = ["Plan", "make_plan"]

_NUM_PIECES = 8  # As many as a pipeline makes of a batch.


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer, and what it rests on.

    Attributes:
        ranked: The candidates, the best first.
        choices: What was asked for.
        num_devices: How many devices there are.
        side_by_side: As `Machine` has it; infinite where each device computes by itself.
        num_cores: That logical CPU devices share; None where there are GPUs.
        measured_rows: The numbers of rows that layers were measured at.
        has_loss: Whether the loss was measured.
        seconds: How long the measuring took.
        share_in_parts: The share of the weights that a mesh's axis of parts divides; None where no
            mesh has one, or nothing can be split.
        trial_seconds: How long the trials of meshes took.
        would_fit: If nothing fits, what would make something fit.
    """

    ranked: Sequence[Candidate]
    choices: Choices
    num_devices: int
    side_by_side: float
    num_cores: int | None
    measured_rows: Sequence[int]
    has_loss: bool
    seconds: float
    share_in_parts: float | None = None
    trial_seconds: float = 0.0
    would_fit: Sequence[Remedy] = ()

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
            **({"why": self.why} if self.choices.parallelism == "auto" else {}),
            "measured": {
                "rows": list(self.measured_rows),
                "side_by_side": None if math.isinf(self.side_by_side) else self.side_by_side,
                "num_cores": self.num_cores,
                "loss": self.has_loss,
                "seconds": self.seconds,
                "trial_seconds": self.trial_seconds,
            },
            "share_in_parts": self.share_in_parts,
            "would_fit": [remedy.as_json() for remedy in self.would_fit],
        }


def make_plan(
    build_model: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], None],
    num_devices: int,
    choices: Choices,
    *,
    batch_normalization: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Measures a model's layers, and ranks what so many devices can do by it.

    Args:
        build_model: Builds a functional or Sequential model.
        compile_model: Compiles it.
        num_devices: How many devices there are.
        choices: What is asked for.
        batch_normalization: As `pipeline_parallel` takes it.
        progress: Is told what is measured, while it is.

    Raises:
        PlacementError: If the model's layers cannot be seen, or the pipeline that is planned cannot
            train it.
    """
    started = time.perf_counter()
    try:
        model = check_model(StoragelessModel(build_model).model)
    except NeedsStorage:
        model = check_model(build_model())
    if not model.compiled:
        compile_model(model)
    meshes = choices.meshes(num_devices)
    if choices.parallelism == "pipeline":
        why_not = _refusal(model, meshes[0], None, choices, batch_normalization)
        if why_not is not None:
            raise PlacementError(f"The model cannot be trained in this pipeline: {why_not}.")
    sizes = _sizes(num_devices, choices)
    cores = None if list_devices("GPU") else len(available_cores())
    progress("steps of a tiny model")
    tiny_steps = measured_tiny_steps(
        model.optimizer,
        on_replicas=any(mesh.data > 1 for mesh in meshes),
        in_stages=num_devices > 1 and choices.parallelism != "model",
        in_shares=any(
            shard is not None and _shares_refused(model, shard) is None
            for mesh in meshes
            for shard in choices.shards(mesh)
        ),
    )
    costs, has_loss = _measured_costs(model, sizes, choices, progress)
    machine = Machine(sum_seconds=_sum_seconds(progress)) if num_devices > 1 else Machine()
    if any(mesh.tensor > 1 for mesh in meshes):
        costs = _with_parts(model, costs, num_devices, choices.batch_size, progress)
    if num_devices > 1 and choices.parallelism != "model":  # Whose devices take turns.
        machine = _sharing(model, costs, machine, num_devices, cores, sizes[0], progress)
    overhead, machine = calibrated(tiny_steps, costs.update, machine)
    costs = dataclasses.replace(costs, overhead_seconds=overhead)
    splits = functools.cache(lambda mesh: _splits(model, mesh))

    def ranked_as(choices: Choices, num_devices: int) -> list[Candidate]:
        def refusal(mesh: Mesh, shard: str | None) -> str | None:
            return _refusal(model, mesh, shard, choices, batch_normalization)

        return rank(costs, num_devices, choices, machine, splits_of=splits, refusal=refusal)

    ranked, would_fit = ranked_as(choices, num_devices), []
    if ranked[0].why_not is not None and choices.device_memory is not None:
        progress("what would fit")
        would_fit = remedies(ranked, choices, num_devices, ranked_as)
    return Plan(
        ranked,
        choices,
        num_devices,
        machine.side_by_side,
        cores,
        sizes,
        has_loss,
        time.perf_counter() - started,
        _share_in_parts(costs) if any(mesh.tensor > 1 for mesh in meshes) else None,
        would_fit=would_fit,
    )


def _sizes(num_devices: int, choices: Choices) -> list[int]:
    """The rows to measure at: of the batch, and of a small piece; or of the only piece there is."""
    rows = choices.batch_size
    if num_devices == 1 or choices.parallelism == "model":
        return [rows]
    if choices.parallelism == "pipeline":
        return [-(-rows // choices.num_pieces(Mesh(pipeline=num_devices)))]
    most_pieces = max(choices.num_micro_batches or _NUM_PIECES, num_devices)
    return sorted({max(1, rows // most_pieces), rows})


def _measured_costs(model, sizes, choices, progress) -> tuple[ModelCosts, bool]:
    costs = model_costs(
        model,
        sizes,
        optimizer=model.optimizer,
        measures_forward=choices.parallelism == "pipeline",
        progress=progress,
    )
    costs = _with_shares(model, costs)
    progress("loss and updates")
    losses = {rows: measured_loss(model, rows) for rows in sizes}
    has_loss = None not in losses.values()
    costs = dataclasses.replace(
        costs,
        loss=Line.through(losses) if has_loss else Line(),
        update=Line.through(measured_update(model.optimizer)),
    )
    return costs, has_loss


def _with_shares(model, costs) -> ModelCosts:
    """The costs, with the weights of which replicas may keep shares."""
    large = {id(weight) for weight in large_weights(model)}
    layers = [
        dataclasses.replace(
            own, shared_bytes=tuple(bytes_of(v) for v in layer.variables if id(v) in large)
        )
        for own, layer in zip(costs.layers, layers_in_order(model), strict=True)
    ]
    return dataclasses.replace(costs, layers=layers)


def _with_parts(model, costs, num_parts, rows, progress) -> ModelCosts:
    """The costs, with what each part of a split layer does whole."""
    progress("parts of layers")
    seconds = {layer.layer: layer.seconds(rows) for layer in costs.layers}
    splits = _splits(model, Mesh(tensor=num_parts))
    shares = measured_whole_shares(model, splits, num_parts, rows, seconds)
    split = _split_layers(_plans(model, Mesh(tensor=num_parts)))
    whole = {layer.name: _whole_weights(layer, split) for layer in layers_in_order(model)}
    layers = [
        dataclasses.replace(
            layer, whole_share=shares.get(layer.layer), whole_weights=whole[layer.layer]
        )
        for layer in costs.layers
    ]
    return dataclasses.replace(costs, layers=layers)


def _share_in_parts(costs: ModelCosts) -> float | None:
    """The share of the weights that parts divide; None if they divide nothing."""
    sizes = [layer.parameter_bytes for layer in costs.layers]
    divided = [(1 - layer.whole_weights) * layer.parameter_bytes for layer in costs.layers]
    return sum(divided) / sum(sizes) if sum(divided) else None


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
    """How the layers are split into the parts of a mesh, by name; empty where none is.

    What is split inside of a layer, a composite one or a model, is "inside".
    """
    plans = _plans(model, mesh)
    kinds, split = splits_of(plans), _split_layers(plans)
    return {
        layer.name: kinds.get(layer.name, "inside")
        for layer in layers_in_order(model)
        if split.intersection(map(id, layers_in(layer)))
    }


def _plans(model, mesh):
    is_hybrid = parallelism_of(mesh) == "hybrid"  # Which leaves these whole.
    whole = frozenset(map(id, batch_norms(model))) if is_hybrid else ()
    try:
        request = SplitRequest(whole=whole, by_positions=mesh.sequence > 1)
        return parts_planned(model, mesh.parts, request)
    except PlacementError:
        return []


def _split_layers(plans) -> set[int]:
    """The `id` of each layer that is split."""
    return {
        id(layer)
        for group, kinds in plans
        for layer in group.layers
        if group.name_of(layer) in kinds
    }


def _whole_weights(layer, split: set[int]) -> float:
    """The share of a layer's weights that parts do not divide."""
    inner = [each for each in layers_in(layer) if id(each) in split]
    in_parts = {id(v): math.prod(v.shape) for each in inner for v in each.weights}
    total = sum(math.prod(v.shape) for v in layer.weights)
    return 1 - sum(in_parts.values()) / total if total else 0.0


def _shares_refused(model, shard: str) -> str | None:
    """Why replicas cannot share out a state of the model, as far as that is seen; else None."""
    try:
        check_elementwise(model.optimizer, shares=True)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return None


def _refusal(
    model, mesh: Mesh, shard: str | None, choices: Choices, batch_normalization: str | None
) -> str | None:
    """Why a mesh, or what its replicas share out, refuses the model; None if neither does."""
    if choices.parallelism == "model":
        return None
    if shard is not None:
        return _shares_refused(model, shard)
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
