"""How many bytes a worker hands to the others, counted where they go to the transport.

What is counted is what a collective is given: of a sum over workers the vector that is summed, of
a join what this worker adds to it, padding and all. What of it travels, and how often, is the
algorithm's: a ring of W workers sends 2(W - 1)/W bytes for a byte that is summed. A sum of which
each worker gets a share sends half as many, and half of its vector is counted.
"""

import tensorflow as tf

SUMS, SLICES, ROWS = KINDS = ("sums", "slices", "rows")
_CALLS = "calls"


class Traffic:
    """Counts bytes by what they are.

    `SUMS` are of gradients, losses, metrics and moments, `SLICES` the gradients of embeddings, and
    `ROWS` whatever has a row for each example, such as predictions where they meet.
    """

    def __init__(self):
        # In a graph a variable counts, since its collectives run without Python.
        with tf.init_scope(), tf.device("CPU:0"):
            self._in_graphs = {
                k: tf.Variable(0, trainable=False, dtype=tf.int64) for k in (*KINDS, _CALLS)
            }
        self._in_python = dict.fromkeys((*KINDS, _CALLS), 0)

    def add(self, kind: str, num_bytes: int) -> None:
        """Counts bytes now."""
        self._in_python[kind] += num_bytes
        self._in_python[_CALLS] += kind == SUMS

    def add_tensor(self, kind: str, tensor: tf.Tensor, *, one_in: int = 1) -> None:
        """Counts a tensor's bytes, one in so many: now, or whenever the traced graph runs."""
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
        """How many collectives have carried sums so far."""
        return self._of(_CALLS)

    def read(self) -> dict[str, int]:
        """Returns the bytes so far, of each kind."""
        return {kind: self._of(kind) for kind in KINDS}

    def _of(self, name):
        return self._in_python[name] + int(self._in_graphs[name].numpy())
