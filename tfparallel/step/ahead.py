"""What a step would make when it is traced, made ahead of it.

A `tf.function` that makes a variable is traced twice, the second time without. The states of
compiled metrics, an optimizer's slots and Keras's global seed are made in the first step, which is
most of a first epoch of a deep network; made here, the step is traced once.
"""

import contextlib

import keras
import tensorflow as tf

from tfparallel.extend import is_own
from tfparallel.seams.keras import batches_of

__all__ = ["build_ahead", "types_of_batches"]


def types_of_batches(dataset: tf.data.Dataset):
    """The types of a data set's batches, in their structure; None for what has no shape."""
    return keras.tree.map_structure(
        lambda spec: spec if hasattr(spec, "shape") else None, dataset.element_spec
    )


def build_ahead(model: keras.Model, iterator, data_batch, scope) -> None:
    """Builds a compiled model's loss, metrics and optimizer, if Keras can without a step.

    Args:
        model: The model; nothing is done of one with a `train_step` of its own, which alone
            knows what it calls.
        iterator: Keras's, of the batches, of which none is taken; or None.
        data_batch: A batch, where there is no iterator.
        scope: A context in which the variables are made.
    """
    if is_own(model, "train_step"):
        return
    if iterator is not None:
        data_batch = types_of_batches(batches_of(iterator))
    # Where it cannot, the step says what is wrong, or makes them itself.
    with contextlib.suppress(Exception), scope:
        model._symbolic_build(data_batch=data_batch)
