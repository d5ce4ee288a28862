"""A function of a micro-batch, traced with the first and called for all.

M micro-batches pass through the same layers. Traced for each, a step has M times the operations:
with 10.8 M parameters and M = 8 that took half a minute and a gigabyte before anything was trained.
Here it is a function of its own, forward and, by TensorFlow, backward, that the step calls M times.

What a micro-batch is told beside its tensors are arguments too: which rows it has, and its index.
What is the same for all of a step (seeds, divisors) is made outside, and captured.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data import provenance
from tfparallel.data.shard import Shard

__all__ = ["TracedOnce"]

_READS = ("ReadVariableOp", "VariableShape", "AssignVariableOp", "AssignAddVariableOp")
_HANDED_ON = ("Identity", "Cast", "ReadVariableOp")


class _ReadTwice(Exception):
    """A weight has several sparse gradients, which a function would hand on as one."""


class TracedOnce:
    """Such a function, while a step is traced; in an eager step it is called as it is.

    Args:
        function: Takes tensors, of which any may be None, and the micro-batch's rows; returns
            tensors. The mask that Keras keeps beside a tensor goes in and out with it.
        shards: The rows of all micro-batches.
    """

    def __init__(
        self, function: Callable[[list[Any], Shard], list[Any]], shards: Sequence[Shard]
    ):
        self._function = function
        # Known, and the same for all: then a layer knows that no micro-batch is without rows.
        sizes = {s.num_rows if isinstance(s.num_rows, int) else None for s in shards}
        self._num_rows = sizes.pop() if len(sizes) == 1 else None
        self._is_direct = tf.executing_eagerly()
        self._traced: tf.types.experimental.ConcreteFunction | None = None
        self._masked: list[int] = []  # Which of what is returned have masks.
        self._links: list[set] = []  # By what is returned.

    def __call__(self, tensors: Sequence[Any], shard: Shard) -> list[Any]:
        """Returns what the function returns of a micro-batch's tensors.

        Args:
            tensors: With the batch axis 0, of the same types for each micro-batch.
            shard: Which rows they are.
        """
        if self._traced is None and not self._is_direct:
            try:
                self._trace(tensors, shard)
            except _ReadTwice:
                self._is_direct = True
        if self._is_direct:
            return self._function(list(tensors), shard)
        found = list(self._traced(*_told(shard), *_with_masks(tensors)))
        masks = found[len(found) - len(self._masked) :]
        found = found[: len(found) - len(self._masked)]
        for place, mask in zip(self._masked, masks, strict=True):
            found[place]._keras_mask = mask
        return found

    def reaches(self, places: Sequence[int], source: Any) -> bool:
        """Whether a gradient of some of what is returned may reach a source.

        TensorFlow hands zeros to what only other results depend on, where a tape says None.

        Args:
            places: Which of what is returned.
            source: The place of an argument, or a variable.
        """
        if self._is_direct:
            return True
        key = source if isinstance(source, int) else id(source.handle)
        return any(key in self._links[place] for place in places)

    def _trace(self, tensors, shard):
        given = [*_told(shard), *_with_masks(tensors)]

        def body(*arguments):
            _stand_for(arguments, given)
            here = _without_masks(arguments[3:], tensors)
            found = self._function(here, self._own_shard(shard, arguments[:3]))
            found = [_as_tensor(each) for each in found]
            graph = tf.compat.v1.get_default_graph()
            if _is_read_twice(graph):
                raise _ReadTwice
            self._links = [_reached(graph, each, here) for each in found]
            masks = [getattr(each, "_keras_mask", None) for each in found]
            self._masked = [place for place, mask in enumerate(masks) if mask is not None]
            return [*found, *(mask for mask in masks if mask is not None)]

        # Not inlined: else every device's part of the step has all operations M times.
        function = tf.function(
            body, autograph=False, experimental_attributes={"_noinline": True}
        )
        sizes = {n for n in (shard.num_rows, shard.num_rows_used) if isinstance(n, int)}
        self._traced = function.get_concrete_function(*(_type_of(each, sizes) for each in given))

    def _own_shard(self, shard, told) -> Shard:
        index, start, num_rows = told
        num_rows = num_rows if self._num_rows is None else self._num_rows
        return shard._replace(replica=index, start=start, num_rows=num_rows)


def _told(shard: Shard) -> list[tf.Tensor]:
    numbers = (shard.replica, shard.start, shard.num_rows)
    return [tf.convert_to_tensor(number, tf.int32) for number in numbers]


def _with_masks(tensors) -> list:
    """All that is there, and the masks behind it."""
    there = [tensor for tensor in tensors if tensor is not None]
    masks = [getattr(tensor, "_keras_mask", None) for tensor in there]
    return [*there, *(mask for mask in masks if mask is not None)]


def _without_masks(arguments, like) -> list:
    """The other way round, with the tensors that were not there."""
    number = sum(tensor is not None for tensor in like)
    there, masks = iter(arguments[:number]), iter(arguments[number:])
    found = []
    for original in like:
        found.append(None if original is None else next(there))
        if getattr(original, "_keras_mask", None) is not None:
            found[-1]._keras_mask = next(masks)
    return found


def _stand_for(arguments, given) -> None:
    """Lets a search for what a tensor was made of go on outside."""
    inside = tf.nest.flatten(arguments, expand_composites=True)
    outside = tf.nest.flatten(given, expand_composites=True)
    for placeholder, tensor in zip(inside, outside, strict=True):
        provenance.stand_for(placeholder, tensor)


def _as_tensor(found):
    """A layer may return a weight."""
    is_weight = isinstance(found, keras.Variable | tf.Variable)
    return tf.convert_to_tensor(found) if is_weight else found


def _type_of(tensor, sizes: set[int]) -> tf.TypeSpec:
    """A tensor's type; of rows, with any number of them: other micro-batches have others."""
    spec = tf.type_spec_from_value(tensor)
    shape = spec.shape
    if shape.rank and shape[0] in sizes:
        shape = [None, *shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank)
    return type(spec)(shape, spec.dtype)


def _is_read_twice(graph: tf.Graph) -> bool:
    """Whether a weight is looked up in several places, or in one and in a function besides."""
    seen = set()
    for operation in graph.get_operations():
        if "Gather" in operation.type:
            read = [operation.inputs[0]]
        elif operation.type in _READS:
            continue
        else:
            read = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
        for tensor in read:
            while tensor.op.type in _HANDED_ON:
                tensor = tensor.op.inputs[0]
            if tensor.dtype == tf.resource:
                if tensor.name in seen:
                    return True
                seen.add(tensor.name)
    return False


def _reached(graph, found, arguments) -> set:
    """The places of the arguments, and the ids of the variables' handles, behind a tensor."""
    if found is None:
        return set()
    known = {}
    for place, argument in enumerate(arguments):
        parts = tf.nest.flatten(argument, expand_composites=True)
        known |= {part.name: place for part in parts if part is not None}
    known |= {inside.name: id(outside) for outside, inside in graph.captures}
    return {known[tensor.name] for tensor in _behind(found) if tensor.name in known}


def _behind(found) -> Iterator[tf.Tensor]:
    """The placeholders from which a gradient's way leads to a tensor."""
    waiting, seen = tf.nest.flatten(found, expand_composites=True), set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.op.type in ("StopGradient", "PreventGradient"):
            continue
        seen.add(tensor.name)
        if tensor.op.type == "Placeholder":
            yield tensor
        waiting.extend(
            each
            for each in tensor.op.inputs
            if each.dtype.is_floating or each.dtype in (tf.resource, tf.variant)
        )
