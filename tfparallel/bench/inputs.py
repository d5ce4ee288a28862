"""Inputs whose sums are known: small integers, exact in any order, and random numbers.

Sums of whole numbers are exact while they stay below 2ᵖ, where p is the precision of the type
(8 bits for bfloat16, 11 for float16). Element i of rank r is (31·i + 7·r) mod (⌊2ᵖ/n⌋ + 1), so
that n of them stay below, and a block that ends up in a wrong place shows.

Sums of random numbers depend on their order. However n terms are added,

    |y − Σ_r x_r| ≤ (n−1)·u/(1 − (n−1)·u) · Σ_r |x_r|,    u = 2⁻ᵖ

(Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, §4.2). The tolerance
is that of 2n terms: an all-reduce may scale, or round once more on the way.
"""

import zlib
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from tfparallel.bench.collectives import REDUCING, expected, input_size

_NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_PRECISION_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
# A modulus far below 2ᵖ serves as well, and keeps the sums readable.
_LARGEST = 1000


def whole_numbers(count: int, dtype: str, rank: int, num_ranks: int) -> np.ndarray:
    """Returns a rank's exactly summable input, shape `(count,)`."""
    modulus = min(2 ** _PRECISION_BITS[dtype] // num_ranks, _LARGEST) + 1
    values = (31 * np.arange(count, dtype=np.int64) + 7 * rank) % modulus
    return values.astype(_NUMPY[dtype])


def random_numbers(count: int, dtype: str, rank: int) -> np.ndarray:
    """Returns a rank's standard normal input, shape `(count,)`; the same at every call."""
    generator = np.random.default_rng([rank, count])
    return generator.standard_normal(count, np.float32).astype(_NUMPY[dtype])


def num_wrong_whole(
    results: Sequence[np.ndarray],
    ranks: Sequence[int],
    num_ranks: int,
    dtype: str,
    collective: str = "all_reduce",
) -> int:
    """Returns how many elements of a collective's results of whole numbers are wrong.

    Args:
        results: The outputs of some ranks.
        ranks: Which ranks.
        num_ranks: n.
        dtype: One of `choices.ITEM_BYTES`.
        collective: One of `choices.COLLECTIVES`.
    """
    count = input_size(collective, results[0].size, num_ranks)
    terms = [whole_numbers(count, dtype, rank, num_ranks) for rank in range(num_ranks)]
    return sum(
        _num_unequal(result, expected(collective, terms, rank))
        for result, rank in zip(results, ranks, strict=True)
    )


def num_wrong_random(
    results: Sequence[np.ndarray],
    ranks: Sequence[int],
    num_ranks: int,
    dtype: str,
    collective: str = "all_reduce",
) -> int:
    """Returns how many elements are further from those of random numbers than rounding goes.

    What is moved, and not summed, may not differ at all. The arguments are those of
    `num_wrong_whole`.
    """
    count = input_size(collective, results[0].size, num_ranks)
    terms = [random_numbers(count, dtype, rank) for rank in range(num_ranks)]
    magnitudes = [np.abs(term.astype(np.float64)) for term in terms]
    factor = 2 * num_ranks * 2.0 ** -_PRECISION_BITS[dtype] if collective in REDUCING else 0.0
    wrong = 0
    for result, rank in zip(results, ranks, strict=True):
        allowed = factor * expected(collective, magnitudes, rank)
        error = np.abs(result.astype(np.float64) - expected(collective, terms, rank))
        wrong += int(np.sum(~(error <= allowed)))  # Written so that NaN is wrong.
    return wrong


def num_different(results: Sequence[np.ndarray]) -> int:
    """Returns how many elements differ, in any bit, from those of the first rank."""
    first = results[0].view(np.uint8).reshape(results[0].size, -1)
    return sum(
        int(np.sum(np.any(first != other.view(np.uint8).reshape(first.shape), axis=1)))
        for other in results[1:]
    )


def digest(array: np.ndarray) -> float:
    """Returns a number that is the same for arrays of the same bits."""
    return float(zlib.crc32(array.tobytes()))


def _num_unequal(result, total):
    return int(np.sum(~(result.astype(np.float64) == total)))
