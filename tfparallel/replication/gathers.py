"""Joins the shares of a weight for as long as a layer reads it, forward and again backward.

    replica 0   θ₀ ─┐ gather ┌─ θ ─ dense ─ … ─ ∂dense ─ ∂θ⁰ ─┐ reduce-  ┌─ (∂θ⁰ + ∂θ¹)₀
    replica 1   θ₁ ─┘        └─ θ ─ dense ─ … ─ ∂dense ─ ∂θ¹ ─┘ scatter  └─ (∂θ⁰ + ∂θ¹)₁

What reads a weight in the backward pass is given a second gather of it, which waits for the
gradient that comes to the layer, so nobody keeps the whole between the two. A gather also waits for
what frees the one before the last: of whole weights, and of whole gradients, there are two at a
time, of which one is computed with and one arrives.

This is stage 3 of ZeRO (Rajbhandari et al., SC 2020, arXiv:1910.02054), as in Zhao et al., "PyTorch
FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, arXiv:2304.11277.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.collectives.reducer import Reducer
from tfparallel.problems import PlacementError
from tfparallel.seams.distribute import PerReplica, regroup
from tfparallel.seams.keras import storage_of
from tfparallel.seams.tensorflow import (
    not_recording,
    record_operation,
    set_input,
    waiting_for,
)
from tfparallel.tracing.graphs import is_in_function
from tfparallel.variables.sharded import (
    ShardedVariable,
    joined_rows,
    rows_of_share,
    shape_shared_out,
)

__all__ = ["Gathers"]

_AT_ONCE = 2  # How many whole weights there may be.

# By which operations a tape adds gradients, and which of their inputs are terms.
_ALL = slice(None)
_TERMS_OF = {"AddN": _ALL, "AddV2": _ALL, "Identity": _ALL}
_TERMS_OF |= {"ConcatV2": slice(-1), "UnsortedSegmentSum": slice(1)}  # Those of rows.


class _Whole:
    """A gathered weight.

    Attributes:
        tensors: Of each replica here.
        readers: By replica, the names of the operations that read it in the forward pass.
        sums: Of each replica here, what takes its share of the gradient; None before.
        again: The same, gathered again.
    """

    def __init__(self, tensors: list[tf.Tensor]):
        self.tensors = tensors
        self.readers: list[set[str]] = [set()] * len(tensors)
        self.sums: list[tf.Operation] | None = None
        self.again: _Whole | None = None

    def freed_by(self, k: int) -> list[tf.Operation]:
        """What uses the memory of replica k's, as far as is known by now."""
        return [*self.tensors[k].consumers(), *([] if self.sums is None else [self.sums[k]])]


class Gathers:
    """The gathers of one replicated call.

    Args:
        strategy: Whose replicas they are.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._made: list[_Whole] = []
        self._sums: dict[int, tf.Tensor] = {}  # What gradients of shares are made of, by id,
        self._summed_variables: set[int] = set()  # and of which variables.
        self._met: set[str] = set()  # The names of what comes of a gather, or of a sum.
        self._is_backward = False
        self._kinds_of: Callable[[ShardedVariable, int], Sequence | None] = lambda *_: None
        self._num_read: collections.Counter[tuple[str, int]] = collections.Counter()
        self._graph: tf.Graph | None = None  # Where replicas meet.

    def begin(self) -> None:
        """Tells that a replica's call begins here."""
        self._graph = tf.compat.v1.get_default_graph()

    def begin_backward(
        self, kinds_of: Callable[[ShardedVariable, int], Sequence | None]
    ) -> None:
        """Tells the readers of the forward pass, that are there by now, from those to come.

        Args:
            kinds_of: Says how the rows are joined that were read the n-th time that a variable was
                read, as `Reducer.slices` asks.
        """
        self._is_backward, self._kinds_of = True, kinds_of
        for whole in self._made:
            whole.readers = [{op.name for op in t.consumers()} for t in whole.tensors]

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """The whole value of a variable, in the type in which the layer computes."""
        dtype = tf.as_dtype(keras.backend.standardize_dtype(variable.dtype))
        with self._outside_of_loops(variable):
            return self._read(variable, dtype)

    @contextlib.contextmanager
    def _outside_of_loops(self, variable) -> Iterator[None]:
        """Where a replica meets others, though a layer reads a weight in a loop or a branch."""
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or graph is self._graph:
            yield
            return
        if is_in_function(graph, self._graph):
            raise PlacementError(
                "Under shard='parameters' replicas meet where a layer reads a weight. Weights that "
                f"are read outside of functions are required. Received: '{variable.path}', read in "
                "a `tf.function` of the layer's. Leave its decorator out: the step is one."
            )
        with self._graph.as_default():
            yield

    def _read(self, variable, dtype) -> tf.Tensor:
        own = tf.convert_to_tensor(storage_of(variable.share))
        with not_recording():
            kept = {}

            def gather(_, own):
                kept["whole"] = whole = self._gathered(variable, own, dtype)
                return _by_replica(whole.tensors)

            result = _merge(gather, tf.identity(own))
            whole = kept["whole"] if tf.is_symbolic_tensor(result) else None
            if whole is not None:
                whole.tensors[0] = result
        key = own.device, id(variable)
        reading = self._num_read[key]
        self._num_read[key] += 1
        if is_differentiable(result):
            record_operation(
                f"gather of {variable.path}",
                [result],
                [own],
                lambda upstream: [self._scattered(variable, whole, upstream, reading)],
            )
        return result

    def _gathered(self, variable, own, dtype, after: Sequence[Iterable] = ()) -> _Whole:
        """Joins the shares that all replicas have, outside of them.

        Args:
            variable: The sharded variable.
            own: What each replica here has of it.
            dtype: The type that is wanted.
            after: For each replica here what the gather waits for.
        """
        strategy = self._strategy
        shares = [tf.cast(share, dtype) for share in strategy.experimental_local_results(own)]
        waits = [list(after[k]) if after else [] for k in range(len(strategy.devices))]
        if not tf.executing_eagerly() and len(self._made) >= _AT_ONCE:
            for k, wait in enumerate(waits):
                wait += self._made[-_AT_ONCE].freed_by(k)
        tensors = []
        if strategy.workers is None:
            for device, wait in zip(strategy.devices, waits, strict=True):
                with tf.device(device), tf.control_dependencies(wait):
                    tensors += joined_rows([shares], [variable], variable.places)
        else:
            with tf.control_dependencies([op for wait in waits for op in wait]):
                (found,) = joined_rows([shares], [variable], variable.places)
            for device in strategy.devices:
                with tf.device(device):
                    tensors.append(tf.identity(found))
        whole = _Whole(tensors)
        if not tf.executing_eagerly():
            self._made.append(whole)
            self._met.add(tensors[0].op.name)
        return whole

    def _scattered(self, variable, whole: _Whole | None, upstream, reading: int):
        """Sums a gradient over all replicas; each gets its share.

        Of a weight that is not trained there is none: the tape asks whatever a replica has read.
        """
        own = tf.convert_to_tensor(storage_of(variable.share))
        if not variable.trainable:
            if whole is not None and self._is_backward:

                def again(_, own):
                    self._gather_again(variable, whole, own)

                with not_recording():
                    _merge(again, tf.identity(own))
            return None
        is_sparse = isinstance(upstream, tf.IndexedSlices)
        if is_sparse:
            given = [upstream.values, upstream.indices]
        else:
            upstream.set_shape(variable.shape)  # TensorFlow does not know that of every gradient.
            given = [upstream]

        def scatter(_, own, *given):
            if whole is not None and self._is_backward:
                self._gather_again(variable, whole, own)
            if is_sparse:
                sums = self._summed_rows(variable, *given, self._kinds_of(variable, reading))
            else:
                sums = self._summed(variable, *given)
            if whole is not None:
                (whole.again or whole).sums = [own[0].op for own in sums]
                self._met.add(sums[0][0].op.name)
            return tuple(map(_by_replica, zip(*sums, strict=True)))

        with not_recording():
            first, *rest = _merge(scatter, tf.identity(own), *map(tf.identity, given))
        self._sums[id(first)] = first
        self._summed_variables.add(id(variable))
        if not is_sparse:
            return first
        return tf.IndexedSlices(first, rest[0], tf.constant(list(own.shape), rest[0].dtype))

    def check(
        self, variable: ShardedVariable, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> None:
        """Raises unless the gradient of a share is made of sums over all replicas alone."""
        if gradient is not None and not self._is_of_sums(variable, gradient):
            raise PlacementError(
                "Under shard='parameters' a share's gradient is summed where its weight was read. "
                "A weight that is an argument of the function is required. Received: "
                f"'{variable.path}', read within a function under `tf.custom_gradient` or "
                "`keras.remat`, which TensorFlow gives the share alone. Take shard='optimizer', or "
                "hand the function the weight's value."
            )

    def _is_of_sums(self, variable, gradient) -> bool:
        if tf.executing_eagerly():  # What it is made of is not known; but whether there is any.
            return id(variable) in self._summed_variables
        left = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]
        while left:
            term = left.pop()
            if id(term) in self._sums:
                continue
            if term.op.type not in _TERMS_OF:
                return False
            left += list(term.op.inputs)[_TERMS_OF[term.op.type]]
        return True

    def _gather_again(self, variable, whole: _Whole, shares) -> None:
        """Gives the readers of the backward pass a gather of their own.

        Unless that would have to wait for them: then the whole is kept from the forward pass on.
        """
        readers = [
            [op for op in tensor.consumers() if op.name not in before]
            for tensor, before in zip(whole.tensors, whole.readers, strict=True)
        ]
        pairs = list(zip(readers, whole.tensors, strict=True))
        after = [
            {given.op for op in own for given in op.inputs if given is not tensor}
            for own, tensor in pairs
        ]
        if not readers[0] or self._would_wait_for_itself(readers[0], after[0]):
            return
        again = self._gathered(variable, shares, whole.tensors[0].dtype, after)
        for (own, tensor), fresh in zip(pairs, again.tensors, strict=True):
            for op in own:
                for index, given in enumerate(op.inputs):
                    if given is tensor:
                        set_input(op, index, fresh)
        whole.again = again

    def _would_wait_for_itself(self, readers, after) -> bool:
        """Whether what a gather waits for, or a collective before it, waits for its readers."""
        waited_for = self._met | {op.name for op in after}
        if len(self._made) >= _AT_ONCE:
            waited_for |= {op.name for op in self._made[-_AT_ONCE].freed_by(0)}
        reached, to_look_at = {op.name for op in readers}, list(readers)
        while to_look_at:
            op = to_look_at.pop()
            if op.name in waited_for:
                return True
            behind = [reader for out in op.outputs for reader in out.consumers()]
            for other in (*behind, *waiting_for(op)):
                if other.name not in reached:
                    reached.add(other.name)
                    to_look_at.append(other)
        return False

    def _summed(self, variable, upstream) -> list[tuple[tf.Tensor]]:
        """The share of each replica here of the sum over all."""
        strategy, places = self._strategy, variable.places
        size, *rest = variable.share.shape
        terms = []
        for term in strategy.experimental_local_results(upstream):
            with tf.device(term.device):
                flat = tf.reshape(tf.cast(term, variable.share.value.dtype), [-1, *rest])
                missing = places.number * size - flat.shape[0]
                pads = [[0, missing]] + [[0, 0]] * len(rest)
                terms.append(tf.pad(flat, pads) if missing else flat)
        if strategy.workers is None:
            cut = []
            for term in terms:
                with tf.device(term.device):
                    cut.append(tf.split(term, len(terms)))
            sums = []
            for device, own in zip(strategy.devices, zip(*cut, strict=True), strict=True):
                with tf.device(device):
                    sums.append((tf.add_n(own),))
            return sums
        with tf.device(terms[0].device):
            total = tf.add_n(terms) if terms[1:] else terms[0]
            (own,) = strategy.workers.reduce_scatter([total])
            return [(each,) for each in tf.split(own, len(terms))]

    def _summed_rows(self, variable, values, indices, kinds) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Of a table of which a batch reads rows: what each replica here has of all readings."""
        strategy, places, terms = self._strategy, variable.places, []
        shape = shape_shared_out(variable.shape)
        of_replicas = map(strategy.experimental_local_results, (values, indices))
        for own, rows in zip(*of_replicas, strict=True):
            with tf.device(own.device):
                own = tf.cast(own, variable.share.value.dtype)
                terms.append(tf.IndexedSlices(own, rows, tf.constant(shape, rows.dtype)))
        reducer = Reducer(strategy.all_reduce_ops, strategy.workers)
        total = reducer.slices([terms], kinds)
        sums = []
        for device, bounds in zip(
            strategy.devices, places.bounds(variable.share.shape[0]), strict=True
        ):
            with tf.device(device):
                own = rows_of_share(total, shape, *bounds)
                sums.append((own.values, own.indices))
        return sums


def _merge(function, *given):
    return tf.distribute.get_replica_context().merge_call(function, args=given)


def _by_replica(tensors: Sequence[tf.Tensor]):
    return regroup(tensors, PerReplica)
