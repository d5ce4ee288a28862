"""Which tensors are laid end to end, to be summed as one vector."""

from collections.abc import Iterator, Sequence

import tensorflow as tf

__all__ = ["by_dtype", "in_vectors"]

_MAX_ELEMENTS = 2**31  # Of a vector: TensorFlow joins and splits by numbers of 32 bits.


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
