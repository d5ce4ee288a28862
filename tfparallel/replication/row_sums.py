"""Sums over rows, which a replicated call may return instead of outputs.

| | | |
| --- | --- | --- |
| `Sums` | of a replica | the loss terms and metric increments of its rows |
| `Summed` | of the step | those of the batch, summed over the replicas, then over the workers |

Workers sum them at once or, if the backward pass does not need them, with the gradients.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf


class Sums(NamedTuple):
    """Results of a call that are summed over the replicas instead of joined.

    Attributes:
        tensors: Sums over this replica's rows; those of a replica without rows do not count.
        may_wait: Whether the gradient does not depend on the sums. Then they travel with the
            gradients.
        rows: Outputs to join anyway, for inspection; they have no gradient.
    """

    tensors: list[tf.Tensor]
    may_wait: bool = False
    rows: Sequence[tf.Tensor] = ()


class Summed(NamedTuple):
    """The result of such a call for its caller.

    Attributes:
        tensors: The tensors to differentiate a loss in: sums over all replicas, or only over this
            worker's if they wait.
        of_all: Called after the backward pass; returns the sums over all replicas.
        wait: Whether the two differ.
        rows: Outputs of all rows, joined.
    """

    tensors: list[tf.Tensor]
    of_all: Callable[[], list[tf.Tensor]]
    wait: bool
    rows: list[tf.Tensor]
