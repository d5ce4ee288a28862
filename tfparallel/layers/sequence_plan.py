"""Which layers of a model compute in parts of a sequence.

Attention (`sequence_attention.py`); dropout; and each other layer that is judged to treat every
position by itself (`judge/positions.py`). All else reads whole sequences, on the first device.
"""

import functools
from collections.abc import Collection, Mapping, Sequence

import keras
from absl import logging

from tfparallel.extend import original_class
from tfparallel.judge.positions import keeps_positions_apart
from tfparallel.layers.composite import Group, class_of_keras, is_composite
from tfparallel.layers.positionwise import (
    Argument,
    PositionwiseDropout,
    PositionwiseLayer,
    arguments_of,
    settings_of,
)
from tfparallel.layers.sequence_attention import SequenceAttention
from tfparallel.seams.functional import calls_of, has_graph
from tfparallel.seams.keras import attention_axes, takes_training

__all__ = ["KINDS", "extension_of", "plan", "warn_of_whole"]

POSITIONS, ATTENTION = "positions", "positions, attention"
KINDS = (POSITIONS, ATTENTION)

_layers = keras.layers
_ATTENTION = {_layers.MultiHeadAttention, _layers.GroupQueryAttention}


def plan(group: Group, left: Collection[str] = (), shared: Collection[int] = ()) -> dict[str, str]:
    """Says how each layer of a group computes in parts.

    Args:
        group: Built layers. Models and composite layers among them are groups of their own.
        left: The names, in the group's report, of layers to leave in place.
        shared: The `id` of each layer that another group calls, too: it is left in place.

    Returns:
        A kind by the layer's name in a report; what is left in place is not named.
    """
    found = {}
    for layer in group.layers:
        name = group.name_of(layer)
        if name in left or id(layer) in shared or has_graph(layer) or is_composite(layer):
            continue
        nodes = nodes_of(group, layer)
        if not nodes or not layer.built or not _are_batch_first(group, nodes):
            continue
        if class_of_keras(layer) in _ATTENTION:
            if list(attention_axes(layer)) == [1]:
                found[name] = ATTENTION
        elif original_class(layer) is _layers.Dropout:
            if layer.noise_shape is None and any(map(_arguments, nodes)):
                found[name] = POSITIONS
        elif _judged(layer, nodes):
            found[name] = POSITIONS
    return found


def extension_of(group: Group, layer: keras.Layer) -> tuple[type, dict]:
    """What extends a layer of a plan, and with which attributes."""
    if class_of_keras(layer) in _ATTENTION:
        return SequenceAttention, {}
    if original_class(layer) is _layers.Dropout:
        return PositionwiseDropout, {}
    judged = _judged(layer, nodes_of(group, layer))
    return PositionwiseLayer, {"_judged": judged, "_settings_judged": settings_of(layer)}


def warn_of_whole(plans: Sequence[tuple[Group, Mapping[str, str]]]) -> None:
    """Warns of layers that are called with a sequence and are not in the plans."""
    planned = {name for _, kinds in plans for name in kinds}
    # A composite layer whose calls are not known computes whole sequences itself.
    seen = {id(group.owner) for group, _ in plans if group.graph is not None}
    names = [
        f"{group.name_of(layer)} ({original_class(layer).__name__})"
        for group, _ in plans
        for layer in group.layers
        if group.name_of(layer) not in planned and id(layer) not in seen
        if any(map(_arguments, nodes_of(group, layer)))
    ]
    if names:
        logging.warning(
            "These layers read whole sequences, on the first device: %s. docs/long_sequences.md "
            "says which layers compute in parts.",
            ", ".join(names),
        )


def nodes_of(group: Group, layer: keras.Layer) -> list:
    """The calls of a layer in a group, as far as they are known."""
    calls = [] if group.graph is None else calls_of(group.graph)
    return [node for node in calls if node.operation is layer and not node.is_input]


def _are_batch_first(group, nodes) -> bool:
    """Whether what is called has its examples on axis 0, as the model's or the layer's inputs."""
    batch = group.graph.inputs[0].shape[0]
    leaves = [leaf for node in nodes for leaf in node.input_tensors]
    return all(leaf.shape[0] == batch for leaf in leaves if len(leaf.shape) > 1)


def _arguments(node) -> tuple[Argument, ...] | None:
    return arguments_of(node.arguments.args, node.arguments.kwargs)


def _judged(layer, nodes) -> list[tuple[Argument, ...]]:
    """The calls that keep positions apart, each without masks and with them."""
    found = []
    for node in nodes:
        arguments = _arguments(node)
        if arguments is None or arguments in found:
            continue
        masked = tuple(
            each._replace(is_masked=each.is_cut and _has_mask(each)) for each in arguments
        )
        found += [each for each in (arguments, masked) if _is_apart(layer, node, each)]
    return found


def _has_mask(argument) -> bool:
    """Whether Keras hands a mask on with such a tensor, if there is one."""
    rank, _ = argument.value
    return rank > 2


def _is_apart(layer, node, arguments) -> bool:
    structure = (node.arguments.args, node.arguments.kwargs)
    by_path = {each.path: each for each in arguments}
    paths = keras.tree.flatten_with_path(structure)
    leaves = [leaf for _, leaf in paths]
    known = [by_path.get(path) for path, _ in paths]
    cut, masked = (
        [each is not None and getattr(each, name) for each in known]
        for name in ("is_cut", "is_masked")
    )

    def call(leaves, training):
        args, kwargs = keras.tree.pack_sequence_as(structure, leaves)
        told = {} if training is None else {"training": training}
        return layer(*args, **kwargs | told)

    return all(
        keeps_positions_apart(
            layer, functools.partial(call, training=training), leaves, cut, masked
        )
        for training in ([True, False] if takes_training(layer) else [None])
    )
