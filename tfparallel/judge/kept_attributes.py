"""What layers keep in attributes while a call of theirs is judged.

A judge changes nothing: the layers have afterwards the attributes that they had. A tensor that is
kept is noted, since replicas share the objects of Python.
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

__all__ = [
    "attributes_kept",
    "kept_as_they_were",
    "kept_tensors",
    "plain_attributes",
    "refers_to",
]

_DEPTH = 3  # Of containers in containers, in which something may be kept.
_PLAIN = (bool, int, float, str, np.generic)


def attributes_kept(layer) -> contextlib.AbstractContextManager[list]:
    """Gives the layers back the attributes that they had: a judge changes nothing."""
    return kept_as_they_were(layers_in(layer))


@contextlib.contextmanager
def kept_as_they_were(parts: Iterable[Any]) -> Iterator[list]:
    """Gives objects back the attributes that they had: layers, losses, metrics."""
    before = [(vars(part), dict(vars(part))) for part in parts]
    containers: dict[int, tuple] = {}
    for _, attributes in before:
        for value in attributes.values():
            _note_containers(value, containers, _DEPTH)
    try:
        yield []
    finally:
        for own, elements in containers.values():
            _restore(own, elements)
        for attributes, old in before:
            for name in set(attributes) - set(old):
                del attributes[name]
            for name, value in old.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


def _note_containers(value, found: dict[int, tuple], depth: int) -> None:
    """Adds lists, dictionaries and sets, with what they hold, to those that were found."""
    if not depth or not isinstance(value, list | dict | set) or id(value) in found:
        return
    found[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
    for each in value.values() if isinstance(value, dict) else value:
        _note_containers(each, found, depth - 1)


def _restore(own, elements) -> None:
    """Gives a container the elements that it had, past Keras's tracking of its own kinds."""
    held = list(own.items()) if isinstance(own, dict) else list(own)
    before = list(elements.items()) if isinstance(elements, dict) else elements
    flat = [itertools.chain(*each) if isinstance(own, dict) else each for each in (held, before)]
    if len(held) == len(before) and all(map(operator.is_, *flat)):
        return
    if isinstance(own, list):
        list.__setitem__(own, slice(None), elements)
        return
    kind = dict if isinstance(own, dict) else set
    kind.clear(own)
    kind.update(own, elements)


def plain_attributes(layer) -> dict[tuple[int, str], Any]:
    """Numbers, texts and the like that layers keep, by the layer's id and the attribute's name.

    What every layer of Keras has is Keras's own.
    """
    of_keras = vars(keras.layers.Layer(name="any"))
    return {
        (id(part), name): plain
        for part in layers_in(layer)
        for name, value in vars(part).items()
        if name not in of_keras and (plain := _plain(value, _DEPTH)) is not None
    }


def _plain(value, depth) -> Any:
    """A copy of the numbers, texts and the like in something; None where there are none."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        value = list(value.items())
    if not depth or not isinstance(value, list | tuple):
        return None
    found = (_plain(each, depth - 1) for each in value)
    return tuple(each for each in found if each is not None) or None


def kept_tensors(layer) -> Iterator[tuple[keras.Layer, str]]:
    """The tensors of the trace that layers keep in attributes, and others may read."""
    for part in layers_in(layer):
        for name, value in vars(part).items():
            for leaf in _leaves(value, _DEPTH):
                if isinstance(leaf, tf.Tensor) and is_judged(leaf):
                    yield part, name
                    break


def refers_to(function: Any, parts: Sequence[keras.Layer]) -> bool:
    """Whether a function or an object has a layer at hand: in a closure, a global or an attribute.

    Args:
        function: A loss or a metric of the user's, for example.
        parts: The layers that are looked for.
    """
    if isinstance(function, types.FunctionType):
        found = inspect.getclosurevars(function)
        held = [*found.nonlocals.values(), *found.globals.values()]
    else:
        held = list(getattr(function, "__dict__", {}).values())
    ids = {id(part) for part in parts}
    return any(id(each) in ids for value in held for each in _leaves(value, _DEPTH))


def _leaves(value, depth) -> Iterator:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for each in value:
            yield from _leaves(each, depth - 1)
