"""`tfparallel plan TASK.py`: which mesh of devices is the fastest for a task, and does it fit."""

from collections.abc import Sequence

from absl import flags

from tfparallel.commands import plan_layers, plan_meshes, plan_pipeline

__all__ = ["run"]

_PLANS = {"auto": plan_meshes, "model": plan_layers, "pipeline": plan_pipeline}


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Prints the plan; returns 1 if nothing fits."""
    (path,) = positional
    return _PLANS[values.parallel].answer(path, values)
