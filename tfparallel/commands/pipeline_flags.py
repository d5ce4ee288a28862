"""The flags that say how micro-batches go through the stages, and what they mean."""

import contextlib
from typing import Any

from absl import flags

from tfparallel.commands.help import define_choice
from tfparallel.layout.layout import RECOMPUTES
from tfparallel.layout.mesh import Mesh

__all__ = ["pipeline_choices", "pipeline_flags", "pipeline_problems"]

_PIPELINE_FLAGS = (
    "num_micro_batches",
    "schedule",
    "chunks_per_device",
    "recompute",
    "batch_normalization",
)
_SCHEDULE, _RECOMPUTE = "1f1b", "never"


def pipeline_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say how micro-batches go through the stages."""
    flags.DEFINE_integer(
        "num_micro_batches",
        None,
        "For pipeline: parts of a batch, 8 if absent; for hybrid: of a replica's rows, 4 if absent "
        "and the mesh has a pipeline.",
        flag_values=values,
    )
    define_choice(
        values,
        "schedule",
        None,
        {
            "gpipe": "all forward passes, then all backward passes; takes any loss",
            "1f1b": "one forward, one backward; holds fewer activations",
            "interleaved": "1F1B with several stages a device",
        },
        "For pipeline and hybrid: which device does what, in which order.",
        if_absent=_SCHEDULE,
    )
    flags.DEFINE_integer(
        "chunks_per_device", None, "For interleaved: stages on each device; 2 if absent.",
        flag_values=values,
    )  # fmt: skip
    meanings = ("holds the activations", "holds inputs alone", "but for the last micro-batch")
    define_choice(
        values,
        "recompute",
        None,
        dict(zip(RECOMPUTES, meanings, strict=True)),
        "For pipeline: whether a backward pass computes its forward pass again.",
        if_absent=_RECOMPUTE,
    )
    flags.DEFINE_enum(
        "batch_normalization",
        None,
        ("deferred",),
        "For pipeline: normalize each micro-batch by its own statistics, move the averages once a "
        "step. Without the flag such layers raise an error.",
        values,
    )


def pipeline_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with the flags of a pipeline."""
    given = [name for name in _PIPELINE_FLAGS if getattr(values, name) is not None]
    if values.parallel not in ("pipeline", "hybrid", "auto"):
        return [
            f"--{name} belongs to --parallel=pipeline and hybrid, or auto. Received: --{name}="
            f"{getattr(values, name)} with --parallel={values.parallel}. Drop --{name}."
            for name in given
        ]
    problems = []
    number, mesh = _num_micro_batches(values), _mesh(values)
    if number < 1 or number * mesh.data > values.global_batch_size:
        of_each = f", for {mesh.data} replicas," if mesh.data > 1 else ""
        problems.append(
            "A batch must have an example for each micro-batch. Received: --num_micro_batches="
            f"{number}{of_each} with --global_batch_size={values.global_batch_size}."
        )
    if values.chunks_per_device is not None and values.schedule != "interleaved":
        problems.append(
            "--chunks_per_device belongs to --schedule=interleaved. Received: --chunks_per_device="
            f"{values.chunks_per_device} with --schedule={values.schedule or _SCHEDULE}."
        )
    return problems


def _num_micro_batches(values: flags.FlagValues) -> int:
    """Into how many parts the rows of a replica are cut."""
    if values.num_micro_batches is not None:
        return values.num_micro_batches
    if values.parallel == "pipeline":
        return 8
    return 4 if _mesh(values).pipeline > 1 else 1


def _mesh(values) -> Mesh:
    """What --mesh says; that of a single device where it says nothing, or nothing right."""
    with contextlib.suppress(ValueError):
        return Mesh.parse(getattr(values, "mesh", None) or "")
    return Mesh()


def pipeline_choices(values: flags.FlagValues) -> dict[str, Any]:
    """What the flags say of a pipeline, as `pipeline_parallel` takes it."""
    return {
        "num_micro_batches": _num_micro_batches(values),
        "schedule": values.schedule or _SCHEDULE,
        "recompute": values.recompute or _RECOMPUTE,
        "chunks_per_device": values.chunks_per_device,
        "batch_normalization": values.batch_normalization,
        "balance": values.balance if values["balance"].present else "time",
    }
