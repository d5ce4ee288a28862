"""What layers keep in attributes while a call of theirs is judged.

A judge changes nothing: the layers have afterwards the attributes that they had. A tensor that is
kept is noted, since replicas share the objects of Python.
"""

import contextlib
import operator
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.engine.judge import is_judged
from tfparallel.seams.keras import layers_in

__all__ = ["attributes_kept", "kept_tensors"]

_DEPTH = 3  # Of lists in lists, in which a tensor may be kept.


@contextlib.contextmanager
def attributes_kept(layer) -> Iterator[list]:
    """Gives the layers back the attributes that they had: a judge changes nothing."""
    before = [(vars(part), dict(vars(part))) for part in layers_in(layer)]
    lists = [
        (own, list(own))
        for _, attributes in before
        for own in attributes.values()
        if isinstance(own, list)
    ]
    try:
        yield []
    finally:
        for own, elements in lists:
            if len(own) != len(elements) or any(map(operator.is_not, own, elements)):
                list.__setitem__(own, slice(None), elements)
        for attributes, old in before:
            for name in set(attributes) - set(old):
                del attributes[name]
            for name, value in old.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


def kept_tensors(layer) -> Iterator[tuple[keras.Layer, str]]:
    """The tensors of the trace that layers keep in attributes, and others may read."""
    for part in layers_in(layer):
        for name, value in vars(part).items():
            for leaf in _leaves(value, _DEPTH):
                if isinstance(leaf, tf.Tensor) and is_judged(leaf):
                    yield part, name
                    break


def _leaves(value, depth) -> Iterator:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for each in value:
            yield from _leaves(each, depth - 1)
