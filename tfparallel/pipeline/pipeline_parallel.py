"""The builder `pipeline_parallel`: a plain Keras model in stages, trained by micro-batches."""

import dataclasses
from collections.abc import Callable, Sequence

import keras

from tfparallel import devices as device_lib
from tfparallel.cloning.storageless import StoragelessModel
from tfparallel.extend import extend
from tfparallel.judge.check_rows import exchange_moments
from tfparallel.layout.layout import RECOMPUTES, Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.schedule import Schedule, ScheduleError, make_schedule
from tfparallel.pipeline.allowed_writes import check_state
from tfparallel.pipeline.batch_norm import DeferredBatchNormalization, batch_norms
from tfparallel.pipeline.pass_context import extend_random_layers
from tfparallel.pipeline.pipelined_model import PipelinedModel
from tfparallel.placement import layer_devices
from tfparallel.placement.graph import layers_in_order
from tfparallel.placement.model_parallel import place, seen_model
from tfparallel.problems import PlacementError, Problems, usable_devices
from tfparallel.replication.sync.option import Synchronization
from tfparallel.texts import counted


class TooFewLayersError(PlacementError):
    """The model has fewer layers than the schedule has stages.

    Attributes:
        num_layers: The number of layers.
        num_stages: The number of stages.
    """

    def __init__(self, num_layers: int, schedule: Schedule):
        self.num_layers = num_layers
        self.num_stages = schedule.num_stages
        super().__init__(
            f"Each stage needs a layer. Received: {counted(num_layers, 'layer')} for "
            f"{schedule.num_stages} stages, {schedule.chunks_per_device} on each of "
            f"{schedule.num_devices} devices (schedule={schedule.name!r}). Pass fewer devices, or "
            "allow_empty_stages=True: the last stages then only pass on their inputs."
        )


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Arguments of `pipeline_parallel`; see there."""

    num_micro_batches: int
    schedule: str
    recompute: str
    chunks_per_device: int | None
    batch_normalization: str | None
    layers_per_stage: Sequence[int] | None
    allow_empty_stages: bool
    balance: str
    device_memory: int | None
    batch_size: int
    check_rows: bool
    sync: Synchronization


def pipeline_parallel(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
    devices: Sequence[str] | int | None = None,
    num_micro_batches: int = 8,
    schedule: str = "1f1b",
    recompute: str = "never",
    *,
    chunks_per_device: int | None = None,
    batch_normalization: str | None = None,
    layers_per_stage: Sequence[int] | None = None,
    allow_empty_stages: bool = False,
    balance: str = "time",
    device_memory: int | str | None = None,
    batch_size: int = 32,
    check_rows: bool = True,
    sync: str = "every_step",
) -> keras.Model:
    """Cuts a functional or Sequential model into stages, and each batch into micro-batches.

    Use it when the model does not fit on one device or trains too slowly on it: `model_parallel`
    keeps one device busy at a time; here, each device works on a different micro-batch. With M
    micro-batches, K devices with equal stages are idle for at least (K − 1)/(M + K − 1) of the
    time.

    The resulting weights are those of one device: gradients are summed over the micro-batches, each
    loss has the divisor of the whole batch, metrics cover the whole batch, and the optimizer
    updates once. Dropout masks also equal those of one device; other random layers are
    reproducible. The last micro-batches may be one row shorter.

    Args:
        model_or_function: As for `model_parallel`.
        devices: Names of the devices, such as `["GPU:0", "GPU:1"]`, or their number, or the result
            of `tfparallel.connect_to_cluster`, for stages in other processes. Default: all.
        num_micro_batches: M, the number of micro-batches per batch of `fit`.
        schedule: "gpipe": all forward passes, then all backward passes; holds the activations of M
            micro-batches, and works with any loss. "1f1b": one forward, one backward; holds at most
            K. "interleaved": 1F1B with several stages per device, for a smaller bubble; M must be a
            multiple of K.
        recompute: Whether a backward pass recomputes its forward pass; then only a stage's inputs
            are held for each micro-batch in flight. "never", "always", or "except_last": all but
            the last micro-batch (as torchgpipe), whose backward pass follows at once under "gpipe".
        chunks_per_device: The number of stages per device under "interleaved"; 2 if None.
        batch_normalization: None raises an error for layers that normalize by the batch. "deferred"
            normalizes each micro-batch by its own moments and updates the averages once per step,
            by those of the whole batch; the weights differ from plain Keras's.
        layers_per_stage: The number of consecutive layers in each stage. Default: the best cut.
        allow_empty_stages: Whether to accept a model with fewer layers than stages; the last stages
            then only pass on their inputs.
        balance: What the best cut balances: "memory", "time" or "both", as for `model_parallel`.
        device_memory: The memory that each stage may use, such as `"16GiB"`; no limit if None.
        batch_size: The examples of a batch, to find the best cut.
        check_rows: Whether to raise an error if the model does not treat each example
            independently, as for `data_parallel`.
        sync: When to update the weights: `"every_step"`, or `"accumulate:4"`, after every four
            batches, as one update for a batch four times as large.

    Returns:
        A `keras.Model`; `fit`, `evaluate`, `predict` and callbacks work as always, the latter two
        without micro-batches, and `save` writes plain Keras, without devices. `placement` gives the
        device of each layer, `schedule` the instructions of each device.

    Raises:
        ValueError: If the schedule does not fit the devices or the layers, or micro-batches would
            change the model's state; and as for `model_parallel`.

    References:
        As in `tfparallel.layout.schedule`.

    Example:
        >>> model = tfparallel.pipeline_parallel(build_model, ["CPU:0", "CPU:1"], 8)
        >>> model.compile("adam", "mse")
        >>> model.fit(x, y, batch_size=64)
    """
    problems = Problems()
    with problems.gathered():
        device_memory = layer_devices.read_limits(device_memory, batch_size)
    names = usable_devices(devices or device_lib.choose_devices(), problems)
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
    mesh = Mesh(pipeline=len(names))
    return in_micro_batches(model_or_function, mesh, names, problems, chosen)


def accumulating(sync: str) -> Synchronization:
    """Parses `sync` for a model in micro-batches.

    Raises:
        ValueError: If it is neither every_step nor accumulate:N.
    """
    policy = Synchronization.parse(sync)
    if policy.grows or policy.scales_rate or policy.is_local or policy.is_async:
        raise PlacementError(
            "A pipeline or a mesh supports sync='every_step' or 'accumulate:N'. Received: "
            f"sync={sync!r}. `data_parallel`, whose replicas hold the whole model, supports all."
        )
    return policy


def in_micro_batches(
    model_or_function: keras.Model | Callable[[], keras.Model] | Sequence[keras.Layer],
    mesh: Mesh,
    names: Sequence[str],
    problems: Problems,
    chosen: PipelineOptions,
    mixin: type[PipelinedModel] = PipelinedModel,
    splits_of: Callable[[keras.Model, dict[str, int]], dict[str, str]] = lambda *_: {},
    spread: Callable[[keras.Model], None] = lambda _: None,
    workers: int = 1,
    store: Callable[[StoragelessModel, Layout], None] = lambda built, layout: None,
) -> keras.Model:
    """Builds or copies a model in stages, on the devices of the first replica.

    Args:
        model_or_function: As for `pipeline_parallel`.
        mesh: The number of devices along each mesh axis.
        names: The devices of this process.
        problems: The problems found so far.
        chosen: The options.
        mixin: The class that extends the model's.
        splits_of: Returns how layers are split, by name, given their stages.
        spread: Copies or splits what is on the first device of a stage to the others.
        workers: The number of processes that divide the replicas.
        store: As for `place`.

    Raises:
        ValueError: As for `pipeline_parallel`; lists all problems.
    """
    with problems.gathered():
        sizes = (mesh.pipeline, chosen.num_micro_batches, chosen.chunks_per_device)
        planned = _plan(chosen.schedule, *sizes)
    with problems.gathered():
        _check_choices(chosen.recompute, chosen.batch_normalization)
    if chosen.layers_per_stage is None:
        with problems.gathered():
            layer_devices.check_balance(chosen.balance)
    elif problems:  # The model has not been seen; otherwise its layers are counted below.
        num_stages = _num_stages(chosen.schedule, mesh.pipeline, chosen.chunks_per_device)
        with problems.gathered():
            number = len(layers_in_order(seen_model(model_or_function)))
            counts, may_be_empty = chosen.layers_per_stage, chosen.allow_empty_stages
            _check_counts(counts, number, num_stages, may_be_empty)
    problems.raise_all()

    def decide(model: keras.Model) -> Layout:
        with problems.gathered():
            check_state(model, chosen.batch_normalization)
        if chosen.layers_per_stage is None:
            problems.raise_all()  # Do not measure for the best cut in vain.
        with problems.gathered():
            stage_of = stages_by_layer(
                model,
                planned,
                layers_per_stage=chosen.layers_per_stage,
                allow_empty_stages=chosen.allow_empty_stages,
                balance=chosen.balance,
                device_memory=chosen.device_memory,
                batch_size=chosen.batch_size,
            )
        problems.raise_all()
        return Layout(
            mesh,
            names,
            stage_of,
            splits_of(model, stage_of),
            schedule=chosen.schedule,
            num_micro_batches=chosen.num_micro_batches,
            chunks_per_device=planned.chunks_per_device,
            recompute=chosen.recompute,
            reduction=_reduction(mesh.data // workers, workers),
            workers=workers,
        )

    def finish(model: keras.Model) -> None:
        extend_random_layers(model)
        if chosen.batch_normalization is not None:
            for layer in batch_norms(model):
                extend(layer, DeferredBatchNormalization)
        exchange_moments(model)
        spread(model)

    attributes = {
        "batch_normalization": chosen.batch_normalization,
        "check_rows": chosen.check_rows,
        "_sync": chosen.sync,
    }
    return place(model_or_function, decide, mixin, attributes, finish=finish, store=store)


def _reduction(num_replicas: int, workers: int) -> str | None:
    """Returns how gradients of replicas are summed, in words; `num_replicas` are per worker."""
    within_worker = ["summed on the devices of replica 0"] if num_replicas > 1 else []
    between_workers = [f"summed over {workers} workers"] if workers > 1 else []
    return ", then ".join([*within_worker, *between_workers]) or None


def stages_by_layer(
    model: keras.Model,
    schedule: Schedule,
    *,
    layers_per_stage: Sequence[int] | None = None,
    allow_empty_stages: bool = False,
    **best,
) -> dict[str, int]:
    """Returns the stage of each layer, by name, in topological order.

    Args:
        model: A functional or Sequential model, with or without storage.
        schedule: The schedule, which has the number of stages.
        layers_per_stage: The number of layers in each stage; None for the best cut.
        allow_empty_stages: Whether a stage may have no layers.
        **best: `balance`, `device_memory` and `batch_size`, as for `pipeline_parallel`.

    Raises:
        ValueError: If the layers do not fit the stages.
    """
    layers = layers_in_order(model)
    missing = schedule.num_stages - len(layers)
    if missing > 0 and layers_per_stage is None:
        if not allow_empty_stages:
            raise TooFewLayersError(len(layers), schedule)
        layers_per_stage = [1] * len(layers) + [0] * missing
    if layers_per_stage is None:
        # Stages by number; the cut accepts any names.
        numbers = range(schedule.num_stages)
        return layer_devices.by_balance(model, numbers, all_gradients=True, **best)
    _check_counts(layers_per_stage, len(layers), schedule.num_stages, allow_empty_stages)
    index = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    return {layer.name: stage for layer, stage in zip(layers, index, strict=True)}


def _check_counts(layers_per_stage, num_layers, num_stages, allow_empty_stages) -> None:
    counts, fewest = list(layers_per_stage), 0 if allow_empty_stages else 1
    fits = len(counts) == num_stages and sum(counts) == num_layers
    if not fits or any(not isinstance(n, int) or n < fewest for n in counts):
        raise PlacementError(
            f"`layers_per_stage` must give each of the {num_stages} stages {fewest} or "
            f"more layers, {num_layers} in total. Received: {counts}, a total of "
            f"{sum(counts)} in {len(counts)} stages."
        )


def _plan(*sizes) -> Schedule:
    try:
        return make_schedule(*sizes)
    except ScheduleError as error:
        raise PlacementError(str(error)) from error


def _num_stages(schedule, num_devices, chunks_per_device) -> int:
    """Returns the requested number of stages, even if other options are wrong."""
    if schedule != "interleaved":
        return num_devices
    is_count = isinstance(chunks_per_device, int) and chunks_per_device > 1
    return num_devices * (chunks_per_device if is_count else 2)


def _check_choices(recompute, batch_normalization):
    problems = []
    if recompute not in RECOMPUTES:
        problems.append(
            f"`recompute` must be one of {', '.join(RECOMPUTES)}. Received: "
            f"recompute={recompute!r}."
        )
    if batch_normalization not in (None, "deferred"):
        problems.append(
            "`batch_normalization` must be None or 'deferred'. Received: "
            f"batch_normalization={batch_normalization!r}."
        )
    if problems:
        raise PlacementError("\n".join(problems))
