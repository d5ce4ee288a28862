"""In which type a tensor travels between workers."""

import tensorflow as tf

__all__ = ["SENT_AS", "is_summable", "movable", "restored", "sendable"]

# What is sent as another type, and comes back as its own.
SENT_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}


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
