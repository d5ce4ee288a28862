"""Decides which layers of a model compute in parts of a sequence.

These are attention (`sequence_attention.py`), dropout, and every layer that the judge proves to
treat positions independently (`judge/positions.py`). All others read whole sequences, on the first
device.
"""

from collections.abc import Collection, Mapping, Sequence

import keras
from absl import logging

from tfparallel.extend import original_class
from tfparallel.layers.composite import Group, class_of_keras, is_composite
from tfparallel.layers.positionwise import (
    Judgements,
    PositionwiseDropout,
    PositionwiseLayer,
    arguments_of,
    is_apart,
)
from tfparallel.layers.sequence_attention import SequenceAttention
from tfparallel.seams.functional import calls_of, has_graph
from tfparallel.seams.keras import attention_axes

POSITIONS, ATTENTION = "positions", "positions, attention"
KINDS = (POSITIONS, ATTENTION)

_layers = keras.layers
_ATTENTION = {_layers.MultiHeadAttention, _layers.GroupQueryAttention}


def plan(
    group: Group, num_devices: int, unsplit: Collection[str] = (), shared: Collection[int] = ()
) -> dict[str, str]:
    """Plans how each layer of a group computes in parts.

    Args:
        group: Built layers. Models and composite layers among them have their own groups.
        num_devices: The number of parts.
        unsplit: The names, in the group's report, of layers to leave in place.
        shared: The `id` of each layer that another group also calls: it is left in place.

    Returns:
        A kind, by the layer's name in a report; layers left in place are omitted.
    """
    kinds = {}
    for layer in group.layers:
        name = group.name_of(layer)
        if name in unsplit or id(layer) in shared or has_graph(layer) or is_composite(layer):
            continue
        nodes = nodes_of(group, layer)
        if not nodes or not layer.built or not _are_batch_first(group, nodes):
            continue
        if class_of_keras(layer) in _ATTENTION:
            if list(attention_axes(layer)) == [1]:
                kinds[name] = ATTENTION
        elif original_class(layer) is _layers.Dropout:
            if layer.noise_shape is None and any(map(_has_sequence, nodes)):
                kinds[name] = POSITIONS
        elif any(_is_apart(layer, node, num_devices) for node in nodes):
            kinds[name] = POSITIONS
    return kinds


def extension_of(layer: keras.Layer) -> tuple[type, dict]:
    """Returns the class that extends a planned layer, and its attributes."""
    if class_of_keras(layer) in _ATTENTION:
        return SequenceAttention, {}
    if original_class(layer) is _layers.Dropout:
        return PositionwiseDropout, {}
    return PositionwiseLayer, {"_judgements": Judgements()}


def warn_of_whole(plans: Sequence[tuple[Group, Mapping[str, str]]]) -> None:
    """Warns of layers that are called with a sequence but are not in the plans."""
    planned = {name for _, kinds in plans for name in kinds}
    # A composite layer whose calls are unknown reads whole sequences itself.
    seen = {id(group.owner) for group, _ in plans if group.graph is not None}
    names = [
        f"{group.name_of(layer)} ({original_class(layer).__name__})"
        for group, _ in plans
        for layer in group.layers
        if group.name_of(layer) not in planned and id(layer) not in seen
        if any(map(_has_sequence, nodes_of(group, layer)))
    ]
    if names:
        logging.warning(
            "These layers read whole sequences, on the first device: %s. docs/long_sequences.md "
            "lists the layers that can be split.",
            ", ".join(names),
        )


def nodes_of(group: Group, layer: keras.Layer) -> list:
    """Returns the known calls of a layer in a group."""
    calls = [] if group.graph is None else calls_of(group.graph)
    return [node for node in calls if node.operation is layer and not node.is_input]


def _are_batch_first(group, nodes) -> bool:
    """Returns whether axis 0 of the inputs holds examples, as in the model's or layer's inputs."""
    batch = group.graph.inputs[0].shape[0]
    leaves = [leaf for node in nodes for leaf in node.input_tensors]
    return all(leaf.shape[0] == batch for leaf in leaves if len(leaf.shape) > 1)


def _has_sequence(node) -> bool:
    return arguments_of(node.arguments.args, node.arguments.kwargs) is not None


def _is_apart(layer, node, num_devices) -> bool:
    arguments = (node.arguments.args, node.arguments.kwargs)
    return _has_sequence(node) and is_apart(layer, *arguments, num_devices)
