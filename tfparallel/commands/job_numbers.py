"""The numbers of `tfparallel launch`, which mean the same where `--emit` prints the job's file."""

import dataclasses
import re

from absl import flags

__all__ = ["Nodes", "nodes_of", "number_problems"]


@dataclasses.dataclass(frozen=True)
class Nodes:
    """How many hosts a job has.

    Attributes:
        minimum, maximum: From how many to how many.
        is_elastic: Whether that may change while it runs.
    """

    minimum: int
    maximum: int
    is_elastic: bool

    @property
    def are_one(self) -> bool:
        """Whether no other host has a part in it."""
        return self.maximum == 1 and not self.is_elastic


def nodes_of(values: flags.FlagValues) -> Nodes:
    """Returns what --nnodes says.

    Raises:
        ValueError: If it says nothing that can be.
    """
    text = values.nnodes
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"--nnodes must be a number, or MIN:MAX. Received: --nnodes={text}.")
    least, most = int(found[1]), int(found[2] or found[1])
    if least < 1:
        raise ValueError(f"--nnodes must be at least 1. Received: --nnodes={text}.")
    if most < least:
        raise ValueError(
            f"The maximum of --nnodes=MIN:MAX must not be less than the minimum. Received: "
            f"--nnodes={text}."
        )
    return Nodes(least, most, found[2] is not None)


def number_problems(values: flags.FlagValues) -> list[str]:
    """What is wrong with the numbers that mean the same in a job's file."""
    problems = []
    if values.max_restarts < 0:
        problems.append(
            f"--max_restarts must not be negative. Received: --max_restarts={values.max_restarts}."
        )
    if not 0 < values.start_timeout < float("inf"):
        problems.append(
            f"--start_timeout must be positive. Received: --start_timeout={values.start_timeout}."
        )
    if values.standby and not values.max_restarts and ":" not in values.nnodes:
        problems.append(
            "--standby is for a job that may start again. Received: --standby, with neither "
            "--max_restarts nor --nnodes=MIN:MAX. Add --max_restarts=3, or drop --standby."
        )
    return problems
