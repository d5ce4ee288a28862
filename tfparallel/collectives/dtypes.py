"""In which type a tensor travels between workers."""

import tensorflow as tf

__all__ = ["is_summable", "movable", "restored", "sendable"]


def is_summable(tensor: tf.Tensor) -> bool:
    """Whether every transport sums tensors of its type."""
    return tensor.dtype.is_floating or tensor.dtype in (tf.int32, tf.int64)


def sendable(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor as a sum can send it: small integers and truth values as larger integers.

    Raises:
        ValueError: If it holds no numbers.
    """
    if is_summable(tensor):
        return tensor
    if tensor.dtype.is_bool or tensor.dtype.is_integer:
        return tf.cast(tensor, tf.int64 if tensor.dtype.size > 4 else tf.int32)
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
