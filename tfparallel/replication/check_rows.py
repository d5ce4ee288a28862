"""Refuses a call that mixes examples, before the first step in pieces computes anything."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.extend import attach, extend, original_class
from tfparallel.replication import row_probe
from tfparallel.replication.known_rows import is_known_by_rows
from tfparallel.replication.state import global_seed_generator

__all__ = ["check_rows", "make_quiet", "refusal"]

# Takes a layer, its own `__call__`, and the arguments; computes the call as the form does, and
# returns the outputs and the losses that layers added.
InPieces = Callable[[keras.Layer, Callable, tuple, dict], tuple[Any, Sequence[tf.Tensor]]]


def make_quiet(layer: keras.Layer) -> None:
    """Makes random layers and batch normalization act as in inference while a probe is traced."""
    for part in layer._flatten_layers():
        draws = part._seed_generators and not isinstance(part, keras.layers.Dropout)
        if draws or isinstance(part, keras.layers.BatchNormalization):
            extend(part, row_probe.QuietInProbe)


def check_rows(
    layer: keras.Layer,
    call: Callable,
    in_pieces: InPieces,
    num_rows: int,
    args: tuple,
    kwargs: dict,
) -> None:
    """Raises if the layer gives something else in pieces; looks once, and once more in training.

    Args:
        layer: The built layer, its parts extended.
        call: Its own `__call__`.
        in_pieces: How the form computes a call.
        num_rows: How many rows to try, where the batch may have any size.
        args: What it is called with, tensors of shape `(batch, …)` among it.
        kwargs: Likewise.

    Raises:
        ValueError: With the layer that is at fault, and the ways out.
    """
    looked_at = getattr(layer, "_rows_looked_at", ())
    training = bool(kwargs.get("training"))
    if training in looked_at or True in looked_at or is_known_by_rows(layer):
        return
    with tf.init_scope():
        found = _probed(layer, call, in_pieces, num_rows, args, kwargs)
        if found is not None:
            raise ValueError(refusal(layer, _culprit(layer, in_pieces, num_rows, kwargs), found))
    attach(layer, _rows_looked_at=(*looked_at, training))


def refusal(layer: keras.Layer, culprit: keras.Layer, found: row_probe.Difference) -> str:
    """The error's text."""
    return (
        f"Model '{layer.name}' does not treat each example by itself: computed in pieces, "
        f"{found.what} is another than of the whole batch (by {found.relative:.1g}, relative). "
        "Layers whose result for an example depends on that example alone are required where "
        "the batch is divided. Received: "
        f"layer '{culprit.name}' of class {original_class(culprit).__name__}. Join the rows in it "
        "with `tfparallel.all_gather` (under `data_parallel`), take a "
        "`keras.layers.BatchNormalization`, or train on one device. To train on all the same, to "
        "other weights than one device's, pass `check_rows=False`."
    )


def _probed(layer, call, in_pieces, num_rows, args, kwargs) -> row_probe.Difference | None:
    leaves = keras.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) or hasattr(leaf, "shape")]
    specs = [_spec(leaves[place]) for place in places]
    if not specs or None in specs:
        return None
    sizes = {spec.shape[0] for spec in specs if spec.shape.rank and spec.shape[0] is not None}
    num_rows = sizes.pop() if len(sizes) == 1 else num_rows
    rows = [row_probe.made_up(spec, num_rows, seed) for seed, spec in enumerate(specs)]
    if any(each is None for each in rows):
        return None

    def packed(tensors):
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        return keras.tree.pack_sequence_as((args, kwargs), own)

    def whole(*tensors):
        own_args, own_kwargs = packed(tensors)
        return call(*own_args, **own_kwargs), ()

    def pieces(*tensors):
        return in_pieces(layer, call, *packed(tensors))

    weights = layer.trainable_variables
    return row_probe.first_difference(whole, pieces, specs, rows, _written(layer), weights)


def _spec(leaf) -> tf.TensorSpec | None:
    """The type of a leaf, of batches of any size; None where no rows of it can be made up."""
    shape = tf.TensorShape(leaf.shape)
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or shape.rank is None:
        return None
    if not isinstance(leaf, tf.TensorSpec) and not tf.is_symbolic_tensor(leaf):
        shape = tf.TensorShape([None] * len(shape[:1])).concatenate(shape[1:])
    return tf.TensorSpec(shape, leaf.dtype)


def _written(layer) -> list[keras.Variable]:
    """What a call may write: states, metrics and seeds."""
    found = {}
    for part in layer._flatten_layers():
        held = [part.non_trainable_variables, *(metric.variables for metric in part.metrics)]
        held.append([generator.state for generator in part._seed_generators])
        found |= {id(v): v for variables in held for v in variables}
    return [*found.values(), global_seed_generator().state]


def _culprit(layer, in_pieces, num_rows, kwargs) -> keras.Layer:
    """The first layer of a functional or Sequential model that is at fault, in nested ones too."""
    inputs = getattr(layer, "inputs", None)
    for part in getattr(layer, "layers", ()) if inputs else ():
        if is_known_by_rows(part) or len(part._inbound_nodes) != 1:
            continue
        below = keras.Model(inputs, part.output)
        given = [keras.tree.pack_sequence_as(inputs, [_placeholder(each) for each in inputs])]
        found = _probed(below, below.__call__, in_pieces, num_rows, tuple(given), dict(kwargs))
        if found is not None:
            return _culprit(part, in_pieces, num_rows, kwargs)
    return layer


def _placeholder(symbolic: keras.KerasTensor):
    """Something with the shape and the type of an input."""
    return tf.TensorSpec(symbolic.shape, symbolic.dtype)
