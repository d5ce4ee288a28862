"""How many hosts a job has, and which of them this one is."""

import dataclasses
import os
import re

__all__ = ["NodeRange", "node_rank_of"]

_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # Of Slurm, and of an indexed Job of Kubernetes.


@dataclasses.dataclass(frozen=True)
class NodeRange:
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

    @classmethod
    def parse(cls, text: str) -> "NodeRange":
        """Reads "2" or "1:4".

        Raises:
            ValueError: If it is neither.
        """
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if found is None:
            raise ValueError(f"a number, or MIN:MAX, is required. Received: {text!r}.")
        least, most = int(found[1]), int(found[2] or found[1])
        if least < 1:
            raise ValueError(f"at least 1 host is required. Received: {text!r}.")
        if most < least:
            raise ValueError(
                f"the maximum of MIN:MAX must not be less than the minimum. Received: {text!r}."
            )
        return cls(least, most, found[2] is not None)


def node_rank_of(given: int | None, nodes: NodeRange) -> int | None:
    """Returns this host's index: as the flag says, or the scheduler; None if neither does.

    Raises:
        ValueError: If the two contradict each other.
    """
    if nodes.are_one:
        return given
    told = {name: os.environ.get(name, "") for name in _RANKS}
    name = next((name for name in _RANKS if told[name].isdecimal()), None)
    if name is None:
        return given
    rank = int(told[name])
    if given not in (None, rank):
        raise ValueError(
            f"--node_rank must be what the scheduler says, {name}={rank}. Received: "
            f"--node_rank={given}. Leave the flag out."
        )
    return rank
