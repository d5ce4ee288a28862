"""The context of a thread's computation: the rows, replica and pass of a step, and its observers.

Layers, optimizers and losses are written for one device, and receive nothing of this. The code that
a parallelism adds to them looks it up here. If each replica of a strategy is a thread, each has its
own context.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class ComputeContext:
    """The current context; None for unset attributes.

    Attributes:
        piece: The rows of the batch (`piece.py`).
        replica: The replica of a mesh (`variables/mesh_replica.py`).
        stage_pass: The pass of a stage (`pipeline/pass_context.py`).
        hand_on_parts: How a layer passes on a tensor in parts (`layers/parts.py`).
        trace: Records the operations of layers (`tracing/audit.py`).
        takes_shares: Whether gradients go to an optimizer that takes gradients of shares.
        gathers: Gathers the shares of a weight that is read (`replication/gathers.py`).
    """

    piece: Any = None
    replica: Any = None
    stage_pass: Any = None
    hand_on_parts: Callable[[Any], Any] | None = None
    trace: Any = None
    takes_shares: bool = False
    gathers: Any = None


_NOWHERE = ComputeContext()
_of_thread = threading.local()


def context() -> ComputeContext:
    """Returns the context of this thread."""
    return getattr(_of_thread, "context", _NOWHERE)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Changes this thread's context within the block.

    Args:
        **changes: Attributes of `ComputeContext`; the others stay the same.
    """
    outer = context()
    _of_thread.context = dataclasses.replace(outer, **changes)
    try:
        yield
    finally:
        _of_thread.context = outer
