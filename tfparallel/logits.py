"""The logits behind an output, which Keras's cross-entropies look for.

Keras's softmax and sigmoid note their logits on what they put out, and where nothing is noted, a
loss looks at the operation that made the output. Of logits a cross-entropy is exact; probabilities
it clips at 1e-7, and what is clipped has no gradient. An output that was joined, sliced or sent is
another tensor, with neither: so its logits are joined, and make the output again.

Rests on an attribute of Keras's, `_keras_logits`, and on its look at operations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.seams.keras import logits_beside, set_logits

__all__ = ["Logits", "logits_of", "output_of", "sources_of"]

_ACTIVATIONS = {
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
}


class Logits(NamedTuple):
    """What is behind an output.

    Attributes:
        tensor: The logits, of the output's shape; None of many outputs alike.
        operation: What makes the output of them: "Softmax", "Sigmoid", or None where that is not
            known (eagerly), so that the output is needed beside them.
        is_noted: Whether Keras noted them.
    """

    tensor: tf.Tensor | None
    operation: str | None
    is_noted: bool

    def output(self, logits: tf.Tensor, kept: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the output of other logits, such that a loss finds them.

        Args:
            logits: Joined, sliced or sent.
            kept: The output, likewise; not read where the operation is known.
        """
        found = kept if self.operation is None else _ACTIVATIONS[self.operation](logits)
        if self.is_noted:
            set_logits(found, logits)
        return found


def logits_of(output: tf.Tensor) -> Logits | None:
    """Returns what a loss would find behind an output, or None."""
    noted = logits_beside(output)
    if tf.is_symbolic_tensor(output) and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
        if noted is None or noted is logits:
            return Logits(logits, output.op.type, noted is not None)
    return None if noted is None else Logits(noted, None, True)


def sources_of(output: tf.Tensor, logits: Logits | None) -> list[tf.Tensor]:
    """Returns what to join, slice or send in place of an output: it, its logits, or both."""
    if logits is None:
        return [output]
    return [logits.tensor] if logits.operation is not None else [output, logits.tensor]


def output_of(sources: Sequence[tf.Tensor], logits: Logits | None) -> tf.Tensor:
    """Returns the output, of what `sources_of` gave once it has been joined, sliced or sent."""
    *kept, last = sources
    return last if logits is None else logits.output(last, *kept)
