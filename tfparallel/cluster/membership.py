"""Which launchers of an elastic job have come, and whether they are enough to go on.

A launcher that has ended closes its connections, and the others may go on without it. One that has
only fallen silent may still be running behind a broken link. Two halves of a network must not both
go on, so more than half of the hosts that may still be running are needed, or exactly half of them
with node 0 of the last round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.acceptor import Visitor

__all__ = ["Present", "are_all_back", "has_quorum", "may_run", "num_needed"]


@dataclasses.dataclass
class Present:
    """A launcher that has come.

    Attributes:
        caller: As it came in; None for this one.
        address: How the others reach its host.
        hello: What it said.
    """

    caller: Visitor | None
    address: str
    hello: dict[str, Any]

    @property
    def order(self) -> tuple:
        """Sorts this launcher first, then those of the last round in its order, then the others."""
        last, asked = self.hello.get("last_node"), self.hello["node_rank"]
        return (self.caller is not None, last is None, last or 0, asked is None, asked or 0)

    @property
    def was_there(self) -> bool:
        """Whether it has taken part in a round."""
        return self.hello.get("last_node") is not None

    @property
    def has_hung_up(self) -> bool:
        """Whether its connection has ended."""
        return self.caller is not None and self.caller.has_hung_up


def may_run(present: Sequence[Present]) -> int:
    """How many hosts of the last round may still be running; 0 if none of them is back."""
    return min((each.hello.get("may_run") or 0 for each in _back(present)), default=0)


def num_needed(present: Sequence[Present]) -> int:
    """How many hosts of the last round must be back; 0 if none is, as in a new job."""
    running = may_run(present)
    has_first = any(each.hello["last_node"] == 0 for each in _back(present))
    return -(-running // 2) if has_first else running // 2 + bool(running)


def has_quorum(present: Sequence[Present]) -> bool:
    """Whether no other half of the network can go on if these do."""
    return len(_back(present)) >= num_needed(present)


def are_all_back(present: Sequence[Present]) -> bool:
    """Whether nobody of the last round is left to wait for."""
    return 0 < may_run(present) <= len(_back(present))


def _back(present):
    """Those of the last round that any of them knows of; others have missed it."""
    last = max((each.hello["attempt"] for each in present if each.was_there), default=None)
    return [each for each in present if each.was_there and each.hello["attempt"] == last]
