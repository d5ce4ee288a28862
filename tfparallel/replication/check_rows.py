"""Refuses a call that mixes examples, before the first step in pieces computes anything."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfparallel.cluster.worker_error import without_frames
from tfparallel.extend import attach, extend, original_class
from tfparallel.replication import row_probe
from tfparallel.replication.state import global_seed_generator
from tfparallel.step.known_rows import is_known_by_rows, rows_of_constants

__all__ = ["check_rows", "make_quiet", "refusal", "why_not_in_pieces"]

_TURNS = 3  # Of ids and words there are few: those of one batch may happen to be alike.
_NUM_WORDS = 8

# Takes a layer, its own `__call__`, and the arguments; computes the call as the form does, and
# returns the outputs and the losses that layers added.
InPieces = Callable[[keras.Layer, Callable, tuple, dict], tuple[Any, Sequence[tf.Tensor]]]


def make_quiet(layer: keras.Layer) -> None:
    """Makes random layers and batch normalization act as in inference while a probe is traced."""
    for part in layer._flatten_layers():
        draws = part._seed_generators and not isinstance(part, keras.layers.Dropout)
        if draws or isinstance(part, keras.layers.BatchNormalization):
            extend(part, row_probe.QuietInProbe)


def check_rows(layer: keras.Layer, *how: Any) -> None:
    """Raises if the layer gives something else in pieces.

    Args:
        layer: The built layer, its parts extended.
        *how: As for `why_not_in_pieces`.

    Raises:
        ValueError: With the layer that is at fault, and the ways out.
    """
    said = why_not_in_pieces(layer, *how)
    if said is not None:
        _forget_steps(layer)
        raise ValueError(said)


def why_not_in_pieces(
    layer: keras.Layer,
    call: Callable,
    in_pieces: InPieces,
    num_rows: int,
    args: tuple,
    kwargs: dict,
) -> str | None:
    """Says which layer gives something else in pieces; looks once, and once more in training.

    Args:
        layer: The built layer, its parts extended.
        call: Its own `__call__`.
        in_pieces: How the form computes a call.
        num_rows: How many rows to try, where the batch may have any size.
        args: What it is called with, tensors of shape `(batch, …)` among it.
        kwargs: Likewise.

    Returns:
        An error's text, with the ways out; None where all is well.
    """
    looked_at = getattr(layer, "_rows_looked_at", ())
    training = bool(kwargs.get("training"))
    if training in looked_at or is_known_by_rows(layer):
        return None
    with tf.init_scope():
        probe = Probe(in_pieces, num_rows)
        found = probe.of(layer, call, args, kwargs)
        if found is not None:
            return refusal(layer, probe.culprit(layer, kwargs), found)
    attach(layer, _rows_looked_at=(*looked_at, training))
    return None


def refusal(layer: keras.Layer, culprit: keras.Layer, found: row_probe.Difference) -> str:
    """The error's text."""
    return (
        "A layer mixes examples, and the batch is divided. Layers whose result for an example "
        f"depends on that example alone are required. Received: layer '{culprit.name}' of class "
        f"{original_class(culprit).__name__} in model '{layer.name}': {found}. Join the "
        "rows in the layer with `tfparallel.all_gather` (under `data_parallel`), take a "
        "`keras.layers.BatchNormalization`, or train on one device. To train anyway, to other "
        "weights than one device's, pass `check_rows=False`."
    )


class Probe:
    """Computes a call on made-up rows.

    Args:
        in_pieces: How the form computes a call.
        num_rows: How many rows to try first; then multiples of 4, as a layer may group them.
    """

    def __init__(self, in_pieces: InPieces, num_rows: int):
        self._in_pieces = in_pieces
        self._numbers = [num_rows, *(multiple * (num_rows // 2) for multiple in (4, 8, 12))]

    def of(self, layer, call, args, kwargs) -> row_probe.Difference | None:
        """What differs; None where nothing does, or nothing could be computed, which is logged."""
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
        sizes = {symbolic.shape[0] for symbolic in getattr(layer, "inputs", None) or ()} - {None}
        specs = [_spec(leaves[place], bool(sizes)) for place in places]
        if not specs or None in specs:
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
            return self._in_pieces(layer, call, *packed(tensors))

        problem, words = None, _words_of(layer)
        for num_rows in sizes or [*rows_of_constants(layer), *self._numbers]:
            batches = [
                [
                    row_probe.made_up(spec, num_rows, (place, turn), words)
                    for place, spec in enumerate(specs)
                ]
                for turn in range(_TURNS)
            ]
            if any(each is None for each in batches[0]):
                return None
            try:
                return row_probe.first_difference(
                    *(whole, pieces, specs, batches, _written(layer), layer.trainable_variables),
                    compute_dtype=_coarsest_dtype(layer),
                )
            except row_probe.NotTried as error:
                problem = problem or error
        logging.warning(
            "Model '%s' could not be computed on made-up rows, to see whether it treats each "
            "example by itself: %s",
            *(layer.name, _first_line(problem)),
        )
        return None

    def culprit(self, layer: keras.Layer, kwargs: dict) -> keras.Layer:
        """The first layer of a functional or Sequential model that is at fault, or one in it."""
        graph = getattr(layer, "_functional", None) or layer
        by_depth = getattr(graph, "_nodes_by_depth", {})
        nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        for node in nodes:
            part = node.operation
            if node.is_input or (isinstance(part, keras.Layer) and is_known_by_rows(part)):
                continue
            below = keras.Model(graph.inputs, node.outputs)
            given = [tf.TensorSpec(each.shape, each.dtype) for each in graph.inputs]
            args = (keras.tree.pack_sequence_as(graph.inputs, given),)
            if self.of(below, below.__call__, args, dict(kwargs)) is not None:
                return self.culprit(part, kwargs)
        return layer


def _first_line(problem: row_probe.NotTried) -> str:
    """What is wrong, which in an error of a graph stands below TensorFlow's heading and frames."""
    first, *others = [*without_frames(str(problem)), ""]
    kind, is_of_graph, _ = first.partition("Graph execution error:")
    return f"{kind}{others[0]}" if is_of_graph else first


def _words_of(layer) -> list[str]:
    """What its lookups know, some of them: of a word that none knows all rows are alike."""
    found: dict[str, None] = {}
    for part in layer._flatten_layers():
        if isinstance(part, keras.layers.StringLookup | keras.layers.TextVectorization):
            found |= dict.fromkeys(part.get_vocabulary(include_special_tokens=False)[:_NUM_WORDS])
    return list(found)


def _forget_steps(layer) -> None:
    """Has a model trace its steps anew, whose trace was broken off."""
    for name in ("train_function", "test_function", "predict_function"):
        if isinstance(layer, keras.Model):
            setattr(layer, name, None)


def _coarsest_dtype(layer) -> str:
    types = {getattr(part, "compute_dtype", None) for part in layer._flatten_layers()}
    order = ("float16", "bfloat16", "float32", "float64")
    return next((dtype for dtype in order if dtype in types), "float32")


def _spec(leaf, is_static: bool) -> tf.TypeSpec | None:
    """Returns the type of a leaf, for batches of any size; None where it is not supported."""
    shape = tf.TensorShape(leaf.shape)
    if isinstance(leaf, tf.SparseTensor) or shape.rank is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        shape = [None, *shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if not is_static:
        shape = tf.TensorShape([None] * len(shape[:1])).concatenate(shape[1:])
    return tf.TensorSpec(shape, leaf.dtype)


def _written(layer) -> list[keras.Variable]:
    """What a call may write: states, weights, metrics and seeds."""
    found = {}
    for part in layer._flatten_layers():
        held = [part.variables, *(metric.variables for metric in part.metrics)]
        held.append([generator.state for generator in part._seed_generators])
        found |= {id(v): v for variables in held for v in variables}
    return [*found.values(), global_seed_generator().state]
