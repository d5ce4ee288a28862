"""Plans the mesh for a task: measures each layer once, and predicts every mesh from that.

The model is built without storage, and never held in memory as a whole; nothing is trained. Layers
run one at a time, at the size of the whole batch and of the smallest piece; sizes in between are
interpolated linearly.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfparallel.cloning.storageless import NeedsStorage, StoragelessModel
from tfparallel.cluster.environment import available_cores
from tfparallel.collectives.cost_model import CostModel
from tfparallel.devices import list_devices
from tfparallel.layers.tensor_parallel import SplitRequest, parts_planned, splits_of
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import Line, Machine, ModelCosts
from tfparallel.pipeline.allowed_writes import check_state
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.placement.graph import layers_in_order
from tfparallel.placement.layer_costs import bytes_of, model_costs
from tfparallel.placement.layer_timing import measured_side_by_side
from tfparallel.placement.model_parallel import check_model
from tfparallel.planning.calibration import calibrated
from tfparallel.planning.candidates import Candidate, Choices, parallelism_of, rank
from tfparallel.planning.reasons import Remedy, remedies, why_first
from tfparallel.planning.timing import (
    measured_loss,
    measured_sum,
    measured_tiny_steps,
    measured_update,
    measured_whole_shares,
)
from tfparallel.problems import PlacementError
from tfparallel.replication.sharding import large_weights
from tfparallel.seams.keras import layers_in
from tfparallel.update.optimizer_kinds import check_elementwise

_NUM_PIECES = 8  # The default number of micro-batches of a pipeline.


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ranked candidates, with the measurements behind them.

    Attributes:
        ranked: The candidates, best first.
        choices: The user's settings.
        num_devices: Number of devices.
        side_by_side: As in `Machine`; infinite if devices do not share cores.
        num_cores: Cores that logical CPU devices share; None with GPUs.
        measured_rows: The batch sizes at which layers were measured.
        has_loss: Whether the loss was measured.
        seconds: Duration of the measurements.
        share_in_parts: The fraction of the weights that tensor parallelism divides; None if no mesh
            has a tensor axis, or nothing can be split.
        trial_seconds: Duration of the trials.
        would_fit: If nothing fits, the changes that would make something fit.
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
        """The fastest candidate that fits; None if none does."""
        return self.ranked[0] if self.ranked[0].why_not is None else None

    @property
    def num_trials(self) -> int:
        """Number of meshes that were tried."""
        return sum(candidate.measured_seconds is not None for candidate in self.ranked)

    @property
    def why(self) -> str:
        """Why the first candidate is first, in one line."""
        return why_first(self.ranked)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
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
    """Measures a model's layers, and ranks the meshes of `num_devices` devices.

    Args:
        build_model: Builds a functional or Sequential model.
        compile_model: Compiles it.
        num_devices: Number of devices.
        choices: The user's settings.
        batch_normalization: As for `pipeline_parallel`.
        progress: Called with a description of each measurement.

    Raises:
        PlacementError: If the model's layers are not visible (a subclassed model), or the requested
            pipeline cannot train it.
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
    if num_devices > 1 and choices.parallelism != "model":  # There, devices take turns.
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
    """Returns the numbers of rows to measure at: the whole batch and a small piece, if any."""
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
    """Returns the costs with the sizes of the weights that replicas may shard."""
    large = {id(weight) for weight in large_weights(model)}
    layers = [
        dataclasses.replace(
            layer_costs, shared_bytes=tuple(bytes_of(v) for v in layer.variables if id(v) in large)
        )
        for layer_costs, layer in zip(costs.layers, layers_in_order(model), strict=True)
    ]
    return dataclasses.replace(costs, layers=layers)


def _with_parts(model, costs, num_parts, rows, progress) -> ModelCosts:
    """Returns the costs with the work that every part of a split layer repeats."""
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
    """Returns the fraction of the weights that parts divide; None if they divide nothing."""
    sizes = [layer.parameter_bytes for layer in costs.layers]
    divided = [(1 - layer.whole_weights) * layer.parameter_bytes for layer in costs.layers]
    return sum(divided) / sum(sizes) if sum(divided) else None


def _sharing(model, costs, machine, num_devices, num_cores, rows, progress) -> Machine:
    """Returns the machine with the measured speedup of devices that share its cores."""
    if num_cores is None:
        return machine
    progress("layers side by side")
    number = min(num_devices, num_cores)
    seconds = {layer.layer: layer.seconds(rows) for layer in costs.layers}
    more = measured_side_by_side(model, rows, seconds, number) if number > 1 else 1.0
    return dataclasses.replace(machine, side_by_side=more)


def _sum_seconds(progress) -> Callable[[int, float], float]:
    """Returns the cost of summing gradients over replicas on one device, as in `data_parallel`."""
    progress("sums")
    model = CostModel(alpha=0.0, beta=0.0, gamma=measured_sum(), transport="shared")
    return functools.partial(model.seconds, "reduce_to_one")


def _splits(model, mesh: Mesh) -> Mapping[str, str]:
    """Returns how the layers are split into the parts of a mesh, by name; empty if none is.

    A composite layer or nested model with split layers inside is "inside".
    """
    plans = _plans(model, mesh)
    kinds, split = splits_of(plans), _split_layers(plans)
    return {
        layer.name: kinds.get(layer.name, "inside")
        for layer in layers_in_order(model)
        if split.intersection(map(id, layers_in(layer)))
    }


def _plans(model, mesh):
    is_hybrid = parallelism_of(mesh) == "hybrid"  # Hybrid keeps batch normalization whole.
    whole = frozenset(map(id, batch_norms(model))) if is_hybrid else ()
    try:
        request = SplitRequest(whole=whole, by_positions=mesh.sequence > 1)
        return parts_planned(model, mesh.parts, request)
    except PlacementError:
        return []


def _split_layers(plans) -> set[int]:
    """Returns the `id` of each split layer."""
    return {
        id(layer)
        for group, kinds in plans
        for layer in group.layers
        if group.name_of(layer) in kinds
    }


def _whole_weights(layer, split: set[int]) -> float:
    """Returns the fraction of a layer's weights that parts do not divide."""
    inner = [each for each in layers_in(layer) if id(each) in split]
    in_parts = {id(v): math.prod(v.shape) for each in inner for v in each.weights}
    total = sum(math.prod(v.shape) for v in layer.weights)
    return 1 - sum(in_parts.values()) / total if total else 0.0


def _shares_refused(model, shard: str) -> str | None:
    """Returns why replicas cannot shard the model's state, as far as can be checked, or None."""
    try:
        check_elementwise(model.optimizer, shares=True)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return None


def _refusal(
    model, mesh: Mesh, shard: str | None, choices: Choices, batch_normalization: str | None
) -> str | None:
    """Returns why a mesh, or its sharding, cannot train the model; None if both can."""
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
