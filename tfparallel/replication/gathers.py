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

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
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
from tfparallel.variables.sharded import ShardedVariable, joined_rows

__all__ = ["Gathers"]

_AT_ONCE = 2  # How many whole weights there may be.


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
        self._graph: tf.Graph | None = None  # Where replicas meet.

    def begin(self) -> None:
        """Tells that a replica's call begins here."""
        self._graph = tf.compat.v1.get_default_graph()

    def begin_backward(self) -> None:
        """Tells the readers of the forward pass, that are there by now, from those to come."""
        self._is_backward = True
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
        if is_differentiable(result):
            record_operation(
                f"gather of {variable.path}",
                [result],
                [own],
                lambda upstream: [self._scattered(variable, whole, upstream)],
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

    def _scattered(self, variable, whole: _Whole | None, upstream):
        """Sums a gradient over all replicas; each gets its share."""
        if isinstance(upstream, tf.IndexedSlices):
            raise ValueError(
                "Under shard='parameters' weights have dense gradients, but for those of Embedding "
                f"layers, which stay whole. Received: '{variable.path}', of which a batch reads "
                "single rows (a sparse input, `tf.gather`). Take shard='optimizer'."
            )

        def scatter(_, own, upstream):
            if whole is not None and self._is_backward:
                self._gather_again(variable, whole, own)
            return _by_replica(self._summed(variable, upstream, whole))

        upstream.set_shape(variable.shape)  # TensorFlow does not know that of every gradient.
        own = tf.convert_to_tensor(storage_of(variable.share))
        with not_recording():
            own_sum = _merge(scatter, tf.identity(own), tf.identity(upstream))
        self._sums[id(own_sum)] = own_sum
        self._summed_variables.add(id(variable))
        return own_sum

    def check(self, variable: ShardedVariable, gradient: tf.Tensor | None) -> None:
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
        left = [gradient]
        while left:
            term = left.pop()
            if id(term) in self._sums:
                continue
            if term.op.type not in ("AddN", "AddV2", "Identity"):
                return False
            left += term.op.inputs
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

    def _summed(self, variable, upstream, whole: _Whole | None) -> list[tf.Tensor]:
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
                    sums.append(tf.add_n(own))
        else:
            with tf.device(terms[0].device):
                total = tf.add_n(terms) if terms[1:] else terms[0]
                (own,) = strategy.workers.reduce_scatter([total])
                sums = tf.split(own, len(terms))
        if whole is not None:
            (whole.again or whole).sums = [own.op for own in sums]
            self._met.add(sums[0].op.name)
        return sums


def _merge(function, *given):
    return tf.distribute.get_replica_context().merge_call(function, args=given)


def _by_replica(tensors: Sequence[tf.Tensor]):
    return regroup(tensors, PerReplica)
