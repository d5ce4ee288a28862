"""Where a thread computes: for which rows, replica and pass of a step, and who watches.

A layer, an optimizer, a loss are written for one device, and are handed nothing of this. What a
parallelism adds to them asks here. Where each replica of a strategy is a thread, it has its own
context.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ComputeContext", "context", "within"]


@dataclasses.dataclass(frozen=True)
class ComputeContext:
    """What is known where something is computed; None where nothing is.

    Attributes:
        shard: Which rows of the batch (`data/rows_of_replica.py`).
        replica: Which replica of a mesh (`variables/replica.py`).
        stage_pass: Which pass of which stage (`pipeline/pass_context.py`).
        hand_on_parts: How a layer hands on a tensor in parts (`layers/parts.py`).
        trace: What notes the operations of layers (`tracing/audit.py`).
        takes_shares: Whether gradients go to an optimizer that takes those of shares.
        gathers: What joins the shares of a weight that is read (`replication/gathers.py`).
    """

    shard: Any = None
    replica: Any = None
    stage_pass: Any = None
    hand_on_parts: Callable[[Any], Any] | None = None
    trace: Any = None
    takes_shares: bool = False
    gathers: Any = None


_NOWHERE = ComputeContext()
_of_thread = threading.local()


def context() -> ComputeContext:
    """Returns where this thread computes."""
    return getattr(_of_thread, "context", _NOWHERE)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Within it this thread computes somewhere else.

    Args:
        **changes: Attributes of `ComputeContext`; the others stay.
    """
    outer = context()
    _of_thread.context = dataclasses.replace(outer, **changes)
    try:
        yield
    finally:
        _of_thread.context = outer
