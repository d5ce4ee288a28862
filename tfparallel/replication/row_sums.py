"""What a replicated call may return in place of outputs: sums over the rows, which are added up.

| | | |
| --- | --- | --- |
| `Sums` | of a replica | its rows' terms of the losses, and of what metrics grow by |
| `Summed` | of the step | those of the batch, added over the replicas, then over the workers |

Over the workers they are added at once or, where the backward pass needs none of it, with the
gradients.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

__all__ = ["Summed", "Sums"]


class Sums(NamedTuple):
    """What a call returns whose results are summed over the replicas, and not joined.

    Attributes:
        tensors: Each of this replica's rows alone; of a replica without rows they do not count.
        may_wait: Whether what comes back to the replicas is the same whatever the sums are. Then
            they travel with the gradients.
        rows: Outputs that are joined all the same, to be looked at: they have no gradient.
    """

    tensors: list[tf.Tensor]
    may_wait: bool = False
    rows: Sequence[tf.Tensor] = ()


class Summed(NamedTuple):
    """What such a call gives its caller.

    Attributes:
        tensors: What a loss is differentiated in: sums over all replicas, or over this worker's
            alone if they wait.
        of_all: Called behind the backward pass; returns the sums over all replicas.
        wait: Whether the two differ.
        rows: Outputs of all rows, joined.
    """

    tensors: list[tf.Tensor]
    of_all: Callable[[], list[tf.Tensor]]
    wait: bool
    rows: list[tf.Tensor]
