"""The inputs x₀ … xₙ₋₁ of each collective, its expected outputs, and its size.

| collective | input of a rank | output of rank r |
| --- | --- | --- |
| `all_reduce` | S | Σ_k x_k |
| `reduce_scatter` | S | part r, of n, of Σ_k x_k |
| `all_gather` | S/n | x₀, x₁, … concatenated |
| `broadcast` | S | x₀ |
| `all_to_all` | S | part r of x₀, part r of x₁, … |
| `reduce` | S | Σ_k x_k on rank 0, zeros elsewhere |
| `scatter` | S | part r of x₀ |
| `send_recv` | S | x_q, q = (r − 1) mod n |

S is nccl-tests' size, the larger of input and output. Where it is divided by n, a count of elements
is rounded down to a multiple of n. `unalign` elements are added to it, or to each of its n parts,
which then end off the boundaries of cache lines and packets.

Sums of whole numbers are exact below 2ᵖ, where p is the precision of the type (8 bits for bfloat16,
11 for float16). Element i of rank r is (31·i + 7·r) mod (⌊2ᵖ/n⌋ + 1): the sum of n of them stays
below 2ᵖ, and a misplaced block is detected.

Sums of random numbers depend on their order. For any order of n terms,

    |y − Σ_r x_r| ≤ (n−1)·u/(1 − (n−1)·u) · Σ_r |x_r|,    u = 2⁻ᵖ

(Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, §4.2). The tolerance
is that of 2n terms: an all-reduce may scale, or round once more in between.
"""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "scatter")  # The root is rank 0.
SAME_ON_ALL = ("all_reduce", "all_gather", "broadcast")
_DIVIDED = ("reduce_scatter", "all_gather", "all_to_all", "scatter")
_NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_PRECISION_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
# A modulus far below 2ᵖ works as well, and keeps the sums readable.
_LARGEST = 1000


def whole_count(collective: str, count: int, num_ranks: int, unalign: int = 0) -> int:
    """Returns an element count that the collective can divide, at most `count` if possible.

    `unalign` elements are added to it, or to each of its parts.
    """
    if collective not in _DIVIDED:
        return count + unalign
    return (max(count // num_ranks, 1) + unalign) * num_ranks


def input_count(collective: str, count: int, num_ranks: int) -> int:
    """Returns the element count of a rank's input at a size of `count` elements."""
    return count // num_ranks if collective == "all_gather" else count


def input_size(collective: str, output_size: int, num_ranks: int) -> int:
    """Returns the element count of a rank's input whose output has `output_size` elements."""
    if collective == "all_gather":
        return output_size // num_ranks
    return output_size * num_ranks if collective in ("reduce_scatter", "scatter") else output_size


def expected(collective: str, terms: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """Returns a rank's output in float64.

    Args:
        collective: One of `sizes.COLLECTIVES`.
        terms: The inputs of all ranks.
        rank: The rank.
    """
    if collective == "broadcast":
        return terms[0].astype(np.float64)
    if collective == "all_gather":
        return np.concatenate([term.astype(np.float64) for term in terms])
    if collective == "all_to_all":
        parts = [np.split(term, len(terms))[rank] for term in terms]
        return np.concatenate([part.astype(np.float64) for part in parts])
    if collective == "scatter":
        return np.split(terms[0], len(terms))[rank].astype(np.float64)
    if collective == "send_recv":
        return terms[rank - 1].astype(np.float64)
    total = np.zeros(terms[0].size)
    if collective == "reduce" and rank:
        return total
    for term in terms:
        total += term
    if collective == "reduce":
        return total
    return total if collective == "all_reduce" else np.split(total, len(terms))[rank]


def bus_factor(collective: str, num_ranks: int) -> float:
    """Returns f(n): the bytes that a rank must send, in units of S."""
    share = (num_ranks - 1) / num_ranks
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "scatter": share,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send_recv": 1.0,
    }[collective]


def whole_numbers(count: int, dtype: str, rank: int, num_ranks: int) -> np.ndarray:
    """Returns a rank's exactly summable input, shape `(count,)`."""
    modulus = min(2 ** _PRECISION_BITS[dtype] // num_ranks, _LARGEST) + 1
    values = (31 * np.arange(count, dtype=np.int64) + 7 * rank) % modulus
    return values.astype(_NUMPY[dtype])


def random_numbers(count: int, dtype: str, rank: int, num_ranks: int) -> np.ndarray:
    """Returns a rank's standard normal input, shape `(count,)`; the same at every call."""
    del num_ranks  # Only whole numbers depend on it.
    generator = np.random.default_rng([rank, count])
    return generator.standard_normal(count, np.float32).astype(_NUMPY[dtype])


def num_wrong(
    results: Sequence[np.ndarray],
    ranks: Sequence[int],
    num_ranks: int,
    dtype: str,
    collective: str,
    numbers: Callable[[int, str, int, int], np.ndarray],
) -> int:
    """Returns how many elements of a collective's results exceed the rounding tolerance.

    Sums of whole numbers, and results that are not sums, must be exact.

    Args:
        results: The outputs of some ranks.
        ranks: These ranks.
        num_ranks: n.
        dtype: One of `sizes.ITEM_BYTES`.
        collective: One of `sizes.COLLECTIVES`.
        numbers: The generator of the inputs: `whole_numbers` or `random_numbers`.
    """
    count = input_size(collective, results[0].size, num_ranks)
    terms = [numbers(count, dtype, rank, num_ranks) for rank in range(num_ranks)]
    rounds = collective in REDUCING and numbers is random_numbers
    factor = 2 * num_ranks * 2.0 ** -_PRECISION_BITS[dtype]
    magnitudes = [np.abs(term.astype(np.float64)) for term in terms] if rounds else []
    wrong = 0
    for result, rank in zip(results, ranks, strict=True):
        allowed = factor * expected(collective, magnitudes, rank) if rounds else 0.0
        error = np.abs(result.astype(np.float64) - expected(collective, terms, rank))
        wrong += int(np.sum(~(error <= allowed)))  # Counts NaN as wrong.
    return wrong


def num_different(results: Sequence[np.ndarray]) -> int:
    """Returns how many elements differ in any bit from the first rank's."""
    first = results[0].view(np.uint8).reshape(results[0].size, -1)
    return sum(
        int(np.sum(np.any(first != other.view(np.uint8).reshape(first.shape), axis=1)))
        for other in results[1:]
    )
