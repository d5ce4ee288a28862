"""The launchers present in an elastic job, and whether they have a quorum.

A launcher that ends closes its connections, and the others may continue without it. A silent one
may still be running behind a broken link. Both halves of a partitioned network must not continue,
so a quorum needs more than half of the hosts that may still be running, or exactly half including
node 0 of the last round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.acceptor import Visitor

__all__ = ["Present", "are_all_back", "has_quorum", "may_run", "num_needed"]


@dataclasses.dataclass
class Present:
    """A launcher that is present.

    Attributes:
        caller: Its connection; None for this launcher.
        address: Its host's address for the others.
        hello: Its hello.
    """

    caller: Visitor | None
    address: str
    hello: dict[str, Any]

    @property
    def order(self) -> tuple:
        """Sort key: this launcher first, then those of the last round in its order, then others."""
        last, node_rank = self.hello.get("last_node"), self.hello["node_rank"]
        return (self.caller is not None, last is None, last or 0, node_rank is None, node_rank or 0)

    @property
    def was_there(self) -> bool:
        """Whether it took part in an earlier round."""
        return self.hello.get("last_node") is not None

    @property
    def has_hung_up(self) -> bool:
        """Whether its connection has ended."""
        return self.caller is not None and self.caller.has_hung_up


def may_run(present: Sequence[Present]) -> int:
    """Returns how many hosts of the last round may still be running; 0 if none is back."""
    return min((each.hello.get("may_run") or 0 for each in _back(present)), default=0)


def num_needed(present: Sequence[Present]) -> int:
    """Returns how many hosts of the last round must be back; 0 if none is, as in a new job."""
    running = may_run(present)
    has_first = any(each.hello["last_node"] == 0 for each in _back(present))
    return -(-running // 2) if has_first else running // 2 + bool(running)


def has_quorum(present: Sequence[Present]) -> bool:
    """Whether these hosts can continue without risking a second half that does, too."""
    return len(_back(present)) >= num_needed(present)


def are_all_back(present: Sequence[Present]) -> bool:
    """Whether all hosts of the last round that may still run are back."""
    return 0 < may_run(present) <= len(_back(present))


def _back(present):
    """The launchers of the latest round that any of them took part in."""
    last = max((each.hello["attempt"] for each in present if each.was_there), default=None)
    return [each for each in present if each.was_there and each.hello["attempt"] == last]
