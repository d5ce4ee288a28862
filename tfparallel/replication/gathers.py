"""Gathers the shares of a weight while a layer reads it, in the forward and the backward pass.

    replica 0   θ₀ ─┐ gather ┌─ θ ─ dense ─ … ─ ∂dense ─ ∂θ⁰ ─┐ reduce-  ┌─ (∂θ⁰ + ∂θ¹)₀
    replica 1   θ₁ ─┘        └─ θ ─ dense ─ … ─ ∂dense ─ ∂θ¹ ─┘ scatter  └─ (∂θ⁰ + ∂θ¹)₁

Operations that read a weight in the backward pass use a second gather, which waits for the gradient
of the layer's output, so the whole weight is freed between the two. A gather also waits until the
one before the last is freed: at most two whole weights, and two whole gradients, exist at a time,
one in use and one arriving.

This is stage 3 of ZeRO (Rajbhandari et al., SC 2020, arXiv:1910.02054), as in Zhao et al., "PyTorch
FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, arXiv:2304.11277.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.collectives.reducer import Reducer
from tfparallel.piece import current
from tfparallel.problems import PlacementError
from tfparallel.replication.dummy_rows import zeros_without_rows
from tfparallel.seams.distribute import PerReplica, regroup
from tfparallel.seams.keras import storage_of
from tfparallel.seams.tensorflow import (
    not_recording,
    record_operation,
    set_input,
    waiting_for,
)
from tfparallel.tracing.custom_gradient import is_differentiable
from tfparallel.tracing.graphs import is_in_function
from tfparallel.tracing.static_shapes import concatenated, reshaped, split
from tfparallel.variables.sharded import (
    ShardedVariable,
    joined_rows,
    of_shape,
    rows_of_share,
    shape_shared_out,
)

_AT_ONCE = 2  # The most whole weights at a time.

# The operations by which a tape adds gradients, and which of their inputs are terms.
_ALL = slice(None)
_TERMS_OF = {"AddN": _ALL, "AddV2": _ALL, "Identity": _ALL}
_TERMS_OF |= {"ConcatV2": slice(-1), "UnsortedSegmentSum": slice(1)}  # Of sparse gradients.


class _Whole:
    """A gathered weight.

    Attributes:
        tensors: The whole weight on each local replica.
        readers: By replica, the names of the operations that read it in the forward pass.
        sums: For each local replica, the operation that takes its share of the gradient; None
            before the backward pass.
        second: The second gather of the same weight.
    """

    def __init__(self, tensors: list[tf.Tensor]):
        self.tensors = tensors
        self.readers: list[set[str]] = [set()] * len(tensors)
        self.sums: list[tf.Operation] | None = None
        self.second: _Whole | None = None

    def freed_by(self, k: int) -> list[tf.Operation]:
        """The operations so far that use replica k's tensor; its memory is free after them."""
        return [*self.tensors[k].consumers(), *([] if self.sums is None else [self.sums[k]])]


class Gathers:
    """The gathers of one replicated call.

    Args:
        exchange: Passes tensors of all local replicas, each in a list, to a function that returns a
            tuple for each; returns this replica's.
    """

    _sums_rows = True  # Whether to sum sparse gradients, too.

    def __init__(self, exchange: Callable[..., tuple]):
        self._exchange = exchange
        # By device of the first replica, where they take turns; and those not yet looked at.
        self._gathered_weights: dict[str, list[_Whole]] = collections.defaultdict(list)
        self._new: list[_Whole] = []
        self._sums: dict[int, tf.Tensor] = {}  # The terms of the shares' gradients, by id,
        self._summed_variables: set[int] = set()  # and the ids of their variables.
        self._names_of_exchanges: set[str] = set()  # Of the results of gathers and of sums.
        self._is_backward = False
        self._kinds_of: Callable[[ShardedVariable, int], Sequence | None] = lambda *_: None
        self._num_read: collections.Counter[tuple[str, int]] = collections.Counter()
        self._graph: tf.Graph | None = None  # Where replicas exchange.

    def begin(self) -> None:
        """Marks the start of a replica's call."""
        self._graph = tf.compat.v1.get_default_graph()

    def begin_backward(
        self, kinds_of: Callable[[ShardedVariable, int], Sequence | None]
    ) -> None:
        """Records the readers of the forward pass, to tell them from those of the backward pass.

        Args:
            kinds_of: Says, for the n-th reading of a variable, how to join its rows, as for
                `Reducer.slices`.
        """
        self._is_backward, self._kinds_of = True, kinds_of
        for whole in self._new:
            whole.readers = [{op.name for op in t.consumers()} for t in whole.tensors]
        self._new.clear()

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """The whole value of a variable, in the compute dtype of the layer."""
        dtype = tf.as_dtype(keras.backend.standardize_dtype(variable.dtype))
        with self._outside_of_loops(variable):
            return self._read(variable, dtype)

    @contextlib.contextmanager
    def _outside_of_loops(self, variable) -> Iterator[None]:
        """Enters the replica's graph if a layer reads a weight in a loop or a branch."""
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or graph is self._graph:
            yield
            return
        if is_in_function(graph, self._graph):
            raise PlacementError(
                "Under shard='parameters', a weight is gathered where a layer reads it, which must "
                f"not be inside a nested `tf.function`. Received: '{variable.path}', read in a "
                "`tf.function` of the layer. Remove the decorator; the whole step is already a "
                "`tf.function`."
            )
        with self._graph.as_default():
            yield

    def _read(self, variable, dtype) -> tf.Tensor:
        share = tf.convert_to_tensor(storage_of(variable.share))
        with not_recording():
            result, whole = self._joined(variable, share, dtype)
        key = share.device, id(variable)
        reading = self._num_read[key]
        self._num_read[key] += 1
        if is_differentiable(result):
            record_operation(
                f"gather of {variable.path}",
                [result],
                [share],
                lambda upstream: [self._scattered(variable, whole, upstream, reading)],
            )
        return result

    def _joined(self, variable, share, dtype) -> tuple[tf.Tensor, _Whole | None]:
        """The value of a variable in this replica; in a graph, with its gather."""
        weights = {}

        def gather(shares):
            weights["whole"] = whole = self._gathered(variable, shares, dtype)
            return [(tensor,) for tensor in whole.tensors]

        (result,) = self._exchange(gather, tf.identity(share))
        if not tf.is_symbolic_tensor(result):  # Another replica's thread may have gathered.
            return result, None
        whole = weights["whole"]
        whole.tensors[0] = result
        self._new.append(whole)
        return result, whole

    def _gathered(self, variable, shares, dtype, after: Sequence[Iterable] = ()) -> _Whole:
        """Joins the shares of all replicas, outside of them.

        Args:
            variable: The sharded variable.
            shares: The share of each local replica, on the device of the reader.
            dtype: The dtype of the result.
            after: For each local replica, the operations that the gather waits for.
        """
        devices = [share.device for share in shares]
        waits = [list(after[k]) if after else [] for k in range(len(shares))]
        before = self._before(devices[0])
        for k, wait in enumerate(waits):
            wait += [] if before is None else before.freed_by(k)
        casts = []
        for share in shares:
            with tf.device(share.device):
                casts.append(tf.cast(share, dtype))
        tensors = []
        if variable.places.workers is None:
            for device, wait in zip(devices, waits, strict=True):
                with tf.device(device), tf.control_dependencies(wait):
                    tensors.append(of_shape(concatenated(casts, 0), variable.shape))
        else:
            with tf.control_dependencies([op for wait in waits for op in wait]):
                (joined,) = joined_rows([casts], [variable], variable.places)
            for device in devices:
                with tf.device(device):
                    tensors.append(tf.identity(joined))
        whole = _Whole(tensors)
        if not tf.executing_eagerly():
            self._gathered_weights[devices[0]].append(whole)
            self._names_of_exchanges.add(tensors[0].op.name)
        return whole

    def _before(self, device: str) -> _Whole | None:
        """The weight that must be freed before a device of the first replica gathers another."""
        weights = [] if tf.executing_eagerly() else self._gathered_weights[device]
        return weights[-_AT_ONCE] if len(weights) >= _AT_ONCE else None

    def _scattered(self, variable, whole: _Whole | None, upstream, reading: int):
        """Sums a gradient over all replicas, and returns each replica's share.

        A frozen weight has no gradient, but its readers in the backward pass still get a gather.
        """
        is_sparse = isinstance(upstream, tf.IndexedSlices)
        is_left_out = not variable.trainable or (is_sparse and not self._sums_rows)
        if not is_left_out:
            (upstream,) = zeros_without_rows(current(), [upstream])
        if is_sparse:
            values = [upstream.values, upstream.indices]
        else:
            upstream.set_shape(variable.shape)  # TensorFlow does not know every gradient's shape.
            values = [upstream]

        def scatter(local_shares, *values):
            if whole is not None and self._is_backward:
                self._gather_again(variable, whole, local_shares)
            if is_left_out:
                return [(share,) for share in local_shares]
            if is_sparse:
                sums = self._summed_rows(variable, *values, self._kinds_of(variable, reading))
            else:
                sums = self._summed(variable, *values)
            if whole is not None:
                (whole.second or whole).sums = [tensors[0].op for tensors in sums]
                self._names_of_exchanges.add(sums[0][0].op.name)
            return sums

        local_share = tf.convert_to_tensor(storage_of(variable.share))
        with not_recording():
            same = map(tf.identity, values)
            first, *rest = self._exchange(scatter, tf.identity(local_share), *same)
        if is_left_out:
            return None
        self._sums[id(first)] = first
        self._summed_variables.add(id(variable))
        if not is_sparse:
            return first
        return tf.IndexedSlices(first, rest[0], tf.constant(list(local_share.shape), rest[0].dtype))

    def check(
        self, variable: ShardedVariable, gradient: tf.Tensor | tf.IndexedSlices | None
    ) -> None:
        """Raises unless the gradient of a share consists only of sums over all replicas."""
        if gradient is not None and not self._is_of_sums(variable, gradient):
            raise PlacementError(unsummed(variable))

    def _is_of_sums(self, variable, gradient) -> bool:
        if tf.executing_eagerly():  # The terms are unknown; only whether there was a sum.
            return id(variable) in self._summed_variables
        remaining = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]
        while remaining:
            term = remaining.pop()
            if id(term) in self._sums:
                continue
            if term.op.type not in _TERMS_OF:
                return False
            remaining += list(term.op.inputs)[_TERMS_OF[term.op.type]]
        return True

    def _gather_again(self, variable, whole: _Whole, shares) -> None:
        """Gives the readers of the backward pass a second gather.

        If that gather would have to wait for them, the weight stays whole from the forward pass on.
        """
        readers = [
            [op for op in tensor.consumers() if op.name not in before]
            for tensor, before in zip(whole.tensors, whole.readers, strict=True)
        ]
        pairs = list(zip(readers, whole.tensors, strict=True))
        after = [
            {value.op for op in ops for value in op.inputs if value is not tensor}
            for ops, tensor in pairs
        ]
        waited_for = self._names_of_exchanges | {op.name for op in after[0]}
        before = self._before(shares[0].device)
        waited_for |= set() if before is None else {op.name for op in before.freed_by(0)}
        if not readers[0] or _reach(readers[0], waited_for):
            return
        second = self._gathered(variable, shares, whole.tensors[0].dtype, after)
        for (ops, tensor), fresh in zip(pairs, second.tensors, strict=True):
            for op in ops:
                for index, value in enumerate(op.inputs):
                    if value is tensor:
                        set_input(op, index, fresh)
        whole.second = second

    def _summed(self, variable, upstream: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor]]:
        """The share of each local replica in the sum over all replicas."""
        places = variable.places
        size, *rest = variable.share.shape
        terms = []
        for term in upstream:
            with tf.device(term.device):
                flat = tf.cast(term, variable.share.value.dtype)
                flat = reshaped(flat, shape_shared_out(variable.shape))
                missing = places.number * size - flat.shape[0]
                pads = [[0, missing]] + [[0, 0]] * len(rest)
                terms.append(tf.pad(flat, pads) if missing else flat)
        if places.workers is None:
            splits = []
            for term in terms:
                with tf.device(term.device):
                    splits.append(tf.split(term, len(places)))
            sums = []
            for share, pieces in zip(variable.pieces, zip(*splits, strict=True), strict=True):
                with tf.device(share.device):
                    sums.append((tf.add_n(pieces),))
            return sums
        with tf.device(terms[0].device):
            total = tf.add_n(terms) if terms[1:] else terms[0]
            (pieces,) = places.workers.reduce_scatter([total])
            return [(each,) for each in split(pieces, len(places))]

    def _summed_rows(self, variable, values, indices, kinds) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """For a table that is read by rows: each local replica's part of all readings' sum."""
        places, terms = variable.places, []
        shape = shape_shared_out(variable.shape)
        for local_rows, rows in zip(values, indices, strict=True):
            with tf.device(local_rows.device):
                local_rows = tf.cast(local_rows, variable.share.value.dtype)
                terms.append(tf.IndexedSlices(local_rows, rows, tf.constant(shape, rows.dtype)))
        total = Reducer(places.all_reduce_ops, places.workers).slices([terms], kinds)
        sums, all_bounds = [], places.bounds(variable.share.shape[0])
        for share, bounds in zip(variable.pieces, all_bounds, strict=True):
            with tf.device(share.device):
                local_rows = rows_of_share(total, shape, *bounds)
                sums.append((local_rows.values, local_rows.indices))
        return sums


def _reach(readers: Sequence[tf.Operation], names: set[str]) -> bool:
    """Whether one of the operations with these names waits for the readers."""
    reached, to_look_at = {op.name for op in readers}, list(readers)
    while to_look_at:
        op = to_look_at.pop()
        if op.name in names:
            return True
        consumers = [reader for out in op.outputs for reader in out.consumers()]
        for other in (*consumers, *waiting_for(op)):
            if other.name not in reached:
                reached.add(other.name)
                to_look_at.append(other)
    return False


def unsummed(variable: ShardedVariable) -> str:
    """Says why a gradient of a share is no sum over the replicas."""
    return (
        "Under shard='parameters', gradients are reduced where a weight is read, so a "
        "function with a custom gradient must take the weight as an argument. Received: "
        f"'{variable.path}', read inside a function under `tf.custom_gradient` or "
        "`keras.remat`, to which TensorFlow passes only the shard. Use shard='optimizer', "
        "or pass the weight's value to the function."
    )


def between_replicas(function: Callable[..., Sequence[tuple]], *tensors: tf.Tensor) -> tuple:
    """The exchange of `Gathers` between the replicas of a strategy."""

    def merged(strategy, *values):
        results = function(*map(strategy.experimental_local_results, values))
        return tuple(regroup(each, PerReplica) for each in zip(*results, strict=True))

    return tf.distribute.get_replica_context().merge_call(merged, args=tensors)
