"""Counts the bytes that a worker passes to the transport.

It counts the input of each collective: the vector of an all-reduce, and this worker's contribution
to an all-gather, including padding. The bytes on the wire depend on the algorithm: a ring of W
workers sends 2(W - 1)/W bytes for each byte that is reduced. A reduce-scatter sends half of that,
and is counted as half of its vector.
"""

import tensorflow as tf

SUMS, SLICES, ROWS = KINDS = ("sums", "slices", "rows")
_CALLS = "calls"


class Traffic:
    """Counts bytes by kind.

    `SUMS` are gradients, losses, metrics and moments; `SLICES` are the gradients of embeddings;
    `ROWS` are tensors with a row for each example, such as gathered predictions.
    """

    def __init__(self):
        # Collectives in a graph run without Python, so a variable counts them.
        with tf.init_scope(), tf.device("CPU:0"):
            self._in_graphs = {
                k: tf.Variable(0, trainable=False, dtype=tf.int64) for k in (*KINDS, _CALLS)
            }
        self._in_python = dict.fromkeys((*KINDS, _CALLS), 0)

    def add(self, kind: str, num_bytes: int) -> None:
        """Counts bytes immediately."""
        self._in_python[kind] += num_bytes
        self._in_python[_CALLS] += kind == SUMS

    def add_tensor(self, kind: str, tensor: tf.Tensor, *, one_in: int = 1) -> None:
        """Counts 1/`one_in` of a tensor's bytes: now, or whenever the traced graph runs."""
        size = tensor.shape.num_elements()
        if tf.executing_eagerly():
            self.add(kind, size * tensor.dtype.size // one_in)
            return
        with tf.device("CPU:0"):
            size = tf.size(tensor, tf.int64) if size is None else size
            num_bytes = size * tensor.dtype.size // one_in
            self._in_graphs[kind].assign_add(num_bytes, read_value=False)
            if kind == SUMS:
                self._in_graphs[_CALLS].assign_add(1, read_value=False)

    @property
    def num_sums(self) -> int:
        """Number of collectives so far that carried sums."""
        return self._of(_CALLS)

    def read(self) -> dict[str, int]:
        """Returns the bytes so far, by kind."""
        return {kind: self._of(kind) for kind in KINDS}

    def _of(self, name):
        return self._in_python[name] + int(self._in_graphs[name].numpy())
