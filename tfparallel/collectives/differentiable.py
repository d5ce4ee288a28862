"""The gradients of collectives, whoever takes part.

Rank k puts in x_k and goes on with y_k to a loss J_k of its own; the gradient is that of Σ_j J_j,
and so its backward pass is a collective too, in which every rank takes part.
"""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfparallel.collectives.custom_gradient import call_with_gradient


class Ranks(Protocol):
    """Those that take part in a collective, as one of them sees them.

    Attributes:
        rank: This one's index; a tensor in a replica.
        num_ranks: N, a Python integer.
    """

    rank: int | tf.Tensor
    num_ranks: int

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str) -> Sequence[tf.Tensor]:
        """Returns the "sum", "max" or "min" of each tensor over the ranks, to no tape."""

    def all_gather(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the joined rows and each rank's number of rows, to no tape."""


def all_reduce(
    ranks: Ranks,
    tensors: Sequence[tf.Tensor],
    op: str = "sum",
    ties: Sequence[tf.Tensor | float] | None = None,
) -> list[tf.Tensor]:
    """Reduces each tensor over the ranks; all of them receive the result.

        sum:   y = Σ_k x_k,     ∂J/∂x_k = Σ_j ∂J_j/∂y
        max:   y = max_k x_k,   ∂J/∂x_k = n_k [x_k = y] / Σ_j n_j [x_j = y] · Σ_j ∂J_j/∂y

    If x_k is the largest of some values, n_k of them are: all that tie share the gradient, whoever
    has them.

    Args:
        ranks: Those that take part.
        tensors: x_k, of the same shapes and dtypes on each rank.
        op: `"sum"`, `"max"` or `"min"`.
        ties: n_k for each tensor, as `number_of_ties` tells it. None: 1.

    Returns:
        y for each tensor.
    """

    def forward(*own):
        results = ranks.all_reduce(own, op)

        def backward(*upstream):
            present = [i for i, dy in enumerate(upstream) if dy is not None]
            totals = all_reduce(ranks, [upstream[i] for i in present])
            if op != "sum":
                reached = [
                    tf.cast(own[i] == results[i], own[i].dtype)
                    * tf.cast(1 if ties is None else ties[i], own[i].dtype)
                    for i in present
                ]
                everywhere = ranks.all_reduce(reached, "sum")
                shares = [r / n for r, n in zip(reached, everywhere, strict=True)]
                totals = [share * dy for share, dy in zip(shares, totals, strict=True)]
            gradients: list = [None] * len(own)
            for i, total in zip(present, totals, strict=True):
                gradients[i] = total
            return gradients

        return results, backward

    return call_with_gradient("all_reduce", forward, tensors) if tensors else []


def number_of_ties(tensor: tf.Tensor) -> tf.Tensor | float:
    """How often an extreme is there among the values that it is of, which share its gradient.

    Returns:
        The number; 1 if the tensor is no extreme, or nothing tells, as in an eager step.
    """
    if not tf.is_symbolic_tensor(tensor):
        return 1.0  # Where it comes from is not known.
    op = tensor.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type not in ("Max", "Min"):
        return 1.0
    values, axes = op.inputs
    reduce = tf.reduce_max if op.type == "Max" else tf.reduce_min
    is_there = values == reduce(values, axes, keepdims=True)
    return tf.reduce_sum(tf.cast(is_there, tensor.dtype), axes, op.get_attr("keep_dims"))


def all_gather(ranks: Ranks, tensor: tf.Tensor) -> tf.Tensor:
    """Joins the ranks' rows in the order of the ranks: y = (x_0; …; x_N-1).

    With rows(k) the place of x_k in y, ∂J/∂x_k = (Σ_j ∂J_j/∂y)[rows(k)].

    Args:
        ranks: Those that take part.
        tensor: x_k, shape `(rows, …)`; `rows` may differ between ranks.

    Returns:
        Shape `(Σ rows, …)`, equal on all ranks.
    """

    def forward(own):
        joined, counts = ranks.all_gather(own)

        def backward(upstream):
            (total,) = all_reduce(ranks, [upstream])
            start = tf.reduce_sum(counts[: ranks.rank])
            return [total[start : start + counts[ranks.rank]]]

        return [joined], backward

    (joined,) = call_with_gradient("all_gather", forward, [tensor])
    return joined
