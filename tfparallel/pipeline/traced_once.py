"""A function of a micro-batch, traced with the first and called for all.

M micro-batches pass through the same layers. Traced for each, a step has M times the operations:
with 10.8 M parameters and M = 8 that took half a minute and a gigabyte before anything was trained.
Here it is a function of its own, forward and, by TensorFlow, backward, that the step calls M times.

What a micro-batch is told beside its tensors are arguments too: which rows it has, and its index.
What is the same for all of a step (Keras's seeds, divisors) is made outside, and captured.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.data import provenance
from tfparallel.data.rows_of_replica import Shard
from tfparallel.pipeline.as_function import computes_the_same
from tfparallel.placement.layer_devices import PlacementError
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.seams.tensorflow import InaccessibleTensorError

__all__ = ["MustTraceEach", "TracedOnce"]


class MustTraceEach(Exception):
    """A step was traced whose micro-batches must be traced one by one."""


class _NoFunction(Exception):
    """What was traced computes something else in a function of its own."""


class TracedOnce:
    """Such a function, while a step is traced; in an eager step it is called as it is.

    TensorFlow's gradient of a function takes zeros for the gradient of whatever the function
    returns, where a tape knows that there is none: weights that nothing else depends on would have
    zeros, too, and 0 · ∞ is no number. So of what is returned all that is no target is cut off
    from its gradient, and for each target there must be one.

    Args:
        function: Takes tensors, of which any may be None, and the micro-batch's rows. Returns
            tensors, and the places among them of targets: of what a gradient comes back. The mask
            that Keras keeps beside a tensor goes in and out with it.
        shards: The rows of all micro-batches.
        weights: Variables that are trained.
        each: Whether to trace each micro-batch all the same.

    Attributes:
        targets: The places of floating-point tensors for which a gradient must come; none where
            each micro-batch is traced.
    """

    def __init__(
        self,
        function: Callable[[list[Any], Shard], tuple[list[Any], Collection[int]]],
        shards: Sequence[Shard],
        weights: Iterable[tf.Variable] = (),
        *,
        each: bool = False,
    ):
        self.targets: frozenset[int] = frozenset()
        self._function = function
        # Known, and the same for all: then a layer knows that no micro-batch is without rows.
        sizes = {s.num_rows if isinstance(s.num_rows, int) else None for s in shards}
        self._num_rows = sizes.pop() if len(sizes) == 1 else None
        self._handles = {id(weight.handle) for weight in weights}
        self._is_direct = each or tf.executing_eagerly()
        self._traced: tf.types.experimental.ConcreteFunction | None = None
        self._types: list[tf.TypeSpec] = []
        self._masked: list[int] = []  # Which of what is returned have masks.

    def __call__(self, tensors: Sequence[Any], shard: Shard) -> list[Any]:
        """Returns what the function returns of a micro-batch's tensors.

        Args:
            tensors: A micro-batch's.
            shard: Which rows they are of.

        Raises:
            MustTraceEach: If their types are not those of the first micro-batch's.
            ValueError: If it reads a tensor of another function.
        """
        if self._traced is None and not self._is_direct:
            try:
                self._trace(tensors, shard)
            except _NoFunction:
                self._is_direct = True
        if self._is_direct:
            found, _ = self._function(list(tensors), shard)
            return found
        given = [*_told(shard), *_with_masks(tensors)]
        if not all(t.is_compatible_with(each) for t, each in zip(self._types, given, strict=True)):
            raise MustTraceEach
        try:
            found = list(self._traced(*given))
        except InaccessibleTensorError as error:
            raise PlacementError(
                "A layer keeps a tensor, and another stage reads it, or the loss does. A tensor "
                "must go to where it is read through the model's graph, which is cut into stages: "
                "as an output of one layer and an input of the other. Received: "
                f"{str(error).partition(' is out of scope')[0]}."
            ) from error
        masks = found[len(found) - len(self._masked) :]
        found = found[: len(found) - len(self._masked)]
        for place, mask in zip(self._masked, masks, strict=True):
            set_mask(found[place], mask)
        return found

    def _trace(self, tensors, shard):
        given = [*_told(shard), *_with_masks(tensors)]

        def body(*arguments):
            _stand_for(arguments, given)
            here = _without_masks(arguments[3:], tensors)
            found, targets = self._function(here, self._own_shard(shard, arguments[:3]))
            graph = tf.compat.v1.get_default_graph()
            weights = [here for there, here in graph.captures if id(there) in self._handles]
            if not computes_the_same(graph, weights):
                raise _NoFunction
            masks = [mask_of(each) for each in found]
            self._masked = [place for place, mask in enumerate(masks) if mask is not None]
            found = [_as_tensor(each) for each in found]
            self.targets = frozenset(p for p in targets if is_differentiable(found[p]))
            found = [
                each if place in self.targets or each is None else _without_gradient(each)
                for place, each in enumerate(found)
            ]
            return [*found, *(_as_tensor(mask) for mask in masks if mask is not None)]

        # Not inlined: else every device's part of the step has all operations M times.
        attributes = {"_noinline": True}
        function = tf.function(body, autograph=False, experimental_attributes=attributes)
        self._types = [*map(_type_of, given)]
        self._traced = function.get_concrete_function(*self._types)

    def _own_shard(self, shard, told) -> Shard:
        index, start, num_rows = told
        num_rows = num_rows if self._num_rows is None else self._num_rows
        return shard._replace(replica=index, start=start, num_rows=num_rows)


def _told(shard: Shard) -> list[tf.Tensor]:
    numbers = (shard.replica, shard.start, shard.num_rows)
    tensors = [tf.convert_to_tensor(number, tf.int32) for number in numbers]
    if tf.executing_eagerly():
        return tensors
    # Of a function that is called with constants TensorFlow makes another for each call.
    return [tf.compat.v1.placeholder_with_default(each, each.shape) for each in tensors]


def _with_masks(tensors) -> list:
    """All that is there, and the masks behind it."""
    there = [tensor for tensor in tensors if tensor is not None]
    masks = [mask_of(tensor) for tensor in there]
    return [*there, *(mask for mask in masks if mask is not None)]


def _without_masks(arguments, like) -> list:
    """The other way round, with the tensors that were not there."""
    number = sum(tensor is not None for tensor in like)
    there, masks = iter(arguments[:number]), iter(arguments[number:])
    found = []
    for original in like:
        found.append(None if original is None else next(there))
        if mask_of(original) is not None:
            set_mask(found[-1], next(masks))
    return found


def _stand_for(arguments, given) -> None:
    """Lets a search for what a tensor was made of go on outside."""
    inside = tf.nest.flatten(arguments, expand_composites=True)
    outside = tf.nest.flatten(given, expand_composites=True)
    for placeholder, tensor in zip(inside, outside, strict=True):
        provenance.stand_for(placeholder, tensor)


def _as_tensor(found):
    """A layer may return a weight, or an array."""
    if found is None or isinstance(found, tf.__internal__.CompositeTensor):
        return found
    return found if tf.is_symbolic_tensor(found) else tf.identity(tf.convert_to_tensor(found))


def _without_gradient(found):
    return tf.nest.map_structure(
        lambda part: tf.stop_gradient(part) if is_differentiable(part) else part,
        found,
        expand_composites=True,
    )


def _type_of(tensor) -> tf.TypeSpec:
    """A tensor's type; of a sparse or ragged one, which are rows, with any number of them."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
