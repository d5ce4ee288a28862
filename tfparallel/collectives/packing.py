"""How tensors travel between workers or devices: as which type, in what size, which together."""

import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

# What is sent as another type, and comes back as its own.
SENT_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
_STEPS_PER_OCTAVE = 4
_MAX_ELEMENTS = 2**31  # Of a vector: TensorFlow joins and splits by numbers of 32 bits.


def is_summable(tensor: tf.Tensor) -> bool:
    """Whether every transport sums tensors of its type."""
    return tensor.dtype.is_floating or tensor.dtype in (tf.int32, tf.int64)


def sendable(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor as a sum can send it: truth values and integers of up to 16 bits as int32.

    uint32 and uint64 go as int64.

    Raises:
        ValueError: If it holds no numbers.
    """
    if is_summable(tensor):
        return tensor
    if tensor.dtype in SENT_AS:
        return tf.cast(tensor, SENT_AS[tensor.dtype])
    raise ValueError(
        "Workers can exchange tensors of numbers and of truth values. Received: a tensor of type "
        f"{tensor.dtype.name} and shape {tuple(tensor.shape)}. Let the model return numbers (an "
        "index into a vocabulary, for strings)."
    )


def movable(tensor: tf.Tensor) -> tf.Tensor:
    """What `all_gather` can send: TensorFlow's sums bfloat16, and does not join it."""
    if tensor.dtype == tf.bfloat16:
        return tf.bitcast(tensor, tf.float16)  # It is only moved.
    return sendable(tensor)


def restored(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What has been sent, in the type that it had."""
    return tf.bitcast(tensor, dtype) if dtype == tf.bfloat16 else tf.cast(tensor, dtype)


def by_dtype(tensors: Sequence[tf.Tensor]) -> dict[tf.DType, list[int]]:
    """Returns the indices of the tensors of each type."""
    indices: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return indices


def in_vectors(tensors: Sequence[tf.Tensor]) -> Iterator[list[int]]:
    """Yields the indices of tensors of one type, so many together as 31 bits can count."""
    for indices in by_dtype(tensors).values():
        together, count = [], 0
        for index in indices:
            size = tensors[index].shape.num_elements() or 0
            if together and count + size >= _MAX_ELEMENTS:
                yield together
                together, count = [], 0
            together.append(index)
            count += size
        yield together


def buckets(sizes_bytes: Sequence[int], bucket_bytes: int | None) -> list[list[int]]:
    """Deals gradients out to buckets: the last layers' are summed while the first are computed.

        backward   ∂J/∂θ_4   ∂J/∂θ_3   ∂J/∂θ_2   ∂J/∂θ_1
        bucket 0              Σ(θ_4, θ_3)
        bucket 1                                   Σ(θ_2, θ_1)

    A bucket takes variables from the last to the first, and closes with the one that reaches its
    size. Fewer buckets cost fewer exchanges; more of them overlap more. The sum of an element is
    the same.

    Args:
        sizes_bytes: The tensors' sizes, in the order of the layers.
        bucket_bytes: What a bucket holds at least, but for the last; None for one bucket.

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
    found: list[list[int]] = []
    held = bucket_bytes
    for index in order:
        if held >= bucket_bytes:
            found.append([])
            held = 0
        found[-1].append(index)
        held += sizes_bytes[index]
    return found


def size_step(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the index of the smallest step that holds `size` elements, and its elements.

    The steps are 5·2ᵒ, 6·2ᵒ, 7·2ᵒ and 8·2ᵒ for the octaves o = 0, 1, …; up to 4, all sizes are 4.
    """
    size = tf.maximum(size, _STEPS_PER_OCTAVE)
    # A hair less than the logarithm, so that 8·2ᵒ, rounded or not, is the end of its octave.
    octave = tf.math.log(tf.cast(size, tf.float64)) / math.log(2) - 2 - 1e-9
    octave = tf.maximum(tf.cast(tf.floor(octave), size.dtype), 0)
    unit = tf.bitwise.left_shift(tf.ones_like(size), octave)
    quarters = -(-size // unit)
    return (octave - 1) * _STEPS_PER_OCTAVE + quarters, quarters * unit
