"""Outputs of the model whose positions are divided over devices.

```
   last stage ──► [z₀ on CPU:0, z₁ on CPU:1] ──► concat = z      joined only if something reads it
                      │             │
   targets ── cut ──► ℓ₀            ℓ₁         the losses of the positions, where they are
```

The parts are outputs of the stage, beside the whole, so the gradient of the loss begins with them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.judge.positions import AXIS
from tfparallel.piece import Piece, where_it_is
from tfparallel.pipeline.micro_batches import Batch
from tfparallel.pipeline.stages import PartOf, Values
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.step.placeholders import has_positions


class SequencePart(NamedTuple):
    """A micro-batch for the loss, or its positions on one device.

    Attributes:
        y: The targets.
        sample_weight: The weights, or None.
        outputs: The outputs, in the model's own structure.
    """

    y: Any
    sample_weight: Any
    outputs: Any

    @property
    def length(self):
        """The number of positions: an int, or a tensor if unknown."""
        return length_of(keras.tree.flatten(self.outputs)[0])


def note_parts(
    values: Values,
    keys: Sequence[int],
    parts_of: Callable[[tf.Tensor], list[tf.Tensor] | None],
) -> None:
    """Adds the parts of a stage's outputs to them, if all outputs of the model are divided alike.

    Args:
        values: The outputs of the stage.
        keys: The keys of the model's outputs.
        parts_of: Returns the parts of a tensor; None if it is whole.
    """
    outputs = {key: values.get(key) for key in keys}
    if any(tensor is None for tensor in outputs.values()):
        return
    parts = {key: parts_of(tensor) for key, tensor in outputs.items()}
    if any(each is None for each in parts.values()):
        return
    lengths = {tensor.shape[AXIS] for tensor in outputs.values()}
    if len(lengths) > 1 or (None in lengths and len(outputs) > 1):
        return
    for key, tensors in parts.items():
        masks = _cut(mask_of(outputs[key]), tensors, outputs[key].shape[AXIS])
        for index, (part, mask) in enumerate(zip(tensors, masks, strict=True)):
            set_mask(part, mask)
            values[PartOf(key, index)] = part


def outputs_by_device(batch: Batch, piece: Piece, values: Values) -> list[Any]:
    """Returns the outputs of a micro-batch by device, each in the model's own structure.

    Empty if they are whole.
    """
    indices = sorted({key.index for key in values if isinstance(key, PartOf)})
    outputs = []
    for index in indices:
        with where_it_is(values[PartOf(batch.output_keys[0], index)]):
            outputs.append(batch.outputs_of(piece, values, index))
    return outputs


def pieces_of(whole: SequencePart, outputs: Sequence[Any]) -> list[SequencePart]:
    """Cuts the targets and the weights of divided outputs; each part is on its device.

    Args:
        whole: The targets, weights and outputs of the micro-batch.
        outputs: The outputs, by device.
    """
    if not outputs:
        return []
    parts = [keras.tree.flatten(each)[0] for each in outputs]
    length = keras.tree.flatten(whole.outputs)[0].shape[AXIS]
    leaves = keras.tree.flatten((whole.y, whole.sample_weight))
    by_leaf = [_cut(leaf, parts, length) for leaf in leaves]
    by_device = zip(*by_leaf, strict=True) if leaves else [()] * len(parts)
    like = (whole.y, whole.sample_weight)
    return [
        SequencePart(*keras.tree.pack_sequence_as(like, list(local)), each)
        for local, each in zip(by_device, outputs, strict=True)
    ]


def on_each(pieces: Sequence[SequencePart], function: Callable[[SequencePart], Any]) -> list[Any]:
    """Calls a function with each piece, on the device of its outputs."""
    results = []
    for piece in pieces:
        with where_it_is(keras.tree.flatten(piece.outputs)[0]):
            results.append(function(piece))
    return results


def length_of(tensor: tf.Tensor):
    """Returns the number of positions of a tensor: an int, or a tensor if unknown."""
    if tensor.shape[AXIS] is not None:
        return tensor.shape[AXIS]
    with where_it_is(tensor):
        return tf.shape(tensor)[AXIS]


def _cut(leaf, parts: Sequence[tf.Tensor], length: int | None) -> list[Any]:
    """Returns what each part of a tensor needs of a target, weight or mask of the whole."""
    if not has_positions(leaf, length):
        return [leaf] * len(parts)
    with where_it_is(leaf):
        pieces = tf.split(leaf, list(map(length_of, parts)), AXIS, num=len(parts))
    local = []
    for piece, part in zip(pieces, parts, strict=True):
        with where_it_is(part):
            local.append(tf.identity(piece))
    return local
