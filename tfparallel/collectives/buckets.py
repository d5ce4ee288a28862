"""Gradients in buckets: the last layers' sum is on its way while the first layers' are computed.

    backward   ∂J/∂θ_4   ∂J/∂θ_3   ∂J/∂θ_2   ∂J/∂θ_1
    bucket 0              Σ(θ_4, θ_3)
    bucket 1                                   Σ(θ_2, θ_1)

A bucket takes variables from the last to the first, and closes with the one that reaches its size.
Fewer buckets cost fewer exchanges; more of them overlap more. The sum of an element is the same.

References:
    Shen Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    arXiv:2006.15704, 2020, §3.2.
"""

from collections.abc import Sequence

__all__ = ["buckets"]


def buckets(sizes_bytes: Sequence[int], bucket_bytes: int | None) -> list[list[int]]:
    """Deals tensors out to buckets, from the last to the first.

    Args:
        sizes_bytes: The tensors' sizes, in the order of the layers.
        bucket_bytes: What a bucket holds at least, but for the last; None for one bucket.

    Returns:
        The indices in each bucket, in the order in which the buckets are sent.

    Example:
        >>> buckets([4, 4, 4, 8], 8)
        [[3], [2, 1], [0]]
    """
    order = list(reversed(range(len(sizes_bytes))))
    if bucket_bytes is None:
        return [order] if order else []
    found: list[list[int]] = []
    held = bucket_bytes
    for index in order:
        if held >= bucket_bytes:
            found.append([])
            held = 0
        found[-1].append(index)
        held += sizes_bytes[index]
    return found
