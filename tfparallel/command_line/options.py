"""The flags of parallel training as parsed values."""

import dataclasses
from typing import Any

from absl import flags

from tfparallel.command_line.flag_parsing import resolved, value_of
from tfparallel.layout.mesh import Mesh
from tfparallel.replication.sync.option import EVERY_STEP, Synchronization

_STAGED = ("pipeline", "hybrid")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The values of the flags with the same names, parsed: bytes, a mesh, a policy.

    Attributes:
        parallel: "none", "data", "model", "tensor", "pipeline", "hybrid", or "auto" for a plan.
        mesh: The mesh of hybrid; otherwise one device.
        num_devices, devices, device_type, split_gpu: The devices.
        strategy, start_timeout, stall_timeout, allow_independent_workers: The workers.
        global_batch_size: Rows per step, over all devices.
        seed: Fixes the initial weights and the order of the data.
        precision, jit_compile: The dtype policy, and whether to use XLA; None as in the task.
        all_reduce, calibrate, bucket_bytes, compression, shard: Gradient reduction and updates.
        sync, policy: When the weights are updated, as text for a builder and parsed.
        num_micro_batches, schedule, chunks_per_device, recompute, batch_normalization: The
            pipeline; None if not given.
        balance: The quantity by which stages are balanced; None if not given.
        device_memory: The memory limit of a device, in bytes.
        num_trials: The number of meshes of a plan to try.
        convolutions: The axis along which tensor parallelism splits convolutions.
    """

    parallel: str
    global_batch_size: int
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    num_devices: int | None = None
    devices: tuple[str, ...] | None = None
    device_type: str = "auto"
    split_gpu: bool = False
    strategy: str = "auto"
    start_timeout: float = 120.0
    stall_timeout: float = 1800.0
    allow_independent_workers: bool = False
    seed: int = 0
    precision: str | None = None
    jit_compile: bool | None = None
    all_reduce: str | None = None
    calibrate: bool = True
    bucket_bytes: int | None = None
    compression: str | None = None
    shard: str | None = None
    sync: str = "every_step"
    policy: Synchronization = EVERY_STEP
    num_micro_batches: int | None = None
    schedule: str | None = None
    chunks_per_device: int | None = None
    recompute: str | None = None
    batch_normalization: str | None = None
    balance: str | None = None
    device_memory: int | None = None
    num_trials: int = 0
    convolutions: str = "channels"

    @classmethod
    def of(cls, values: flags.FlagValues) -> "TrainOptions":
        """Reads the flags of a command.

        Raises:
            ValueError: If a flag's text cannot be parsed.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in values]
        arguments = {name: getattr(values, name) for name in names}
        for name in ("mesh", "bucket_bytes", "device_memory"):
            if name in values:
                arguments[name] = value_of(values, name)
        if "sync" in values:
            arguments["policy"] = value_of(values, "sync")
        if arguments.get("devices") is not None:
            arguments["devices"] = tuple(arguments["devices"])
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    def configuration(self, values: flags.FlagValues) -> dict[str, Any]:
        """Returns the flags for a report, with the values chosen by a plan."""
        original, configuration = type(self).of(values), resolved(values)
        for field in dataclasses.fields(self):
            chosen = getattr(self, field.name)
            if chosen != getattr(original, field.name):
                configuration[field.name] = str(chosen) if isinstance(chosen, Mesh) else chosen
        return {name: value for name, value in configuration.items() if value is not None}

    @property
    def num_pieces(self) -> int:
        """The number of micro-batches into which a replica's rows are split."""
        if self.num_micro_batches is not None:
            return self.num_micro_batches
        if self.parallel == "pipeline":
            return 8
        return 4 if self.mesh.pipeline > 1 else 1

    def of_pipeline(self) -> dict[str, Any]:
        """Returns the pipeline arguments of `pipeline_parallel`."""
        return {
            "num_micro_batches": self.num_pieces,
            "schedule": self.schedule or "1f1b",
            "recompute": self.recompute or "never",
            "chunks_per_device": self.chunks_per_device,
            "batch_normalization": self.batch_normalization,
            "balance": self.balance or "time",
        }

    def of_layers(self) -> dict[str, Any]:
        """Returns the builders' arguments for dividing a model's layers among devices."""
        if self.parallel == "data":
            return {}
        if self.parallel == "tensor":
            return {"convolutions": self.convolutions}
        arguments = {
            "balance": self.balance or "memory",
            "device_memory": self.device_memory,
            "batch_size": self.global_batch_size,
        }
        if self.parallel == "hybrid":
            arguments["mesh"] = self.mesh
            arguments["allow_independent_workers"] = self.allow_independent_workers
            arguments["shard"] = self.shard
        if self.parallel not in _STAGED:
            return arguments
        return arguments | self.of_pipeline() | {"sync": self.sync}
