"""How much memory tensors take, as TensorFlow's allocator counts it."""

import pytest
import tensorflow as tf


def tensor_bytes(kind: str) -> int:
    """Bytes of tensors on the CPU, `"current"` or `"peak"`; skips the test if nothing counts them.

    CPUs have an allocator that counts with oneDNN, which TensorFlow uses by default on those with
    AVX-512.
    """
    try:
        return tf.config.experimental.get_memory_info("CPU:0")[kind]
    except ValueError as error:
        pytest.skip(f"TensorFlow counts no memory of this CPU: {error}")
