"""Starts the parallelism named by `--parallel`: its devices, its workers, and the model."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfparallel import devices as device_lib
from tfparallel.asynchronous.in_flight import steps_ahead
from tfparallel.asynchronous.servers import join
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.roles import Roles
from tfparallel.collectives import cross_device
from tfparallel.collectives.algorithm_selection import all_reduce_report
from tfparallel.command_line.exits import StartError, UsageError
from tfparallel.command_line.options import TrainOptions
from tfparallel.hybrid.hybrid_parallel import hybrid_parallel
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.layout.layout import SHARED_OUT
from tfparallel.layout.mesh import Mesh
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.model_parallel import model_parallel
from tfparallel.placement.processes import connect_to_cluster
from tfparallel.problems import PlacementError
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.replication.drop_in_strategies import MirroredStrategy, MultiWorkerMirroredStrategy
from tfparallel.startup import has_nvidia_gpu, quiet_stderr
from tfparallel.texts import counted, first_to_last

_BUILDERS = {"model": model_parallel, "tensor": tensor_parallel}


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """A parallelism, with its devices and workers.

    Attributes:
        name: The value of `--parallel`.
        devices: The devices of this worker.
        strategy: The strategy of a multi-worker job; None for one process.
        cut: The builder's arguments for dividing layers among devices.
        all_reduce: `tfparallel.MirroredStrategy`'s arguments for summing over the replicas of this
            process: `all_reduce` and `calibrate`.
        sync: When the weights are updated; `data_parallel`'s argument.
        shard: What is sharded over the replicas; `data_parallel`'s argument.
        num_servers: The number of parameter servers of asynchronous workers; 0 for none.
    """

    name: str
    devices: list[str]
    strategy: MultiWorkerMirroredStrategy | None = None
    cut: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    all_reduce: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sync: str = "every_step"
    shard: str | None = None
    num_servers: int = 0

    @property
    def workers(self):
        """The workers' collectives, or None for one worker."""
        return self.strategy.workers if self.strategy is not None else None

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which prints and writes files for all workers."""
        return self.workers is None or self.workers.worker_index == 0

    @property
    def num_workers(self) -> int:
        """The number of processes that train the model."""
        if self.num_servers:
            return len(self.devices)
        return self.workers.num_workers if self.workers is not None else 1

    @property
    def num_pieces(self) -> int:
        """The number of pieces of a global batch, over all replicas."""
        mesh = self.cut.get("mesh", Mesh())
        return mesh.data * self.cut.get("num_micro_batches", 1)

    @property
    def text_of_size(self) -> str:
        """The number of devices and workers, in words."""
        number = counted(len(self.devices), "device")
        if self.num_servers:
            return counted(self.num_workers, "worker")
        if self.workers is None:
            return number
        return f"{self.num_workers} workers with {number} each"

    def say(self, text: str) -> None:
        """Prints on the chief only."""
        if self.is_chief:
            print(text, flush=True)

    def build(self, build_model: Callable[[], keras.Model]) -> keras.Model:
        """Returns the parallel model."""
        if self.name == "none":
            return build_model()
        try:
            if self.name in _BUILDERS:
                return _BUILDERS[self.name](build_model, self.devices, **self.cut)
            if self.name == "pipeline":
                return self._in_stages(pipeline_parallel, build_model)
            if self.name == "hybrid":
                return self._in_stages(hybrid_parallel, build_model)
        except PlacementError as error:
            raise UsageError(str(error)) from error
        update = {"sync": self.sync, "shard": self.shard}
        if self.num_servers:
            return data_parallel(build_model, sync=self.sync)
        if self.strategy is not None:
            return data_parallel(build_model, self.strategy, **update)
        if self.all_reduce and len(self.devices) > 1:
            try:
                strategy = MirroredStrategy(self.devices, **self.all_reduce)
            except ValueError as error:  # The profile of another machine.
                raise UsageError(f"--all_reduce: {error}") from error
            return data_parallel(build_model, strategy, **update)
        return data_parallel(build_model, devices=self.devices, **update)

    def all_reduce_report(self, model: keras.Model) -> dict[str, Any] | None:
        """Reports how gradients were summed; None if it was not configured."""
        if not self.all_reduce and self.strategy is None:
            return None
        return all_reduce_report(model)

    def _in_stages(self, builder, build_model):
        # A command runs with empty stages; the function leaves the choice to its caller.
        options = {"devices": self.devices, "allow_empty_stages": True, **self.cut}
        model = builder(build_model, **options)
        layout = model.layout
        empty = layout.num_stages - len(set(layout.stage_of.values()))
        if empty:
            self.say(
                f"note: {len(layout.stages)} layers for {layout.num_stages} stages; the last "
                f"{empty} only pass their inputs on"
            )
        return model

    def as_built(self, model: keras.Model) -> str:
        """Returns `str(self)`, with the share of split weights of the built model."""
        share = getattr(getattr(model, "layout", None), "share_in_parts", None)
        return str(self) if share is None else f"{self}, {share:.0%} of the weights split"

    def __str__(self):
        names = first_to_last(self.devices)
        if self.name == "none":
            return f"one device ({names})"
        number = counted(len(self.devices), "device")
        if self.name == "model":
            return f"layers on {number} ({names})"
        if self.name == "tensor":
            return f"layers split over {number} ({names})"
        if self.name == "hybrid":
            of_workers = f"{self.num_workers} workers, each on " if self.workers is not None else ""
            return f"a mesh of {self.cut['mesh']} on {of_workers}{number} ({names})"
        if self.name == "pipeline":
            return (
                f"{self.cut['num_micro_batches']} micro-batches through {number} ({names}), "
                f"schedule {self.cut['schedule']}"
            )
        if self.num_servers:
            return (
                f"data parallel, asynchronous, {counted(self.num_workers, 'worker')}, weights on "
                f"{counted(self.num_servers, 'server')}, sync {self.sync}"
            )
        sync = "" if self.sync == "every_step" else f", sync {self.sync}"
        sync += "" if self.shard is None else f", {SHARED_OUT[self.shard]}"
        if self.workers is not None:
            by = "auto" if self.strategy.all_reduce_is_open else self.workers.transport
            return (
                f"data parallel on {self.workers.num_workers} workers, {number} each ({names}), "
                f"all-reduce by {by}{sync}"
            )
        return f"data parallel on {number} ({names}){sync}"


def start_parallelism(options: TrainOptions, facts: Mapping[str, Any]) -> Parallelism:
    """Finds or creates the devices that the flags name, and joins the other workers.

    Args:
        options: The flags.
        facts: Values that all workers must agree on.

    Raises:
        UsageError: If the flags do not match this machine or this process's job.
        StartError: If other workers are missing or disagree.
    """
    try:
        hide_gpus_if_unused(options)
        if options.policy.is_async:
            return _parallelism_with_servers(options, facts)
        cluster = Cluster.from_env()
        is_worker = (
            cluster.num_workers > 1
            and options.parallel in ("data", "hybrid")
            and options.strategy != "mirrored"
            and not (options.parallel == "hybrid" and options.allow_independent_workers)
        )
        is_stage = (
            cluster.num_workers > 1
            and options.parallel in ("model", "pipeline")
            and not options.allow_independent_workers
        )
        if is_stage:
            devices = _devices_of_processes(options, cluster, facts)
            return Parallelism(options.parallel, devices, cut=options.of_layers())
        if is_worker and options.device_type != "cpu" and has_nvidia_gpu():
            os.environ.update(cluster.device_environment())
        if not is_worker:
            _check_independent(options, cluster)
        num_devices = _num_devices(options, cluster.num_workers if is_worker else 1)
        if options.split_gpu:
            num_devices = num_devices or 2
            device_lib.split_gpu(num_devices)
        if options.devices is not None:
            devices = _named_devices(options.devices)
        else:
            devices = device_lib.choose_devices(
                num_devices=num_devices, device_type=options.device_type
            )
        all_reduce = {} if is_worker else _all_reduce(options, devices)
    except ValueError as error:
        raise UsageError(str(error)) from error
    update = {"sync": options.sync, "shard": options.shard}
    if not is_worker:
        names = ["bucket_bytes", "compression"]
        if options.policy.is_local:
            names.append("sync")
        for name in names:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name} only applies between workers. Received: "
                    f"--{name}={getattr(options, name)}, without other workers. Drop the flag, or "
                    "add --num_workers=2."
                )
        cut = options.of_layers()
        return Parallelism(options.parallel, devices, cut=cut, all_reduce=all_reduce, **update)
    try:
        with quiet_stderr():
            strategy = MultiWorkerMirroredStrategy.of_process(
                devices=devices,
                start_timeout=options.start_timeout,
                stall_timeout=options.stall_timeout,
                all_reduce=options.all_reduce,
                bucket_bytes=options.bucket_bytes,
                compression=options.compression,
                calibrate=options.calibrate,
                facts=facts,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        raise StartError(str(error)) from error
    return Parallelism(options.parallel, devices, strategy, cut=options.of_layers(), **update)


def _parallelism_with_servers(options, facts) -> Parallelism:
    """Returns the parallelism on the chief; other processes serve it and never return."""
    roles, policy = Roles.from_env(), options.policy
    if roles is None:
        raise UsageError(
            "--sync=async needs a job with parameter servers. Received: none (TF_CONFIG lists no "
            "'ps'). Start it with `tfparallel launch --nproc_per_node=2 --num_ps=1 -- …`."
        )
    if policy.staleness is not None:
        steps_ahead(policy.staleness, len(roles.workers))
    try:
        servers = join(roles, start_timeout=options.start_timeout, facts=facts)
    except RuntimeError as error:
        raise StartError(str(error)) from error
    devices = list(servers.layout.devices)
    return Parallelism("data", devices, sync=options.sync, num_servers=len(roles.servers))


def hide_gpus_if_unused(options: TrainOptions) -> None:
    """Hides the GPUs if the flags name only CPUs."""
    named = options.devices or []
    if options.device_type == "cpu" or (bool(named) and all("cpu" in n.lower() for n in named)):
        device_lib.hide_gpus()


def _named_devices(names) -> list[str]:
    try:
        return device_lib.choose_devices(devices=names)
    except ValueError as error:
        if device_lib.list_devices("GPU"):
            raise
        raise ValueError(
            f"{error} On the command line: --num_devices={max(len(names), 2)} --device_type=cpu."
        ) from error


def _all_reduce(options, devices) -> dict[str, Any]:
    if options.all_reduce is None:
        return {}
    if options.parallel == "hybrid":
        raise UsageError(
            "--parallel=hybrid uses an all-reduce only between workers; within a process, the "
            "first replica's devices sum the gradients. Received: "
            f"--all_reduce={options.all_reduce}, without other workers. Drop --all_reduce, or add "
            "--num_workers=2."
        )
    if options.all_reduce != "auto":
        cross_device.make(options.all_reduce, devices)  # Fail before anything is loaded or traced.
    return {"all_reduce": options.all_reduce, "calibrate": options.calibrate}


def _as_typed(mesh: Mesh) -> str:
    return str(mesh).replace(" ", "")


def _num_devices(options, num_workers: int) -> int | None:
    """Returns the number of devices for this process; None for all."""
    if options.parallel == "none":
        return 1
    if options.parallel != "hybrid":
        return options.num_devices
    mesh = options.mesh
    if mesh.data % num_workers:
        raise UsageError(
            f"The {num_workers} workers must have the same number of replicas. Received: "
            f"--mesh={_as_typed(mesh)}. Use data={num_workers}, or a multiple of it."
        )
    number = mesh.size // num_workers
    if options.num_devices not in (None, number):
        of_each = " on each worker" if num_workers > 1 else ""
        raise UsageError(
            f"A mesh of {mesh} has {number} devices{of_each}. Received: --mesh={_as_typed(mesh)} "
            f"with --num_devices={options.num_devices}. Drop --num_devices, or choose another mesh."
        )
    return number


def _devices_of_processes(options, cluster: Cluster, facts) -> list[str]:
    """Returns the devices of all processes in process 0; the others serve it and never return."""
    if options.devices is not None or options.num_devices is not None:
        flag = "--devices" if options.devices is not None else "--num_devices"
        raise UsageError(
            f"The stages are the {cluster.num_workers} processes of the job ({cluster.source}), "
            f"each with all its devices. Received: {flag}. Drop it, or start one process."
        )
    if options.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return connect_to_cluster(cluster, start_timeout=options.start_timeout, facts=facts)
    except RuntimeError as error:
        raise StartError(str(error)) from error


def _check_independent(options, cluster: Cluster) -> None:
    if cluster.num_workers > 1 and not options.allow_independent_workers:
        is_local = options.parallel != "data"
        flag = f"--parallel={options.parallel}" if is_local else "--strategy=mirrored"
        raise UsageError(
            f"This process is one of {cluster.num_workers} workers ({cluster.source}), and {flag} "
            f"would train {cluster.num_workers} separate models. --parallel=data "
            f"--strategy=multi_worker trains one. Received: {flag}. To train separate models, add "
            "--allow_independent_workers."
        )
    if options.strategy == "multi_worker":
        raise UsageError(
            "--strategy=multi_worker needs other workers; the environment (TF_CONFIG, Slurm, MPI, "
            "Kubernetes, torchrun) must name them. Received: none. Start the job with `tfparallel "
            "launch --nproc_per_node=2 -- …`."
        )
