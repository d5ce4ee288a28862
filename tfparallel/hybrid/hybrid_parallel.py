"""The builder `hybrid_parallel`: replicas of a plain Keras model that each span several devices."""

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.callbacks.chief_only import send_state
from tfparallel.cloning.storageless import StoragelessModel
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.collectives.compression_name import CompressionName
from tfparallel.extend import attach
from tfparallel.hybrid.hybrid_model import HybridModel
from tfparallel.hybrid.places import MeshPlaces
from tfparallel.layers.tensor_parallel import (
    Split,
    SplitRequest,
    parts_planned,
    split_in_place,
    splits_of,
)
from tfparallel.layout.layout import SHARED_OUT, Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.pipeline.batch_norm import batch_norms
from tfparallel.pipeline.pipeline_parallel import PipelineOptions, accumulating, in_micro_batches
from tfparallel.placement.graph import layers_in_order
from tfparallel.placement.layer_devices import read_limits
from tfparallel.problems import PlacementError, Problems, usable_devices
from tfparallel.replication.drop_in_strategies import MultiWorkerMirroredStrategy
from tfparallel.replication.sharding import large_weights
from tfparallel.replication.worker_session import WorkerSession
from tfparallel.seams.keras import layers_in
from tfparallel.texts import first_to_last
from tfparallel.update.shares import shard as shard_over
from tfparallel.user_log import notice
from tfparallel.variables.mesh_replica import replicas_of


def hybrid_parallel(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
    mesh: Mesh | Mapping[str, int],
    devices: Sequence[str] | None = None,
    *,
    num_micro_batches: int | None = None,
    schedule: str = "1f1b",
    recompute: str = "never",
    chunks_per_device: int | None = None,
    batch_normalization: str | None = None,
    layers_per_stage: Sequence[int] | None = None,
    split: Split | None = None,
    allow_empty_stages: bool = False,
    balance: str = "time",
    device_memory: int | str | None = None,
    batch_size: int = 32,
    compression: str | None = None,
    sync: str = "every_step",
    shard: str | None = None,
    check_rows: bool = True,
    allow_independent_workers: bool = False,
) -> keras.Model:
    """Trains replicas of a model, each on several devices, to the weights of one device.

    Use it when the model does not fit on one device and you have more devices than it needs: each
    replica passes its share of the rows of every batch through its own stages.

        piece (d, m)    micro-batch m of replica d: ⌈B/(D·M)⌉ rows at most
        gradient        Σ_d Σ_m g_dm, added up on each replica's devices, then summed over d

    Args:
        model_or_function: As for `pipeline_parallel`.
        mesh: The number of devices along each mesh axis: `tfparallel.Mesh(data=2, pipeline=2)`,
            or `{"data": 2, "pipeline": 2}`.
        devices: Names of the devices of this process, D·K·T·S in all workers together. Order:
            tensor or sequence fastest, then pipeline, then data. Default: the first ones.
        num_micro_batches: M, the number of micro-batches of each replica. Default: 4 if the mesh
            has a pipeline, else 1.
        schedule: As for `pipeline_parallel`.
        recompute: As for `pipeline_parallel`.
        chunks_per_device: As for `pipeline_parallel`.
        batch_normalization: As for `pipeline_parallel`; each piece is a group.
        layers_per_stage: As for `pipeline_parallel`.
        split: How to split single layers, as for `tensor_parallel`.
        allow_empty_stages: As for `pipeline_parallel`.
        balance: As for `pipeline_parallel`.
        device_memory: As for `pipeline_parallel`.
        batch_size: The examples of a batch, to find the best cut.
        compression: How to compress gradients between workers, as for `data_parallel`.
        sync: As for `pipeline_parallel`; workers exchange no gradients for N−1 of N batches.
        shard: What to shard over the D replicas of all workers, as for `data_parallel`:
            `"optimizer"`, or `"parameters"` for the large weights, their gradients and the
            optimizer, on a mesh without `tensor` and `sequence`.
        check_rows: As for `data_parallel`.
        allow_independent_workers: As for `data_parallel`. By default, the workers of the job divide
            the replicas among themselves, in order.

    Returns:
        A `keras.Model`; `fit`, `evaluate`, `predict` and callbacks work as always, and `save`
        writes plain Keras. `print(model.layout)` shows where each layer is.

    Raises:
        ValueError: If the mesh does not fit the devices or the workers, and as for
            `pipeline_parallel`.
        RuntimeError: If the workers cannot connect.

    Example:
        >>> model = tfparallel.hybrid_parallel(build_model, tfparallel.Mesh(data=2, pipeline=2))
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=64)
    """
    problems = Problems()
    CompressionName.parse(compression)
    mesh = _mesh_of(mesh)
    _check_shard(shard, mesh, compression)
    cluster = Cluster() if allow_independent_workers else Cluster.from_env()
    number = cluster.num_workers
    if mesh.data % number:
        raise PlacementError(
            f"Each of the {number} workers ({cluster.source}) must have the same number of "
            f"replicas. Received: a mesh of {mesh}. Use data={number}, or a multiple of it."
        )
    if devices is None:
        devices = _first_devices(mesh, number)
    names = usable_devices(devices, problems)
    with problems.gathered():
        device_memory = read_limits(device_memory, batch_size)
    with problems.gathered():
        if len(names) * number != mesh.size:
            of_each = f", {mesh.size // number} per worker" if number > 1 else ""
            raise PlacementError(
                f"A mesh of {mesh} has {mesh.size} devices{of_each}. Received: {len(names)} "
                f"({', '.join(names)}). Pass {mesh.size // number} devices, or another mesh."
            )
    if num_micro_batches is None:
        num_micro_batches = 4 if mesh.pipeline > 1 else 1
    chosen = PipelineOptions(
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        recompute=recompute,
        chunks_per_device=chunks_per_device,
        batch_normalization=batch_normalization,
        layers_per_stage=layers_per_stage,
        allow_empty_stages=allow_empty_stages,
        balance=balance,
        device_memory=device_memory,
        batch_size=batch_size,
        check_rows=check_rows,
        sync=accumulating(sync),
    )
    strategy = None
    if number > 1:
        problems.raise_all()  # Before this worker waits for the others.
        strategy = MultiWorkerMirroredStrategy.of_process(devices=names, compression=compression)
    parts = _Parts(mesh, split or {})

    def spread(model: HybridModel) -> None:
        parts.spread(model)
        session = WorkerSession(model, each_reads_all=True)
        shares = shard is not None and mesh.data > 1
        attach(
            model,
            strategy=strategy,
            _session=session,
            _shards_optimizer=shares,
            _shards_parameters=shares and shard == "parameters",
        )
        model.copy_variables()

    def store(built: StoragelessModel, layout: Layout) -> None:
        if shard == "parameters" and mesh.data > 1:
            workers = None if strategy is None else strategy.workers
            _store_shares(built, layout, MeshPlaces(replicas_of(layout), workers))

    model = in_micro_batches(
        model_or_function,
        mesh,
        names,
        problems,
        chosen,
        mixin=HybridModel,
        splits_of=parts.planned,
        spread=spread,
        workers=number,
        store=store,
    )
    if model._workers is not None:
        send_state(model, model._workers)
    if model._is_chief:
        notice(f"hybrid_parallel: {_in_words(model)}.", once=True)
    return model


def _check_shard(shard: str | None, mesh: Mesh, compression: str | None) -> None:
    if shard not in (None, "optimizer", "parameters"):
        raise PlacementError(
            "The replicas of a mesh shard the optimizer, or the weights too: `shard` must be "
            f"'optimizer', 'parameters' or None. Received: shard={shard!r}."
        )
    if shard == "parameters" and mesh.parts > 1:
        raise PlacementError(
            "shard='parameters' gathers whole weights, so layers must not be split into parts. "
            f"Received: a mesh of {mesh}. Use a mesh with only `data` and `pipeline`, or "
            "shard='optimizer'."
        )
    if shard == "parameters" and compression is not None:
        raise PlacementError(
            "shard='parameters' reduces gradients uncompressed. Received: "
            f"shard='parameters', compression={compression!r}. Remove one of them."
        )


def _store_shares(built: StoragelessModel, layout: Layout, places: MeshPlaces) -> None:
    """Stores the large weights of a model in shares; no device ever holds two whole ones."""
    for layer in layers_in_order(built.model):
        for weight in large_weights(layer):
            if built.waits_for(weight):
                with tf.device(layout.placement[layer.name]):
                    shard_over(weight, places, built.value_of(weight))


def _first_devices(mesh: Mesh, num_workers: int) -> list[str]:
    try:
        return device_lib.choose_devices(num_devices=mesh.size // num_workers)
    except ValueError as error:
        raise PlacementError(f"A mesh of {mesh} has {mesh.size} devices. {error}") from error


def _in_words(model: HybridModel) -> str:
    layout = model.layout
    text = first_to_last(layout.devices)
    text = f"{layout.workers} workers x {text}" if layout.workers > 1 else text
    text = f"{layout.title} on {text}"
    text = text if layout.reduction is None else f"{text}; gradients: {layout.reduction}"
    if not model._shards_optimizer:
        return text
    return f"{text}; {SHARED_OUT['parameters' if model._shards_parameters else 'optimizer']}"


class _Parts:
    """Splits the layers of a model along the mesh axis `tensor` or `sequence`."""

    def __init__(self, mesh: Mesh, split: Split):
        self._mesh, self._number = mesh, mesh.parts
        self._split = split

    def planned(self, model: keras.Model, stage_of: Mapping[str, int]) -> dict[str, str]:
        """Returns how each split layer is split, by name."""
        if self._number == 1:
            return {}
        plans = parts_planned(model, self._number, self._request(model), stage_of)
        splits = splits_of(plans)
        if not splits:
            axis, needs = "tensor", ""
            if self._mesh.sequence > 1:
                axis, needs = "sequence", " by position; inputs must be (batch, positions, …)"
            raise PlacementError(
                f"Nothing in model '{model.name}' can be split into {self._number} parts{needs}. "
                f"Received: a mesh with {axis}={self._number}. Use {axis}=1; data="
                f"{self._number} uses the same number of devices."
            )
        return splits

    def spread(self, model: HybridModel) -> None:
        """Splits the layers."""
        layout = model.layout
        if self._number > 1:
            devices = {}
            for layer in layers_in_order(model):
                stage = layout.stage_of[layer.name] % layout.mesh.pipeline
                stage_devices = layout.devices_of_place(stage)
                devices |= dict.fromkeys(map(id, layers_in(layer)), stage_devices)
            split_in_place(
                model,
                lambda layer: devices[id(layer)],
                self._number,
                self._request(model),
                lambda layer: None,
                layout.stage_of,
            )

    def _request(self, model) -> SplitRequest:
        # Batch normalization keeps its moments whole until the end of the step.
        return SplitRequest(
            self._split,
            whole=frozenset(map(id, batch_norms(model))),
            by_positions=self._mesh.sequence > 1,
        )


def _mesh_of(mesh) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        try:
            return Mesh(**mesh)
        except TypeError:
            pass
    fix = f" Pass `tfparallel.Mesh.parse({mesh!r})`." if isinstance(mesh, str) else ""
    raise PlacementError(
        "`mesh` must be a `tfparallel.Mesh`, or a dictionary with the axes 'data', 'pipeline', "
        f"'tensor' and 'sequence'. Received: mesh={mesh!r}.{fix}"
    )
