"""`tfparallel launch --emit=slurm`: prints the file that submits a job, and starts nothing."""

from collections.abc import Sequence

from absl import flags

from tfparallel.cluster.job_files import JobFile, job_name_of, kubernetes_objects, slurm_script
from tfparallel.commands.flags import UsageError
from tfparallel.commands.help import define_choice
from tfparallel.commands.job_numbers import Nodes, nodes_of, number_problems

__all__ = ["emit_flags", "emit_problems", "emitted"]

_GRACE_SECONDS = 60.0  # A scheduler's own are minutes, and a save may take one.
_ALONE = ("gpus_per_node", "sbatch_args", "image", "volume")
# What is each host's own, or would be.
_OF_A_HOST = ("node_rank", "rdzv_endpoint", "local_addr", "num_ps", "bind_cores")
# What the launcher of each host is given, too.
_HANDED_ON = (
    "nproc_per_node",
    "max_restarts",
    "standby",
    "start_timeout",
    "log_dir",
    "transport",
)
_OF_THE_OTHER = {"slurm": ("image", "volume"), "kubernetes": ("sbatch_args",)}


def emit_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say what is printed."""
    define_choice(
        values,
        "emit",
        None,
        {
            "slurm": "a script for sbatch",
            "kubernetes": "a Service and an indexed Job for kubectl",
        },
        "Print the file that submits this job, and start nothing. --grace_seconds is then 60 "
        "unless given.",
    )
    flags.DEFINE_string(
        "job_name",
        None,
        "The job's name, the same on all of its hosts; they refuse those of another job. Default: "
        "the program's.",
        flag_values=values,
    )
    flags.DEFINE_integer("gpus_per_node", 0, "With --emit: GPUs of each host.", flag_values=values)
    flags.DEFINE_multi_string(
        "sbatch_args",
        [],
        "With --emit=slurm: an option for sbatch, such as --sbatch_args=--partition=long; "
        "repeatable.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "image",
        None,
        "With --emit=kubernetes: the container image, with the program and tfparallel in it.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "volume",
        None,
        "With --emit=kubernetes: CLAIM:/PATH, a persistent volume claim and where pods see it. "
        "Checkpoints belong there.",
        flag_values=values,
    )


def emit_problems(values: flags.FlagValues) -> list[str]:
    """What is wrong with these flags where nothing is printed."""
    given = [name for name in _ALONE if values[name].present]
    return [f"--{name} is for --emit. Received: --{name} without it." for name in given]


def emitted(values: flags.FlagValues, command: Sequence[str]) -> str:
    """Returns the file.

    Raises:
        UsageError: If something is missing, or cannot be.
    """
    problems = []
    if values.nproc_per_node < 1 and not hasattr(values.nproc_per_node, "text"):
        problems.append(
            "--nproc_per_node must be at least 1. Received: "
            f"--nproc_per_node={values.nproc_per_node}."
        )
    problems += number_problems(values)
    nodes = Nodes(1, 1, is_elastic=False)
    try:
        nodes = nodes_of(values)
    except ValueError as error:
        problems.append(str(error))
    if not command:
        problems.append("A command is required after `--`. Received: none.")
    problems += [
        f"--{name} cannot be in a file that all hosts read. Received: --{name} with --emit. Leave "
        "it out."
        for name in _OF_A_HOST
        if values[name].present
    ]
    problems += [
        f"--{name} is for the other scheduler. Received: --{name} with --emit={values.emit}."
        for name in _OF_THE_OTHER[values.emit]
        if values[name].present
    ]
    given = [name for name in _HANDED_ON if values[name].present]
    grace = values.grace_seconds if values["grace_seconds"].present else _GRACE_SECONDS
    text = ""
    try:
        job = JobFile(
            name=values.job_name or job_name_of(command or ["train"]),
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
        text = slurm_script(job) if values.emit == "slurm" else kubernetes_objects(job)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return text


def _as_given(value):
    """What was written, where the host that submits may have other devices."""
    return getattr(value, "text", value)
