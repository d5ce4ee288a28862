"""Gradients of collectives, for any kind of rank.

Rank k contributes x_k, receives y_k and computes its own loss J_k. The gradient is that of Σ_j J_j,
so the backward pass is a collective too, in which every rank participates.
"""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfparallel.tracing.custom_gradient import call_with_gradient


class Ranks(Protocol):
    """The participants of a collective, seen from one rank.

    Attributes:
        rank: Index of this rank; a tensor in a replica.
        num_ranks: N, a Python integer.
    """

    rank: int | tf.Tensor
    num_ranks: int

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str) -> Sequence[tf.Tensor]:
        """Returns the "sum", "max" or "min" of each tensor over the ranks, without a gradient."""

    def all_gather(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the concatenated rows and the rows per rank, without a gradient."""

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sends part k of N equal parts of axis 0 to rank k, without a gradient."""

    def scatter(self, tensor: tf.Tensor, root: int) -> tf.Tensor:
        """Returns this rank's of N equal parts of the root's tensor, without a gradient."""


def all_reduce(
    ranks: Ranks,
    tensors: Sequence[tf.Tensor],
    op: str = "sum",
    ties: Sequence[tf.Tensor | float] | None = None,
) -> list[tf.Tensor]:
    """Reduces each tensor over the ranks; every rank receives the result.

        sum:   y = Σ_k x_k,     ∂J/∂x_k = Σ_j ∂J_j/∂y
        max:   y = max_k x_k,   ∂J/∂x_k = n_k [x_k = y] / Σ_j n_j [x_j = y] · Σ_j ∂J_j/∂y

    x_k may itself be the maximum of several values, n_k of which are equal to it: all tied values
    share the gradient, on whichever rank they are.

    Args:
        ranks: The participants.
        tensors: x_k, of the same shapes and dtypes on each rank.
        op: `"sum"`, `"max"` or `"min"`.
        ties: n_k for each tensor, from `number_of_ties`. None means 1.

    Returns:
        y for each tensor.
    """

    def forward(*inputs):
        results = ranks.all_reduce(inputs, op)

        def backward(*upstream):
            present = [i for i, dy in enumerate(upstream) if dy is not None]
            totals = all_reduce(ranks, [upstream[i] for i in present])
            if op != "sum":
                reached = [
                    tf.cast(inputs[i] == results[i], inputs[i].dtype)
                    * tf.cast(1 if ties is None else ties[i], inputs[i].dtype)
                    for i in present
                ]
                everywhere = ranks.all_reduce(reached, "sum")
                shares = [r / n for r, n in zip(reached, everywhere, strict=True)]
                totals = [share * dy for share, dy in zip(shares, totals, strict=True)]
            gradients: list = [None] * len(inputs)
            for i, total in zip(present, totals, strict=True):
                gradients[i] = total
            return gradients

        return results, backward

    return call_with_gradient("all_reduce", forward, tensors) if tensors else []


def number_of_ties(tensor: tf.Tensor) -> tf.Tensor | float:
    """Counts the values that tie for the maximum or minimum that `tensor` was reduced to.

    Returns:
        The count; 1 if the tensor is not such a reduction, or its origin is unknown (eager mode).
    """
    if not tf.is_symbolic_tensor(tensor):
        return 1.0
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
    """Concatenates the ranks' rows in rank order: y = (x_0; …; x_N-1).

    With rows(k) the rows of y that hold x_k, ∂J/∂x_k = (Σ_j ∂J_j/∂y)[rows(k)].

    Args:
        ranks: The participants.
        tensor: x_k, shape `(rows, …)`; `rows` may differ between ranks.

    Returns:
        Shape `(Σ rows, …)`, equal on all ranks.
    """

    def forward(rows):
        joined, counts = ranks.all_gather(rows)

        def backward(upstream):
            (total,) = all_reduce(ranks, [upstream])
            start = tf.reduce_sum(counts[: ranks.rank])
            return [total[start : start + counts[ranks.rank]]]

        return [joined], backward

    (joined,) = call_with_gradient("all_gather", forward, [tensor])
    return joined


def all_to_all(ranks: Ranks, tensor: tf.Tensor) -> tf.Tensor:
    """Sends part k of N equal parts of axis 0 to rank k.

        y_r = (x_0[part r]; …; x_N-1[part r]),     ∂J/∂x_k[part r] = ∂J_r/∂y_r[part k]

    The exchange is its own transpose, so the gradient is the same exchange of ∂J_k/∂y_k.

    Args:
        ranks: The participants.
        tensor: x_k, of the same shape `(N·n, …)` on each rank.

    Returns:
        y_r, of the same shape.
    """

    def forward(parts):
        def backward(upstream):
            return [all_to_all(ranks, upstream)]

        return [ranks.all_to_all(parts)], backward

    (received,) = call_with_gradient("all_to_all", forward, [tensor])
    return received


def scatter(ranks: Ranks, tensor: tf.Tensor, root: int) -> tf.Tensor:
    """Gives rank k part k of N equal parts of the root's tensor, along axis 0.

        y_r = x_root[part r],     ∂J/∂x_root = (∂J_0/∂y_0; …; ∂J_N-1/∂y_N-1), and 0 elsewhere

    Args:
        ranks: The participants.
        tensor: x_k, of the same shape `(N·n, …)` on each rank; only the root's content is used.
        root: The root's rank.

    Returns:
        y_r, shape `(n, …)`.
    """

    def forward(parts):
        def backward(upstream):
            joined = all_gather(ranks, upstream)
            return [tf.where(tf.equal(ranks.rank, root), joined, tf.zeros_like(joined))]

        return [ranks.scatter(parts, root)], backward

    (part,) = call_with_gradient("scatter", forward, [tensor])
    return part
