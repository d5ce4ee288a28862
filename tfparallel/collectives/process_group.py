"""Collectives between the workers of a job, all of which run the same program.

TensorFlow identifies a collective by an instance key, and binds each key to the first shape it
sees. Its own strategies feed a new key from Python for each call; a loop inside a `tf.function`
cannot do that (keras#19246), and each new key costs an exchange with the leader. Here all workers
run the same program, so the key is a function of the collective, the dtype and the shape. An
ordering token runs a worker's collectives one after the other, in program order, so a key is free
again by the time it recurs.

A number of rows that is known only when the step runs is rounded up to one of four sizes per
octave: this takes few keys, and padding is at most a quarter of the bytes.

TensorFlow ranks the members of a group by task name, as strings: 0, 1, 10, 2, … This module puts
results that are gathered or dealt out by rank back into worker order.

On GPU workers, floating-point tensors travel between the GPUs. Integers (counts, texts, values that
workers agree on) travel between the hosts over gRPC, and no GPU waits for them.
"""

import copy
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.differences import differences
from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.compression import Compression, assign_if_finite
from tfparallel.collectives.packing import (
    buckets,
    by_dtype,
    in_vectors,
    movable,
    num_pieces,
    restored,
    sendable,
    size_step,
    sum_in_order,
)
from tfparallel.collectives.traffic import ROWS, SUMS, Traffic
from tfparallel.flight.marks import around
from tfparallel.seams.tensorflow import all_gather_v2, all_reduce_v2, all_to_all_v2
from tfparallel.tracing import static_shapes

_FIRST_GROUP_KEY = 2**20  # Above those that TensorFlow's strategies count up from 1.
_MAX_SIGNATURES = 2**20  # A key is signature + _MAX_SIGNATURES · size step, in 32 bits.
_WIDENED = (tf.bfloat16,)  # Types that not every NCCL can sum.
_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min"}


class ProcessGroup:
    """Collectives between the workers of a job, one device each.

    Every worker must make the same calls in the same order. `transport` names what carries the
    tensors (see `tfparallel.collectives.transport`), `bucket_bytes` limits the size of one sum of
    gradients, `compression` shrinks gradients, and `traffic` counts the tensors sent.

    Args:
        num_workers: W, at least 2.
        worker_index: The index of this worker.
        device: Full name of this worker's participating device.
        timeout_seconds: How long a collective waits for the other workers; 0 means forever.
        first_host: Address of worker 0's host, reachable from the other workers.
    """

    of_process: "ProcessGroup | None" = None  # The group of this process's strategy.
    # The error that ended a transport of this package; TensorFlow preserves only its text.
    failure: Exception | None = None
    _num_groups = 0

    def __init__(
        self,
        num_workers: int,
        worker_index: int,
        device: str,
        timeout_seconds: float = 0.0,
        first_host: str = "127.0.0.1",
    ):
        self.num_workers = num_workers
        self.worker_index = worker_index
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.first_host = first_host
        # Device for control traffic: the host of a GPU, or the CPU itself.
        self._host = re.sub(r"GPU:\d+$", "CPU:0", device)
        self.transport = "ring_tuned"
        self.bucket_bytes: int | None = None
        self.compression: Compression | None = None
        self.traffic = Traffic()
        self._take_keys()
        self._ordering_tokens = {}
        for place in {device, self._host}:
            with tf.init_scope(), tf.device(place):
                self._ordering_tokens[place] = tf.Variable(0.0, trainable=False)
        self._worker_of_rank = self._rank_of_worker = list(range(num_workers))

    def learn_ranks(self) -> None:
        """Learns each worker's TensorFlow rank. All workers call it before other collectives."""
        local_index = tf.constant([self.worker_index], tf.int32)
        workers = self._collective("all_gather", local_index).numpy()
        self._worker_of_rank, self._rank_of_worker = workers.tolist(), workers.argsort().tolist()

    def _take_keys(self):
        # The key after this one is for collectives between the hosts.
        self._group_key = _FIRST_GROUP_KEY + 2 * ProcessGroup._num_groups
        ProcessGroup._num_groups += 1
        self._signatures: dict[tuple, int] = {}

    @property
    def implementation(self) -> str:
        """Name of the implementation that computes the sums."""
        if self.transport == "nccl":
            return "TensorFlow CollectiveReduceV2 (NCCL)"
        pieces = ", in pieces" if self.transport == "ring_tuned" else ""
        return f"TensorFlow CollectiveReduceV2 (RING{pieces})"

    @property
    def by_tensorflow(self) -> "ProcessGroup":
        """The same workers, connected by TensorFlow's own collectives."""
        return self

    def with_transport(self, name: str) -> "ProcessGroup":
        """Returns a second group of the same workers, on "ring", "ring_tuned" or "nccl"."""
        group = self._another()
        group.transport = name
        return group

    def of_members(self, members: Sequence[int], timeout_seconds: float) -> "ProcessGroup":
        """Returns a group of some of the workers, for calls from user code. All workers call it.

        Args:
            members: The indices of the workers, in ascending order.
            timeout_seconds: How long a collective waits for the other members.
        """
        group = self._another()  # On all workers: the keys of later groups must agree.
        group.for_users = group
        group.timeout_seconds, group.num_workers = timeout_seconds, len(members)
        group._worker_of_rank = group._rank_of_worker = list(range(len(members)))
        if len(members) > 1 and self.worker_index in members:
            group.worker_index = members.index(self.worker_index)
            group.learn_ranks()
        return group

    @functools.cached_property
    def for_users(self) -> "ProcessGroup":
        """A second group of the same workers, for calls from user code.

        It has its own keys: keys are numbered in order of first use, so a call that only some
        workers make must not shift the keys of the training step. It shares the ordering token, so
        that a `tf.function` with collectives of both groups runs them in the same order on all
        workers, as NCCL requires of communicators that share a device.
        """
        return self._another()

    def _another(self) -> "ProcessGroup":
        """Returns a group of the same workers, with keys of its own and the same tokens."""
        group = copy.copy(self)
        vars(group).pop("for_users", None)
        group._take_keys()
        return group

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over the workers, y = Σ_w x_w. One collective for each dtype.

        Args:
            tensors: Of the same shapes and dtypes on all workers.
            op: `"sum"`, `"max"` or `"min"`.

        Returns:
            The results, in the same order, bitwise equal on all workers.
        """
        results: list = [None] * len(tensors)
        for indices in in_vectors(tensors):
            flats = [tf.reshape(tensors[i], [-1]) for i in indices]
            if len(flats) == 1:
                parts = [self._collective(op, flats[0])]
            else:
                total = self._collective(op, tf.concat(flats, 0))
                sizes = [tf.size(flat) for flat in flats]
                parts = tf.split(total, sizes, num=len(sizes))
            for i, part in zip(indices, parts, strict=True):
                results[i] = tf.ensure_shape(
                    tf.reshape(part, tf.shape(tensors[i])), tensors[i].shape
                )
        return results

    def all_reduce_halves(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of one 16-bit dtype over the workers, and sends them in 16 bits.

        The exception is bfloat16 over NCCL, which travels in 32: not every NCCL can sum it.
        """
        return self.all_reduce(tensors)

    def all_reduce_gradients(
        self, gradients: Sequence[tf.Tensor], weights: Sequence[keras.Variable | None]
    ) -> list[tf.Tensor]:
        """Sums gradients over the workers, in buckets of `bucket_bytes`, with `compression`.

        Args:
            gradients: The gradients, in layer order.
            weights: The weight of each gradient; None for other sums that travel with them.
        """
        results: list = [None] * len(gradients)
        new_states: list = []
        sizes = [(g.shape.num_elements() or 0) * g.dtype.size for g in gradients]
        for indices in buckets(sizes, self.bucket_bytes):
            bucket = [gradients[i] for i in indices]
            if self.compression is None:
                summed = self.all_reduce(bucket)
            else:
                of_bucket = [weights[i] for i in indices]
                summed, states = self.compression.totals(self, bucket, of_bucket)
                new_states += states
            for i, total in zip(indices, summed, strict=True):
                results[i] = total
        assign_if_finite(new_states, results)
        return results

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over the workers; each worker receives its rows of the sum.

        It sends half the bytes of an all-reduce. One collective for each dtype.

        Args:
            tensors: Shape `(W·n, …)` each, static, and the same on all workers.

        Returns:
            For each, shape `(n, …)`: rows w·n to (w + 1)·n of the sum, on worker w. Terms are added
            in worker order.
        """
        results: list = [None] * len(tensors)
        for indices in in_vectors(tensors):
            rows = [tf.reshape(tensors[i], [self.num_workers, -1]) for i in indices]
            widths = [row.shape[1] for row in rows]
            local_rows = self._scattered(tf.reshape(static_shapes.concatenated(rows, 1), [-1]))
            local_rows = tf.ensure_shape(local_rows, [sum(widths)])
            for i, part in zip(indices, static_shapes.split(local_rows, widths, 0), strict=True):
                number, *rest = tensors[i].shape
                results[i] = static_shapes.reshaped(part, [number // self.num_workers, *rest])
        return results

    def _scattered(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns this worker's shard of the summed vector, whose size W divides."""
        shape = [self.num_workers, flat.shape[0] // self.num_workers]
        if self.transport == "nccl":
            return tf.reshape(self._collective("sum", flat), shape)[self.worker_index]
        terms = restored(self._collective("all_to_all", movable(flat), one_in=2), flat.dtype)
        return sum_in_order(tf.unstack(tf.reshape(terms, shape)))

    def all_gather(
        self, tensors: Sequence[tf.Tensor], counts: Sequence, kind: str = SUMS
    ) -> list[tf.Tensor]:
        """Concatenates the workers' rows in worker order. One collective for each dtype.

        Args:
            tensors: Shape `(counts[worker_index], …)` each; all workers agree beyond axis 0.
            counts: Rows per worker: integers, or scalar tensors equal on all workers.
            kind: The kind to count them as: see `tfparallel.collectives.traffic`.

        Returns:
            For each, shape `(Σ counts, …)`, equal on all workers.

        Raises:
            ValueError: For a type that cannot be sent, such as a string.
        """
        results: list = [None] * len(tensors)
        sent = list(map(movable, tensors))
        for indices in by_dtype(sent).values():
            flats = [static_shapes.as_matrix(sent[i]) for i in indices]
            rows = self._gather_rows(static_shapes.concatenated(flats, 1), counts, kind)
            widths = [static_shapes.size_along(flat, 1) for flat in flats]
            for i, part in zip(indices, static_shapes.split(rows, widths, 1), strict=True):
                rest = tensors[i].shape[1:]
                total = sum(counts) if all(isinstance(n, int) for n in counts) else None
                if total is not None and rest.is_fully_defined():
                    joined = static_shapes.reshaped(part, [total, *rest])
                    results[i] = restored(joined, tensors[i].dtype)
                    continue
                shape = tf.concat([[-1], tf.shape(tensors[i])[1:]], 0)
                joined = restored(tf.reshape(part, shape), tensors[i].dtype)
                results[i] = tf.ensure_shape(joined, [total, *rest])
        return results

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sends part k of W equal parts of axis 0 to worker k; returns the W that arrive."""
        sent = movable(tensor)
        received = self._collective("all_to_all", tf.reshape(sent, [-1]), ROWS)
        return restored(tf.reshape(received, static_shapes.shape_of(sent)), tensor.dtype)

    def scatter(self, tensor: tf.Tensor, root: int) -> tf.Tensor:
        """Returns this worker's part of the root's tensor, the only one kept of an all-to-all."""
        return static_shapes.in_parts(self.all_to_all(tensor), self.num_workers)[root]

    def all_gather_uneven(self, tensors: Sequence[tf.Tensor], kind: str = ROWS) -> list[tf.Tensor]:
        """Like `all_gather`, when the workers do not know each other's number of rows.

        One more collective exchanges the counts. All `tensors` have the same number of rows.
        """
        counts = self._collective("all_gather", tf.shape(tensors[0])[:1])
        return self.all_gather(tensors, tf.unstack(counts, num=self.num_workers), kind)

    def broadcast(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns worker 0's tensors on all workers, as sums in which all other terms are zero."""
        if self.worker_index:
            tensors = [tf.zeros_like(tensor) for tensor in tensors]
        sent = self.all_reduce([sendable(tensor) for tensor in tensors])
        return [tf.cast(s, tensor.dtype) for s, tensor in zip(sent, tensors, strict=True)]

    def exchange(self, content: Any, what: str) -> list[Any]:
        """Gathers a JSON value from every worker on all workers, outside a `tf.function`.

        Args:
            content: This worker's value.
            what: Describes the call, for error messages; it travels with the content.

        Returns:
            The values, in worker order.

        Raises:
            RuntimeError: On every worker, if the workers have reached different calls.
        """
        text = json.dumps([what, content], sort_keys=True).encode()
        (codes,) = self.all_gather_uneven([tf.constant(list(text), tf.int32)])
        (lengths,) = self.all_gather([tf.constant([len(text)])], [1] * self.num_workers)
        sent = [json.loads(bytes(part.numpy().tolist())) for part in tf.split(codes, lengths)]
        if diffs := differences({worker: {"call": name} for worker, (name, _) in enumerate(sent)}):
            raise RuntimeError(
                "The workers are at different points of the program; all of them must make the "
                f"same calls. Received: {diffs[0]}. Look for a call that not all workers make, or "
                "an error that the program caught on one of them: let it end the program."
            )
        return [content for _, content in sent]

    def _gather_rows(self, rows, counts, kind):
        """Concatenates the workers' matrices of `counts[w]` rows each, all of the same width."""
        width = static_shapes.size_along(rows, 1)
        if all(isinstance(count, int) for count in counts):
            longest = max(counts)
            if longest == min(counts) and rows.shape.is_fully_defined():  # Else it is rounded up.
                gathered = self._collective("all_gather", tf.reshape(rows, [-1]), kind)
                return tf.reshape(gathered, [sum(counts), width])
        else:
            longest = tf.reduce_max(tf.stack(counts))
        padding = longest - counts[self.worker_index]
        padded = tf.pad(rows, [[0, padding], [0, 0]])
        gathered = self._collective("all_gather", tf.reshape(padded, [-1]), kind)
        by_worker = tf.split(gathered, self.num_workers)
        unpadded = [
            tf.reshape(part[: longest * width], [longest, width])[:count]
            for part, count in zip(by_worker, counts, strict=True)
        ]
        return tf.concat(unpadded, 0)

    def _collective(
        self, name: str, flat: tf.Tensor, kind: str = SUMS, one_in: int = 1
    ) -> tf.Tensor:
        """Runs one collective on a vector; a dynamic length is rounded up."""
        # `name` is a reduction, "all_gather" or "all_to_all".
        signature = self._signatures.setdefault(
            (name, flat.dtype, flat.shape[0]), len(self._signatures)
        )
        if flat.shape[0] is not None:
            self.traffic.add_tensor(kind, flat, one_in=one_in)
            return self._run(name, flat, signature)
        # Each worker's part of an all-to-all is rounded up by itself.
        parts = tf.reshape(flat, [self.num_workers if name == "all_to_all" else 1, -1])
        size = tf.shape(parts)[1]
        step, padded_size = size_step(size)
        flat = tf.reshape(tf.pad(parts, [[0, 0], [0, padded_size - size]]), [-1])
        self.traffic.add_tensor(kind, flat)
        result = self._run(name, flat, signature + _MAX_SIGNATURES * step)
        if name == "all_gather":
            return result
        return tf.reshape(tf.reshape(result, [-1, padded_size])[:, :size], [-1])

    def _run(self, name, flat, key):
        check_all_take_part()
        is_hosts = not flat.dtype.is_floating or (name == "all_to_all" and self.transport == "nccl")
        place = self._host if is_hosts else self.device
        by_nccl = self.transport == "nccl" and not is_hosts
        arguments = {
            "group_size": self.num_workers,
            "group_key": self._group_key + is_hosts,
            "instance_key": key,
            "timeout": self.timeout_seconds,
            "ordering_token": self._ordering_tokens[place].handle,
            # Without a hint TensorFlow uses its ring, even between GPUs (tensorflow#50178).
            "communication_hint": "nccl" if by_nccl else "ring",
        }
        if by_nccl and flat.dtype in _WIDENED:
            return tf.cast(self._run(name, tf.cast(flat, tf.float32), key), flat.dtype)

        def run():
            if name == "all_gather":
                by_rank = all_gather_v2(flat, **arguments)
                return tf.reshape(self._in_order(by_rank, self._rank_of_worker), [-1])
            if name == "all_to_all":
                parts = tf.reshape(flat, [self.num_workers, -1])
                sent = self._in_order(parts, self._worker_of_rank)
                return self._in_order(all_to_all_v2(sent, **arguments), self._rank_of_worker)
            return all_reduce_v2(
                flat,
                merge_op=_MERGE_OPS[name],
                max_subdivs_per_device=self._num_pieces(flat),
                **arguments,
            )

        size = "?" if flat.shape[0] is None else flat.shape[0]
        with tf.device(place):
            return around(f"{name} {flat.dtype.name}[{size}]", flat, run)

    def _in_order(self, parts, order):
        if order == list(range(self.num_workers)):
            return parts
        return tf.gather(tf.reshape(parts, [self.num_workers, -1]), order)

    def _num_pieces(self, flat):
        is_tuned = self.transport == "ring_tuned" and flat.shape[0] is not None
        return num_pieces(flat.shape[0] * flat.dtype.size // self.num_workers if is_tuned else 0)
