"""What layers keep in attributes while a call of theirs is judged.

A judge changes nothing: the layers have afterwards the attributes that they had. A tensor that is
kept is noted, since replicas share the objects of Python.
"""

import contextlib
import operator
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.engine.judge import exchanges_of, is_judged

__all__ = ["attributes_kept", "kept_tensors", "reads_noted"]

_DEPTH = 3  # Of lists in lists, in which a tensor may be kept.


@contextlib.contextmanager
def reads_noted(kept) -> Iterator[list]:
    """Notes which of the attributes are read behind an exchange that came after they were set."""
    late, classes = [], [(part, type(part)) for part, _ in kept]
    for part, name in kept:
        part.__class__ = type(type(part).__name__, (_noting(type(part), part, name, late),), {})
    try:
        yield late
    finally:
        for part, cls in reversed(classes):
            part.__class__ = cls


def _noting(cls, part, name, late):
    """A class of which the attribute notes when it is set and read."""
    at = {}

    def number() -> int:
        return len(exchanges_of(tf.compat.v1.get_default_graph()))

    def get(self):
        if name in at and number() > at[name]:
            late.append((part, name))
        return vars(self)[name]

    def put(self, value):
        at[name] = number()
        vars(self)[name] = value

    return type(cls.__name__, (cls,), {name: property(get, put)})


@contextlib.contextmanager
def attributes_kept(layer) -> Iterator[list]:
    """Gives the layers back the attributes that they had: a judge changes nothing."""
    before = [(vars(part), dict(vars(part))) for part in layer._flatten_layers()]
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
    for part in layer._flatten_layers():
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
