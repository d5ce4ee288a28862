"""How a task is trained in parallel, where, and on how much at a time: the flags, read once."""

import dataclasses
from typing import Any

from absl import flags

from tfparallel.command_line.flags import resolved, value_of
from tfparallel.layout.mesh import Mesh
from tfparallel.replication.sync_option import Synchronization

__all__ = ["TrainOptions"]

_STAGED = ("pipeline", "hybrid")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What the flags of the same names say, as they are meant: bytes, a mesh, a policy.

    Attributes:
        parallel: "none", "data", "model", "tensor", "pipeline", "hybrid", or "auto" for a plan.
        mesh: The axes of hybrid; else one device.
        num_devices, devices, device_type, split_gpu: The devices.
        strategy, start_timeout, stall_timeout, allow_independent_workers: The workers.
        global_batch_size: Rows of a step, over all devices.
        seed: Fixes the weights and the order of the data.
        precision, jit_compile: The type to compute in, and whether XLA compiles; None as the task.
        all_reduce, calibrate, bucket_bytes, compression, shard: Sums and updates.
        sync: When the weights are updated.
        num_micro_batches, schedule, chunks_per_device, recompute, batch_normalization: A pipeline;
            None where nobody said.
        balance: What stages are evened out by; None where nobody said.
        device_memory: What a device may hold.
        num_trials: How many meshes of a plan are tried.
        convolutions: What tensor parallelism splits convolutions by.
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
            ValueError: If a text cannot be read.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in values]
        given = {name: getattr(values, name) for name in names}
        for name in ("mesh", "bucket_bytes", "device_memory"):
            if name in values:
                given[name] = value_of(values, name)
        if given.get("devices") is not None:
            given["devices"] = tuple(given["devices"])
        return cls(**{name: value for name, value in given.items() if value is not None})

    def told(self, values: flags.FlagValues) -> dict[str, Any]:
        """The flags as they were given, but for what was chosen instead: for a report."""
        asked, found = type(self).of(values), resolved(values)
        for field in dataclasses.fields(self):
            chosen = getattr(self, field.name)
            if chosen != getattr(asked, field.name):
                found[field.name] = str(chosen) if isinstance(chosen, Mesh) else chosen
        return {name: value for name, value in found.items() if value is not None}

    @property
    def policy(self) -> Synchronization:
        """What `sync` says."""
        return Synchronization.parse(self.sync)

    @property
    def num_pieces(self) -> int:
        """Into how many micro-batches the rows of a replica are split."""
        if self.num_micro_batches is not None:
            return self.num_micro_batches
        if self.parallel == "pipeline":
            return 8
        return 4 if self.mesh.pipeline > 1 else 1

    def of_pipeline(self) -> dict[str, Any]:
        """What is said of a pipeline, as `pipeline_parallel` takes it."""
        return {
            "num_micro_batches": self.num_pieces,
            "schedule": self.schedule or "1f1b",
            "recompute": self.recompute or "never",
            "chunks_per_device": self.chunks_per_device,
            "batch_normalization": self.batch_normalization,
            "balance": self.balance or "time",
        }

    def of_layers(self) -> dict[str, Any]:
        """What is said of how a model's layers are shared out, as the builders take it."""
        if self.parallel == "data":
            return {}
        if self.parallel == "tensor":
            return {"convolutions": self.convolutions}
        found = {
            "balance": self.balance or "memory",
            "device_memory": self.device_memory,
            "batch_size": self.global_batch_size,
        }
        if self.parallel == "hybrid":
            found["mesh"] = self.mesh
            found["allow_independent_workers"] = self.allow_independent_workers
            found["shard"] = self.shard
        if self.parallel not in _STAGED:
            return found
        return found | self.of_pipeline() | {"sync": self.sync}
