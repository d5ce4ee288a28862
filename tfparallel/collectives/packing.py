"""Packs tensors for transport between workers or devices: dtypes, padded sizes, buckets."""

import functools
import math
import operator
from collections.abc import Iterator, Sequence

import tensorflow as tf

# Dtypes that are converted to another one for sending, and back on receipt.
SENT_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
_STEPS_PER_OCTAVE = 4
# TensorFlow's ring sends pieces of this size while it sums others. From 16 MiB up that is a quarter
# faster than its default of one piece per worker; at small sizes it is slower.
_PIECE_BYTES = 2**21
_MAX_PIECES = 16
_MAX_ELEMENTS = 2**31  # Per vector: TensorFlow's concat and split use 32-bit sizes.


def is_summable(tensor: tf.Tensor) -> bool:
    """Whether every transport can sum the tensor's dtype."""
    return tensor.dtype.is_floating or tensor.dtype in (tf.int32, tf.int64)


def sendable(tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor to a summable dtype: bool and integers of up to 16 bits to int32.

    uint32 and uint64 become int64.

    Raises:
        ValueError: If the tensor is not numeric.
    """
    if is_summable(tensor):
        return tensor
    if tensor.dtype in SENT_AS:
        return tf.cast(tensor, SENT_AS[tensor.dtype])
    raise ValueError(
        "Workers can exchange only numeric and boolean tensors. Received: a tensor of type "
        f"{tensor.dtype.name} and shape {tuple(tensor.shape)}. Make the model return numbers (an "
        "index into a vocabulary, for strings)."
    )


def movable(tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor for `all_gather`: TensorFlow can sum bfloat16 but not gather it."""
    if tensor.dtype == tf.bfloat16:
        return tf.bitcast(tensor, tf.float16)  # Moved, never computed with.
    return sendable(tensor)


def restored(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts a received tensor back to its original dtype."""
    return tf.bitcast(tensor, dtype) if dtype == tf.bfloat16 else tf.cast(tensor, dtype)


def by_dtype(tensors: Sequence[tf.Tensor]) -> dict[tf.DType, list[int]]:
    """Returns the indices of the tensors, grouped by dtype."""
    indices: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return indices


def in_vectors(tensors: Sequence[tf.Tensor]) -> Iterator[list[int]]:
    """Yields groups of indices: tensors of one dtype, with fewer than 2³¹ elements together."""
    for indices in by_dtype(tensors).values():
        group, count = [], 0
        for index in indices:
            size = tensors[index].shape.num_elements() or 0
            if group and count + size >= _MAX_ELEMENTS:
                yield group
                group, count = [], 0
            group.append(index)
            count += size
        yield group


def buckets(sizes_bytes: Sequence[int], bucket_bytes: int | None) -> list[list[int]]:
    """Groups gradients into buckets, so that the last layers' are summed during the backward pass.

        backward   ∂J/∂θ_4   ∂J/∂θ_3   ∂J/∂θ_2   ∂J/∂θ_1
        bucket 0              Σ(θ_4, θ_3)
        bucket 1                                   Σ(θ_2, θ_1)

    Buckets fill from the last variable to the first, and a bucket closes once it reaches its size.
    Fewer buckets need fewer exchanges; more buckets overlap better. The sums do not change.

    Args:
        sizes_bytes: The tensors' sizes, in layer order.
        bucket_bytes: Minimum size of every bucket but the last; None for a single bucket.

    Returns:
        The indices in each bucket, in the order in which the buckets are sent.

    Example:
        >>> buckets([4, 4, 4, 8], 8)
        [[3], [2, 1], [0]]

    References:
        Shen Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
        arXiv:2006.15704, 2020, §3.2.
    """
    order = list(reversed(range(len(sizes_bytes))))
    if bucket_bytes is None:
        return [order] if order else []
    groups: list[list[int]] = []
    filled_bytes = bucket_bytes
    for index in order:
        if filled_bytes >= bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(index)
        filled_bytes += sizes_bytes[index]
    return groups


def num_pieces(size_bytes: int) -> int:
    """Returns how many pieces TensorFlow's ring makes of a worker's part; -1 is its own choice."""
    number = min(size_bytes // _PIECE_BYTES, _MAX_PIECES)
    return number if number > 1 else -1


def size_step(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds `size` up to a step; returns the index of the step and its number of elements.

    The steps are 5·2ᵒ, 6·2ᵒ, 7·2ᵒ and 8·2ᵒ for the octaves o = 0, 1, …; sizes below 4 become 4.
    """
    size = tf.maximum(size, _STEPS_PER_OCTAVE)
    # The epsilon keeps 8·2ᵒ in its own octave despite rounding.
    octave = tf.math.log(tf.cast(size, tf.float64)) / math.log(2) - 2 - 1e-9
    octave = tf.maximum(tf.cast(tf.floor(octave), size.dtype), 0)
    unit = tf.bitwise.left_shift(tf.ones_like(size), octave)
    quarters = -(-size // unit)
    return (octave - 1) * _STEPS_PER_OCTAVE + quarters, quarters * unit


def sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of the terms, in order; 16-bit types accumulate in 32 and round once."""
    dtype = terms[0].dtype
    if dtype.size > 2:
        return functools.reduce(operator.add, terms)
    return tf.cast(functools.reduce(operator.add, [tf.cast(t, tf.float32) for t in terms]), dtype)
