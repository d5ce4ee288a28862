"""A command that starts its own workers: `--num_workers=3` is `launch --nproc_per_node=3`."""

import importlib
import sys
from collections.abc import Sequence

from absl import flags

from tfparallel.cluster.spec import Cluster
from tfparallel.commands.flags import UsageError

__all__ = ["run_as_workers"]


def run_as_workers(name: str, arguments: Sequence[str], values: flags.FlagValues) -> int | None:
    """Runs the same command in `--num_workers` processes on this host.

    Args:
        name: The sub-command.
        arguments: What stands after it.
        values: Its flags, parsed.

    Returns:
        The job's exit code; None where the command is to run in this process, because the flag is
        absent or this process is one of the workers.

    Raises:
        UsageError: If the process is part of a job of another size, or the flags contradict.
    """
    if values.num_workers is None:
        return None
    try:
        cluster = Cluster.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if cluster.num_workers == values.num_workers:
        return None
    if cluster.num_workers > 1:
        raise UsageError(
            f"This process is one of {cluster.num_workers} workers already ({cluster.source}). "
            f"Received: --num_workers={values.num_workers}. Drop the flag."
        )
    # Of all that a launcher loads, `--help` needs nothing.
    return importlib.import_module("tfparallel.commands.launch").main(
        [
            f"--nproc_per_node={values.num_workers}",
            "--",
            *(sys.executable, "-m", "tfparallel", name, *arguments),
        ]
    )
