"""The attributes of layers while a call of theirs is judged.

The judge changes nothing: afterwards, the layers have the attributes that they had before. Tensors
that layers keep are reported, since replicas share Python objects.
"""

import contextlib
import inspect
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.judge.propagation import is_judged
from tfparallel.seams.keras import layers_in

_DEPTH = 3  # The depth to which nested containers are searched.
_PLAIN = (bool, int, float, str, np.generic)


def attributes_kept(layer) -> contextlib.AbstractContextManager[list]:
    """Restores the attributes of a layer and its inner layers after the block."""
    return kept_as_they_were(layers_in(layer))


@contextlib.contextmanager
def kept_as_they_were(parts: Iterable[Any]) -> Iterator[list]:
    """Restores the attributes of objects after the block: layers, losses, metrics."""
    before = [(vars(part), dict(vars(part))) for part in parts]
    containers: dict[int, tuple] = {}
    for _, attributes in before:
        for value in attributes.values():
            _note_containers(value, containers, _DEPTH)
    try:
        yield []
    finally:
        for container, elements in containers.values():
            _restore(container, elements)
        for attributes, old in before:
            for name in set(attributes) - set(old):
                del attributes[name]
            for name, value in old.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


def _note_containers(value, containers: dict[int, tuple], depth: int) -> None:
    """Adds lists, dictionaries and sets in a value, and their elements, to `containers`."""
    if not depth or not isinstance(value, list | dict | set) or id(value) in containers:
        return
    containers[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
    for each in value.values() if isinstance(value, dict) else value:
        _note_containers(each, containers, depth - 1)


def _restore(container, elements) -> None:
    """Restores the elements of a container, bypassing Keras's tracked containers."""
    current = list(container.items()) if isinstance(container, dict) else list(container)
    before = list(elements.items()) if isinstance(elements, dict) else elements
    pair = (current, before)
    flat = [itertools.chain(*each) if isinstance(container, dict) else each for each in pair]
    if len(current) == len(before) and all(map(operator.is_, *flat)):
        return
    if isinstance(container, list):
        list.__setitem__(container, slice(None), elements)
        return
    kind = dict if isinstance(container, dict) else set
    kind.clear(container)
    kind.update(container, elements)


def plain_attributes(layer) -> dict[tuple[int, str], Any]:
    """Returns the numbers, texts and the like that layers keep, by layer id and attribute name.

    Attributes that every Keras layer has are left out.
    """
    of_keras = vars(keras.layers.Layer(name="any"))
    return {
        (id(part), name): plain
        for part in layers_in(layer)
        for name, value in vars(part).items()
        if name not in of_keras and (plain := _plain(value, _DEPTH)) is not None
    }


def _plain(value, depth) -> Any:
    """Returns a copy of the numbers, texts and the like in a value; None if it has none."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        value = list(value.items())
    if not depth or not isinstance(value, list | tuple):
        return None
    copies = (_plain(each, depth - 1) for each in value)
    return tuple(each for each in copies if each is not None) or None


def kept_tensors(parts: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yields the objects and attributes that hold a tensor of the trace, which others may read."""
    for part in parts:
        for name, value in vars(part).items():
            for leaf in _leaves(value, _DEPTH):
                if isinstance(leaf, tf.Tensor) and is_judged(leaf):
                    yield part, name
                    break


def refers_to(function: Any, parts: Sequence[keras.Layer]) -> bool:
    """Returns whether a function or object refers to a layer, by a closure, global or attribute.

    Args:
        function: For example a user's loss or metric.
        parts: The layers to look for.
    """
    if isinstance(function, types.FunctionType):
        closure = inspect.getclosurevars(function)
        values = [*closure.nonlocals.values(), *closure.globals.values()]
    else:
        values = list(getattr(function, "__dict__", {}).values())
    ids = {id(part) for part in parts}
    return any(id(each) in ids for value in values for each in _leaves(value, _DEPTH))


def _leaves(value, depth) -> Iterator:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for each in value:
            yield from _leaves(each, depth - 1)
