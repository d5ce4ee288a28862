"""The logits of an output, which Keras's cross-entropies look for.

Keras's softmax and sigmoid attach their logits to their output; if there are none, a loss looks at
the operation that computed the output. A cross-entropy of logits is exact. It clips probabilities
at 1e-7, and clipped values have no gradient. An output that was joined, sliced or sent is a new
tensor, without either: so its logits are joined, and the output is computed from them again.

Relies on an attribute of Keras, `_keras_logits`, and on how it inspects operations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.seams.keras import logits_beside, set_logits

_ACTIVATIONS = {
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
}


class Logits(NamedTuple):
    """The logits of an output.

    Attributes:
        tensor: The logits, with the output's shape; None if it stands for many outputs.
        operation: The operation that computes the output: "Softmax", "Sigmoid", or None if unknown
            (eagerly), so the output is needed, too.
        is_noted: Whether Keras attached them.
    """

    tensor: tf.Tensor | None
    operation: str | None
    is_noted: bool

    def output(self, logits: tf.Tensor, joined: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the output for other logits, and attaches them for the loss.

        Args:
            logits: The joined, sliced or sent logits.
            joined: The output, joined, sliced or sent; not read if the operation is known.
        """
        output = joined if self.operation is None else _ACTIVATIONS[self.operation](logits)
        if self.is_noted:
            set_logits(output, logits)
        return output


def logits_of(output: tf.Tensor) -> Logits | None:
    """Returns the logits that a loss would find for an output, or None."""
    noted = logits_beside(output)
    if tf.is_symbolic_tensor(output) and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
        if noted is None or noted is logits:
            return Logits(logits, output.op.type, noted is not None)
    return None if noted is None else Logits(noted, None, True)


def sources_of(output: tf.Tensor, logits: Logits | None) -> list[tf.Tensor]:
    """Returns the tensors to join, slice or send for an output: it, its logits, or both."""
    if logits is None:
        return [output]
    return [logits.tensor] if logits.operation is not None else [output, logits.tensor]


def output_of(sources: Sequence[tf.Tensor], logits: Logits | None) -> tf.Tensor:
    """Returns the output from the joined, sliced or sent tensors of `sources_of`."""
    *outputs, last = sources
    return last if logits is None else logits.output(last, *outputs)
