"""Of which kind each reading of a weight is, for a step that runs eagerly: a trace of it tells.

Nothing of the trace is run. It is made once for each layer, and only where a gradient is sparse.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.custom_gradient import is_differentiable

__all__ = ["kinds_of"]


def kinds_of(
    call: Callable, arguments, weights: Sequence[tf.Variable]
) -> list[tuple[str, ...] | None]:
    """Traces a call, forward and backward, and looks at the gradients.

    Args:
        call: Takes `arguments`, returns tensors.
        arguments: A nested structure; tensors and arrays in it have the batch axis 0.
        weights: What is trained.

    Returns:
        For each weight the kinds of its readings; None where its gradient is dense, or none.

    Raises:
        ValueError: If the call cannot be traced.
    """
    leaves = [_as_tensor(leaf) for leaf in keras.tree.flatten(arguments)]
    places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
    found: list[tuple[str, ...] | None] = []

    @tf.function(autograph=False)
    def trace(*tensors):
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        with tf.GradientTape() as tape:
            outputs = keras.tree.flatten(call(keras.tree.pack_sequence_as(arguments, own)))
            targets = [each for each in outputs if is_differentiable(each)]
        for gradient in tape.gradient(targets, weights):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            kinds = [each.kind for each in indexed_slices.readings(gradient)] if is_sparse else None
            found.append(None if kinds is None else tuple(kinds))

    try:
        trace.get_concrete_function(*[_of_any_batch(leaves[place]) for place in places])
    except Exception as error:  # Whatever the user's layer raises where it is traced.
        raise ValueError(
            "A sparse gradient of an eager step is joined as a trace of the step says, and the "
            f"step cannot be traced. Received: run_eagerly=True, {type(error).__name__}: {error}. "
            "Make the layers traceable, or train on one device."
        ) from error
    return found


def _as_tensor(leaf):
    """An array would be a constant of the trace, and what is read with it read once a batch."""
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array_interface__") else leaf


def _of_any_batch(tensor):
    """The tensor's type, of batches of any size."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)([None, *spec.shape[1:]], spec.dtype)
