"""`tfparallel launch --emit=slurm`: prints the file that submits a job, and starts nothing."""

from collections.abc import Sequence

from absl import flags

from tfparallel.cluster.job_files import JobFile, job_name_of, kubernetes_objects, slurm_script
from tfparallel.commands.node_range import NodeRange

__all__ = ["emitted"]

_GRACE_SECONDS = 60.0  # A scheduler's own are minutes, and a save may take one.
# What the launcher of each host is given, too.
_HANDED_ON = (
    "nproc_per_node",
    "max_restarts",
    "standby",
    "start_timeout",
    "log_dir",
    "transport",
)


def emitted(values: flags.FlagValues, command: Sequence[str], nodes: NodeRange) -> str:
    """Returns the file.

    Raises:
        ValueError: If something is missing, or cannot be.
    """
    given = [name for name in _HANDED_ON if values[name].present]
    grace = values.grace_seconds if values["grace_seconds"].present else _GRACE_SECONDS
    job = JobFile(
        name=values.job_name or job_name_of(command),
        command=command,
        launch_flags=[f"--{name}={_as_given(values[name].value)}" for name in given],
        nnodes=nodes.maximum,
        min_nnodes=nodes.minimum if nodes.is_elastic else None,
        grace_seconds=grace,
        gpus_per_node=values.gpus_per_node,
        sbatch_args=values.sbatch_args,
        image=values.image,
        volume=values.volume,
    )
    return slurm_script(job) if values.emit == "slurm" else kubernetes_objects(job)


def _as_given(value):
    """What was written, where the host that submits may have other devices."""
    return getattr(value, "text", value)
