"""Composite layers: layers that call other layers in their own `call`.

A functional model shows which layer reads what; the `call` of a transformer block does not. So it
is called here with symbolic tensors, as Keras calls the layers of a functional model; the calls
that it makes form a functional model, too, which is planned like any other. If a `call` rejects
symbolic tensors, since it uses TensorFlow's own functions, each of its layers is split alone.
"""

import collections
import dataclasses
import types
from collections.abc import Iterator

import keras
from absl import logging

from tfparallel.cloning.copy_state import without_draws
from tfparallel.extend import original_class
from tfparallel.placement.graph import layers_in_order
from tfparallel.seams.functional import calling_with, calls_of, has_graph
from tfparallel.seams.keras import (
    NAME_NUMBERS,
    get_global,
    layers_in,
    set_global,
    takes_training,
)

_DEFINITIONS = types.FunctionType | property | classmethod | staticmethod


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that the same model or composite layer calls.

    Attributes:
        owner: The model or layer that calls them.
        prefix: The prefix of their names in a report; empty for the layers of models.
        path: The prefix of the names of composite layers among them.
        graph: The calls, as a functional model; None if unknown.
        apart: Layers not called exactly once in `graph`: their inputs and outputs are whole.
    """

    owner: keras.Layer
    prefix: str = ""
    path: str = ""
    graph: keras.Model | None = None
    apart: tuple[keras.Layer, ...] = ()

    @property
    def layers(self) -> list[keras.Layer]:
        """All of them, in the order of the calls if known."""
        called = [] if self.graph is None else layers_in_order(self.graph)
        if self.graph is self.owner:
            return called
        # It may also call layers that its own layers hold; those are in another group.
        in_calls = set(map(id, called)).intersection(map(id, _inner_layers(self.owner)))
        in_calls -= set(map(id, self.apart))
        return [*(layer for layer in called if id(layer) in in_calls), *self.apart]

    def name_of(self, layer: keras.Layer) -> str:
        """Returns the name of one of them in a report."""
        return self.prefix + layer.name


def is_composite(layer: keras.Layer) -> bool:
    """Returns whether a layer is neither a layer nor a model of Keras, and holds others."""
    is_of_keras = class_of_keras(layer).__module__.startswith("keras.")
    return not is_of_keras and not has_graph(layer) and bool(_inner_layers(layer))


def class_of_keras(layer: keras.Layer) -> type:
    """Returns the class of a layer; Keras's if the layer's only inherits from one."""
    cls = original_class(layer)
    while not cls.__module__.startswith("keras.") and len(cls.__bases__) == 1:
        if any(isinstance(value, _DEFINITIONS) for value in vars(cls).values()):
            break
        cls = cls.__base__
    return cls


def groups_in(model: keras.Model) -> list[Group]:
    """Returns the groups of a functional model, including nested ones, innermost first."""
    return list(_groups(Group(model, graph=model), set()))


def _groups(group: Group, seen: set[int]) -> Iterator[Group]:
    seen.add(id(group.owner))
    for layer in group.layers:
        if id(layer) in seen:
            continue
        if has_graph(layer):
            path = f"{group.path}{layer.name}/"
            prefix = "" if has_graph(group.owner) else path
            yield from _groups(Group(layer, prefix, path, layer), seen)
        elif is_composite(layer):
            yield from _groups(_inside(layer, group), seen)
    yield group


def _inside(layer, outer) -> Group:
    """Returns the group of a composite layer that another group calls."""
    graph = _calls_in(layer, outer.graph)
    numbers = collections.Counter(id(node.operation) for node in calls_of(graph))
    apart = tuple(each for each in _inner_layers(layer) if numbers[id(each)] != 1)
    path = f"{outer.path}{layer.name}/"
    return Group(layer, path, path, graph, apart)


def _calls_in(layer, outer) -> keras.Model | None:
    """Returns the calls of a layer in training; None if it rejects symbolic tensors."""
    calls = [] if outer is None else calls_of(outer)
    # Further calls, or calls in inference, may differ: they can read parts as a whole.
    node = next((node for node in calls if node.operation is layer), None)
    if node is None:
        return None
    arguments = (node.arguments.args, node.arguments.kwargs)
    numbers = dict(get_global(NAME_NUMBERS) or {})
    # Discard what the call writes: seed states, losses, and the names that Keras counts.
    with without_draws(), keras.StatelessScope(collect_losses=True), calling_with(layer, True):
        try:
            args, kwargs = keras.tree.map_structure(_input_like, arguments)
            if takes_training(layer):
                kwargs["training"] = True
            else:  # Keras drops it, too.
                kwargs.pop("training", None)
            inputs = list(filter(keras.backend.is_keras_tensor, keras.tree.flatten((args, kwargs))))
            outputs = keras.tree.flatten(layer.call(*args, **kwargs))
            return keras.Model(inputs, list(filter(keras.backend.is_keras_tensor, outputs)))
        except Exception as error:  # A `call` not written for this may raise anything.
            logging.info("Layer '%s' cannot be called with symbolic tensors: %s", layer.name, error)
            return None
        finally:
            set_global(NAME_NUMBERS, collections.defaultdict(int, numbers))


def _input_like(value):
    if not keras.backend.is_keras_tensor(value):
        return value
    # A known batch size, which a `call` may compute with.
    return keras.Input(batch_shape=(value.shape[0] or 2, *value.shape[1:]), dtype=value.dtype)


def _inner_layers(layer) -> list[keras.Layer]:
    return layers_in(layer, include_self=False, recursive=False)
