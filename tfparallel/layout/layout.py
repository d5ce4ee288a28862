"""The layout of a model: its mesh and devices, and the stage and the split of each layer.

A builder decides the layout; reports, plans and checkpoints read it.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tfparallel.layout.mesh import Coordinate, Mesh
from tfparallel.layout.schedule import Schedule, ScheduleError, make_schedule
from tfparallel.texts import MOST_NAMES, aligned, counted, first_to_last

# The micro-batches whose backward pass recomputes the forward pass.
RECOMPUTES = ("never", "always", "except_last")

# What replicas may shard, and the words for it in a line of output.
SHARED_OUT = {
    "optimizer": "optimizer sharded",
    "gradients": "accumulated gradients and optimizer sharded",
    "parameters": "large weights and optimizer sharded",
}

_Pairs = tuple[tuple[str, Any], ...]


class LayoutError(ValueError):
    """The mesh, the devices, the stages and the splits do not fit together."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh and the devices of a model, and the place of each layer.

    Attributes:
        mesh: The number of devices along each mesh axis.
        devices: The device of each coordinate, in the order of `mesh.coordinates()`. With several
            workers, the devices of one worker; each worker uses the same names.
        stages: The stage of each layer, by name, in topological order; empty if the layers are not
            cut into stages. Pass a mapping or pairs; stored as pairs.
        splits: How each split layer is split, by name; other layers are whole, on the device of the
            first part. Pass a mapping or pairs; stored as pairs.
        schedule: "gpipe", "1f1b" or "interleaved"; None if the whole batch passes through the
            stages at once.
        num_micro_batches: M, the number of micro-batches of a replica.
        chunks_per_device: v; stage s is on pipeline device s mod K.
        recompute: The micro-batches whose backward pass recomputes the forward pass.
        reduction: How the gradients of the replicas are summed, in words; None for one replica.
        workers: W, the number of processes; each has the same number of replicas.
        share_in_parts: The share of the model's weights that split layers divide, from 0 to 1;
            None before the model is split. `==` ignores it.
        proof: Why a model may be computed in pieces of the batch, in words; None until a step that
            divides the batch is traced. `==` ignores it.

    Raises:
        LayoutError: If the attributes do not fit together; lists all problems.

    Example:
        >>> layout = Layout(Mesh(pipeline=2), ["CPU:0", "CPU:1"], {"a": 0, "b": 1, "c": 1})
        >>> print(layout)
        model parallel: pipeline=2
          stage 0  CPU:0  a
          stage 1  CPU:1  b, c
        >>> layout.placement
        {'a': 'CPU:0', 'b': 'CPU:1', 'c': 'CPU:1'}
    """

    mesh: Mesh
    devices: tuple[str, ...]
    stages: _Pairs = ()
    splits: _Pairs = ()
    schedule: str | None = None
    num_micro_batches: int = 1
    chunks_per_device: int = 1
    recompute: str = "never"
    reduction: str | None = None
    workers: int = 1
    share_in_parts: float | None = dataclasses.field(default=None, compare=False, repr=False)
    proof: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "devices", tuple(self.devices))
        for name in ("stages", "splits"):
            entries = getattr(self, name)
            pairs = entries.items() if isinstance(entries, Mapping) else entries
            object.__setattr__(self, name, tuple((layer, value) for layer, value in pairs))
        problems = list(self._problems())
        if problems:
            raise LayoutError("\n".join(problems))

    def _problems(self):
        if self.mesh.data % self.workers:
            yield (
                "Each worker must have the same number of replicas. Received: a mesh of "
                f"{self.mesh} for {self.workers} workers."
            )
        elif len(self.devices) * self.workers != self.mesh.size:
            of_each = f", {self.mesh.size // self.workers} per worker" if self.workers > 1 else ""
            yield (
                f"A mesh of {self.mesh} has {self.mesh.size} devices{of_each}. Received: "
                f"{len(self.devices)} ({', '.join(self.devices)})."
            )
        twice = sorted({name for name in self.devices if self.devices.count(name) > 1})
        if twice:
            yield f"A device must appear only once in a mesh. Received twice: {', '.join(twice)}."
        outside = {layer: n for layer, n in self.stages if n not in range(self.num_stages)}
        if outside:
            yield (
                f"Stages must be 0 to {self.num_stages - 1}. Received: "
                f"{', '.join(f'{layer!r} in stage {n}' for layer, n in outside.items())}."
            )
        if self.mesh.pipeline > 1 and not self.stages:
            yield (
                "A mesh with several stages needs `stages`. Received: "
                f"pipeline={self.mesh.pipeline} without `stages`."
            )
        if self.schedule is None and (self.num_micro_batches, self.chunks_per_device) != (1, 1):
            yield (
                "Micro-batches and several stages per device need a schedule. Received: "
                f"num_micro_batches={self.num_micro_batches}, "
                f"chunks_per_device={self.chunks_per_device}, schedule=None."
            )
        if self.schedule is not None:
            try:
                self.make_schedule()
            except ScheduleError as error:
                yield str(error)
        for name in ("stages", "splits"):
            layers = [layer for layer, _ in getattr(self, name)]
            if again := sorted({layer for layer in layers if layers.count(layer) > 1}):
                yield (
                    f"`{name}` must list each layer once. Received twice: "
                    f"{', '.join(map(repr, again))}."
                )
        if self.recompute not in RECOMPUTES:
            yield (
                f"`recompute` must be one of {', '.join(RECOMPUTES)}. "
                f"Received: recompute={self.recompute!r}."
            )

    @property
    def num_stages(self) -> int:
        """K·v."""
        return self.mesh.pipeline * self.chunks_per_device

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each layer, by name, in topological order."""
        return dict(self.stages)

    @property
    def split_of(self) -> dict[str, str]:
        """How each split layer is split, by name."""
        return dict(self.splits)

    @property
    def placement(self) -> dict[str, str]:
        """The device of each layer of the first replica, by name, in topological order."""
        return {layer: self.device_of_stage(stage) for layer, stage in self.stages}

    def device(self, *at: int, **by_axis: int) -> str:
        """Returns the device of a coordinate, in its own process."""
        return self.devices[self.mesh.index(Coordinate(*at, **by_axis)) % len(self.devices)]

    def devices_of_place(self, pipeline: int) -> list[str]:
        """Returns the devices of the parts at a pipeline coordinate, in the first replica."""
        first = self.mesh.index(Coordinate(pipeline=pipeline))
        return list(self.devices[first : first + self.mesh.parts])

    def device_of_stage(self, stage: int) -> str:
        """Returns the first device of a stage, in the first replica."""
        return self.device(pipeline=stage % self.mesh.pipeline)

    def make_schedule(self) -> Schedule | None:
        """Returns the schedule of the pipeline's devices; None without micro-batches."""
        if self.schedule is None:
            return None
        has_chunks = self.schedule == "interleaved" or self.chunks_per_device != 1
        chunks = self.chunks_per_device if has_chunks else None
        return make_schedule(self.schedule, self.mesh.pipeline, self.num_micro_batches, chunks)

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as JSON; omits attributes that have their default value."""
        values = dataclasses.asdict(self) | {"devices": list(self.devices)}
        values |= {"stages": self.stage_of, "splits": self.split_of}
        plain = Layout(Mesh(), [""])
        return {
            name: value
            for name, value in values.items()
            if name in ("mesh", "devices") or value not in ({}, getattr(plain, name))
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """Returns the layout that `to_json` wrote."""
        return cls(**dict(values) | {"mesh": Mesh(**values["mesh"])})

    def __str__(self):
        rows = [[*self._place(at), self.device(*at)] for at in self.mesh.coordinates()]
        if self.stages:
            for row, at in zip(rows, self.mesh.coordinates(), strict=True):
                row.append(self._layers_on(at.pipeline))
        lines = [f"  {line}" for line in aligned(rows)]
        if self.splits:
            lines.append(f"  {self._splits_in_words()}")
        if self.reduction is not None:
            lines.append(f"  gradients: {self.reduction}")
        title = self.title if self.mesh.size == 1 else f"{self._parallelism()}: {self.title}"
        return "\n".join([title, *lines])

    def _parallelism(self) -> str:
        """Returns the parallelism of this layout, in words."""
        axes = [axis for axis, size in dataclasses.asdict(self.mesh).items() if size > 1]
        if len(axes) > 1:
            return "hybrid parallel"
        if axes == ["pipeline"] and self.schedule is None:
            return "model parallel"
        return f"{axes[0]} parallel"

    def _splits_in_words(self) -> str:
        if len(self.splits) <= MOST_NAMES:
            layers = [f"{layer} by {how}" for layer, how in self.splits]
        else:
            counts = collections.Counter(how for _, how in self.splits)
            layers = [f"{counted(number, 'layer')} by {how}" for how, number in counts.items()]
        share = self.share_in_parts
        shows_share = share is not None and self.mesh.sequence == 1  # Which divides no weights.
        of_weights = f", {share:.0%} of the weights" if shows_share else ""
        return f"split{of_weights}: {', '.join(layers)}"

    @property
    def title(self) -> str:
        """The mesh and the schedule, in a line."""
        title = str(self.mesh)
        if self.num_micro_batches > 1:
            title += f", {self.num_micro_batches} micro-batches by {self.schedule}"
        if self.recompute != "never":
            title += f", recompute={self.recompute}"
        return title

    def _place(self, at: Coordinate) -> list[str]:
        words = {"data": "replica", "pipeline": "stage", "tensor": "part", "sequence": "part"}
        sizes = dataclasses.asdict(self.mesh)
        named = [(axis, n) for axis, n in at._asdict().items() if sizes[axis] > 1]
        worker = [f"worker {at.data * self.workers // self.mesh.data}"] if self.workers > 1 else []
        return [*worker, *(f"{words[axis]} {self._stages_at(n, axis)}" for axis, n in named)]

    def _stages_at(self, place: int, axis: str) -> str:
        if axis != "pipeline":
            return str(place)
        return ", ".join(map(str, range(place, self.num_stages, self.mesh.pipeline)))

    def _layers_on(self, place: int) -> str:
        stages = range(place, self.num_stages, self.mesh.pipeline)
        layers = [[layer for layer, stage in self.stages if stage == number] for number in stages]
        return "; ".join(first_to_last(each, "layers") or "(no layer)" for each in layers)


def replicas_in_words(layout: Layout) -> str:
    """Returns a line such as "2 replicas on CPU:0, CPU:1; gradients: summed on CPU:0"."""
    by_worker: dict[str, list[str]] = {}
    for device in layout.devices:
        worker, _, name = device.rpartition("/device:")
        by_worker.setdefault(worker, []).append(name)
    names = next(iter(by_worker.values()))
    count, devices = len(names), first_to_last(names)
    if len(by_worker) > 1:
        text = f"{len(by_worker)} workers x {count} device{'s' * (count > 1)} ({devices})"
    else:
        text = f"{count} replica{'s' * (count > 1)} on {devices}"
    return text if layout.reduction is None else f"{text}; gradients: {layout.reduction}"
