"""What each collective makes of the ranks' inputs, x₀ … xₙ₋₁, and what counts as its size.

| collective | input of a rank | output of rank r |
| --- | --- | --- |
| `all_reduce` | S | Σ_k x_k |
| `reduce_scatter` | S | part r, of n, of Σ_k x_k |
| `all_gather` | S/n | x₀, x₁, … one behind the other |
| `broadcast` | S | x₀ |
| `all_to_all` | S | part r of x₀, part r of x₁, … |

S is nccl-tests' size, the larger of input and output. Where it is divided by n, a count of elements
is rounded down to a multiple of n.
"""

from collections.abc import Sequence

import numpy as np

__all__ = [
    "REDUCING",
    "SAME_ON_ALL",
    "expected",
    "input_count",
    "input_size",
    "whole_count",
]

REDUCING = ("all_reduce", "reduce_scatter")
SAME_ON_ALL = ("all_reduce", "all_gather", "broadcast")
_DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")


def whole_count(collective: str, count: int, num_ranks: int) -> int:
    """Returns a count of elements that the collective can divide, at most `count` if it can be."""
    if collective not in _DIVIDED:
        return count
    return max(count // num_ranks, 1) * num_ranks


def input_count(collective: str, count: int, num_ranks: int) -> int:
    """Returns the elements of a rank's input at a size of `count` elements."""
    return count // num_ranks if collective == "all_gather" else count


def input_size(collective: str, output_size: int, num_ranks: int) -> int:
    """Returns the elements of a rank's input whose output has `output_size` elements."""
    if collective == "all_gather":
        return output_size // num_ranks
    return output_size * num_ranks if collective == "reduce_scatter" else output_size


def expected(collective: str, terms: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """Returns a rank's output in float64.

    Args:
        collective: One of `choices.COLLECTIVES`.
        terms: The inputs of all ranks.
        rank: Whose output.
    """
    if collective == "broadcast":
        return terms[0].astype(np.float64)
    if collective == "all_gather":
        return np.concatenate([term.astype(np.float64) for term in terms])
    if collective == "all_to_all":
        parts = [np.split(term, len(terms))[rank] for term in terms]
        return np.concatenate([part.astype(np.float64) for part in parts])
    total = np.zeros(terms[0].size)
    for term in terms:
        total += term
    return total if collective == "all_reduce" else np.split(total, len(terms))[rank]
