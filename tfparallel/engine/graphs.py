"""The operations of a graph, and of the functions that they call."""

from collections.abc import Iterable, Iterator

import tensorflow as tf

__all__ = ["called_by", "with_inner"]

# Of an operation's type: its attributes that are functions, and whether they are lists of them.
_KINDS: dict[str, dict[str, str]] = {}


def with_inner(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and those of all functions that they call."""
    for operation in operations:
        yield operation
        for inner in called_by(operation):
            yield from with_inner(inner.get_operations())


def called_by(operation: tf.Operation) -> Iterator[tf.Graph]:
    """Yields the graphs of the functions that an operation calls: loops, branches, functions."""
    kinds = _KINDS.get(operation.type)
    if kinds is None:
        found = {each.name: each.type for each in operation.op_def.attr}
        kinds = {name: kind for name, kind in found.items() if kind in ("func", "list(func)")}
        _KINDS[operation.type] = kinds
    for name, kind in kinds.items():
        value = operation.get_attr(name)
        for called in value if kind == "list(func)" else [value]:
            inner = getattr(operation.graph._get_function(called.name), "graph", None)
            if inner is not None:
                yield inner
