"""Collectives between the workers of a job, called by the program that each of them runs.

TensorFlow tells collectives apart by an instance key, and binds a key to the shape that it first
sees. Its own strategies take a new key for each call, fed from Python, which a loop inside a
`tf.function` cannot do (keras#19246) and which costs an exchange with the leader. All workers run
the same program here, so a key is a function of what is sent: the collective, its type and its
shape. One ordering token makes the collectives of a worker run one after the other, in the order
of the program, and so a key is free again when it comes back.

A number of rows that is known only when the step runs is rounded up to one of four sizes an
octave: few keys, and at most a quarter of the bytes is padding.

TensorFlow ranks the members of a collective by the text of their tasks: 0, 1, 10, 2, … What it
joins or deals out by rank is put in the order of the workers here.

Where workers use GPUs, floating-point tensors travel between the GPUs. Integers (counts, texts,
what workers agree on) travel between the hosts, over gRPC, and no GPU waits for them.

Rests on collectives of TensorFlow's that have no public name outside a replica.
"""

import copy
import functools
import json
import operator
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.differences import differences
from tfparallel.collectives.compression import Compression
from tfparallel.collectives.packing import (
    buckets,
    by_dtype,
    in_vectors,
    movable,
    restored,
    sendable,
    size_step,
)
from tfparallel.collectives.traffic import ROWS, SUMS, Traffic
from tfparallel.flight.marks import around
from tfparallel.seams.tensorflow import all_gather_v2, all_reduce_v2, all_to_all_v2

_FIRST_GROUP_KEY = 2**20  # Above those that TensorFlow's strategies count up from 1.
_MAX_SIGNATURES = 2**20  # A key is signature + _MAX_SIGNATURES · size step, in 32 bits.
# Of TensorFlow's ring: pieces of this size travel at the same time as others are summed, which
# beats one piece a worker (its default) by a quarter from 16 MiB up, and costs at small sizes.
_PIECE_BYTES = 2**21
_MAX_PIECES = 16
_STOCK_PIECES = -1
_WIDENED = (tf.bfloat16,)  # Types of which not every NCCL has sums.
_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min"}


class ProcessGroup:
    """The workers of a job, one device each, that sum and join tensors.

    Every worker must make the same calls in the same order. `transport` says what carries the
    tensors: see `tfparallel.collectives.transport`; `bucket_bytes` in how many sums gradients go,
    `compression` in how many bytes; `traffic` counts what is handed to it.

    Args:
        num_workers: W, at least 2.
        worker_index: The index of this worker.
        device: Full name of the device of this worker that takes part.
        timeout_seconds: How long a collective waits for the others; 0 for ever.
        first_host: Worker 0's host, as the others know it.
    """

    of_process: "ProcessGroup | None" = None  # Of the strategy that this process has started.
    # The error that ended a transport of this package: TensorFlow keeps only its text.
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
        # What control traffic goes through: a GPU's host, a CPU itself.
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
        """Asks TensorFlow which worker has which rank. Called by all, before other collectives."""
        own = tf.constant([self.worker_index], tf.int32)
        workers = self._collective("all_gather", own).numpy()
        self._worker_of_rank, self._rank_of_worker = workers.tolist(), workers.argsort().tolist()

    def _take_keys(self):
        # The next one is that of what the hosts send.
        self._group_key = _FIRST_GROUP_KEY + 2 * ProcessGroup._num_groups
        ProcessGroup._num_groups += 1
        self._signatures: dict[tuple, int] = {}

    @property
    def implementation(self) -> str:
        """What truly sums."""
        if self.transport == "nccl":
            return "TensorFlow CollectiveReduceV2 (NCCL)"
        pieces = ", in pieces" if self.transport == "ring_tuned" else ""
        return f"TensorFlow CollectiveReduceV2 (RING{pieces})"

    @property
    def by_tensorflow(self) -> "ProcessGroup":
        """The same workers, joined by TensorFlow's own collectives."""
        return self

    def with_transport(self, name: str) -> "ProcessGroup":
        """The same workers once more, joined by "ring", "ring_tuned" or "nccl"."""
        group = copy.copy(self)
        vars(group).pop("for_users", None)
        group.transport = name
        group._take_keys()
        return group

    @functools.cached_property
    def for_users(self) -> "ProcessGroup":
        """The same workers once more, for the calls of users.

        Its keys are its own: keys are numbered as they come, and a call that a user makes on some
        of the workers only must not shift those of a program. Its ordering token is this group's:
        a `tf.function` that holds collectives of both runs them in one order on all workers, as
        NCCL requires of communicators that share a device.
        """
        group = copy.copy(self)
        group._take_keys()
        return group

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over the workers, y = Σ_w x_w. One collective for each dtype.

        Args:
            tensors: Of the same shapes and dtypes on all workers.
            op: `"sum"`, `"max"` or `"min"`.

        Returns:
            The results, in the same order, equal to the last bit on all workers.
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
        """Sums numbers of one 16-bit type over the workers, which travel in 16 bits.

        But for bfloat16 over NCCL, which not every NCCL sums.
        """
        return self.all_reduce(tensors)

    def all_reduce_gradients(
        self, gradients: Sequence[tf.Tensor], weights: Sequence[keras.Variable | None]
    ) -> list[tf.Tensor]:
        """Sums gradients over the workers, in buckets of `bucket_bytes`, by `compression`.

        Args:
            gradients: In the order of their layers.
            weights: What each is the gradient of; None for a sum that goes with them.
        """
        results: list = [None] * len(gradients)
        sizes = [(g.shape.num_elements() or 0) * g.dtype.size for g in gradients]
        for indices in buckets(sizes, self.bucket_bytes):
            bucket = [gradients[i] for i in indices]
            if self.compression is None:
                summed = self.all_reduce(bucket)
            else:
                summed = self.compression.totals(self, bucket, [weights[i] for i in indices])
            for i, total in zip(indices, summed, strict=True):
                results[i] = total
        return results

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over the workers; each worker gets its rows of the sum.

        It sends half of what a sum for all does. One collective for each dtype.

        Args:
            tensors: Shape `(W·n, …)` each, of a size that is known, the same on all workers.

        Returns:
            For each, shape `(n, …)`: rows w·n to (w + 1)·n of the sum, on worker w. Terms are added
            in the order of the workers.
        """
        results: list = [None] * len(tensors)
        for indices in in_vectors(tensors):
            rows = [tf.reshape(tensors[i], [self.num_workers, -1]) for i in indices]
            widths = [row.shape[1] for row in rows]
            own = self._scattered(tf.reshape(tf.concat(rows, 1), [-1]))
            own = tf.ensure_shape(own, [sum(widths)])
            for i, part in zip(indices, tf.split(own, widths), strict=True):
                number, *rest = tensors[i].shape
                results[i] = tf.reshape(part, [number // self.num_workers, *rest])
        return results

    def _scattered(self, flat: tf.Tensor) -> tf.Tensor:
        """This worker's share of the sum of vectors, whose size W divides."""
        shape = [self.num_workers, flat.shape[0] // self.num_workers]
        if self.transport == "nccl":
            return tf.reshape(self._collective("sum", flat), shape)[self.worker_index]
        terms = restored(self._collective("all_to_all", movable(flat), one_in=2), flat.dtype)
        return _added_up(tf.unstack(tf.reshape(terms, shape)))

    def all_gather(
        self, tensors: Sequence[tf.Tensor], counts: Sequence, kind: str = SUMS
    ) -> list[tf.Tensor]:
        """Joins the workers' rows, in the order of the workers. One collective for each dtype.

        Args:
            tensors: Shape `(counts[worker_index], …)` each, the same behind axis 0 on all workers.
            counts: How many rows each worker has: integers, or scalar tensors equal on all.
            kind: What they are counted as: `tfparallel.collectives.traffic`.

        Returns:
            For each, shape `(Σ counts, …)`, equal on all workers.

        Raises:
            ValueError: For a type that cannot be sent, such as a string.
        """
        results: list = [None] * len(tensors)
        sent = [movable(tensor) for tensor in tensors]
        for indices in by_dtype(sent).values():
            flats = [tf.reshape(sent[i], [tf.shape(sent[i])[0], -1]) for i in indices]
            rows = self._gather_rows(tf.concat(flats, 1), counts, kind)
            widths = [tf.shape(flat)[1] for flat in flats]
            parts = tf.split(rows, widths, axis=1, num=len(widths))
            for i, part in zip(indices, parts, strict=True):
                shape = tf.concat([[-1], tf.shape(tensors[i])[1:]], 0)
                joined = restored(tf.reshape(part, shape), tensors[i].dtype)
                total = sum(counts) if all(isinstance(n, int) for n in counts) else None
                results[i] = tf.ensure_shape(joined, [total, *tensors[i].shape[1:]])
        return results

    def all_gather_uneven(self, tensors: Sequence[tf.Tensor], kind: str = ROWS) -> list[tf.Tensor]:
        """Joins rows whose numbers the other workers do not know; one more collective, for them.

        As `all_gather`, of tensors that have the same number of rows each.
        """
        own = tf.reshape(tf.shape(tensors[0])[0], [1])
        counts = self._collective("all_gather", own)
        return self.all_gather(tensors, tf.unstack(counts, num=self.num_workers), kind)

    def broadcast(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns worker 0's tensors on all workers, as sums of which all other terms are zero."""
        if self.worker_index:
            tensors = [tf.zeros_like(tensor) for tensor in tensors]
        sent = self.all_reduce([sendable(tensor) for tensor in tensors])
        return [tf.cast(s, tensor.dtype) for s, tensor in zip(sent, tensors, strict=True)]

    def exchange(self, content: Any, what: str) -> list[Any]:
        """Sends what JSON can hold to all workers, outside a `tf.function`.

        Args:
            content: This worker's own.
            what: Names the call, in words that an error may show; it travels with the content.

        Returns:
            Every worker's content, by worker.

        Raises:
            RuntimeError: On every worker, if they have reached calls of different names.
        """
        text = json.dumps([what, content], sort_keys=True).encode()
        (codes,) = self.all_gather_uneven([tf.constant(list(text), tf.int32)])
        (lengths,) = self.all_gather([tf.constant([len(text)])], [1] * self.num_workers)
        parts = tf.split(codes, lengths)
        sent = [json.loads(bytes(part.numpy().tolist())) for part in parts]
        if apart := differences({worker: {"call": name} for worker, (name, _) in enumerate(sent)}):
            raise RuntimeError(
                "The workers are at different points of the program; the same calls are required "
                f"on all of them. Received: {apart[0]}. Look for a call that not all workers make, "
                "or an error that the program caught on one of them: let it end the program."
            )
        return [content for _, content in sent]

    def _gather_rows(self, rows, counts, kind):
        """Joins matrices of `counts[w]` rows, of one width."""
        width = tf.shape(rows)[1]
        if all(isinstance(count, int) for count in counts):
            longest = max(counts)
        else:
            longest = tf.reduce_max(tf.stack(counts))
        padding = longest - counts[self.worker_index]
        padded = tf.pad(rows, [[0, padding], [0, 0]])
        gathered = self._collective("all_gather", tf.reshape(padded, [-1]), kind)
        by_worker = tf.split(gathered, self.num_workers)
        kept = [
            tf.reshape(part[: longest * width], [longest, width])[:count]
            for part, count in zip(by_worker, counts, strict=True)
        ]
        return tf.concat(kept, 0)

    def _collective(
        self, name: str, flat: tf.Tensor, kind: str = SUMS, one_in: int = 1
    ) -> tf.Tensor:
        """Runs one collective on a vector; an unknown length is rounded up."""
        # `name` is that of a reduction, "all_gather" or, of a known length, "all_to_all".
        signature = self._signatures.setdefault(
            (name, flat.dtype, flat.shape[0]), len(self._signatures)
        )
        if flat.shape[0] is not None:
            self.traffic.add_tensor(kind, flat, one_in=one_in)
            return self._run(name, flat, signature)
        size = tf.size(flat)
        step, padded_size = size_step(size)
        flat = tf.pad(flat, [[0, padded_size - size]])
        self.traffic.add_tensor(kind, flat)
        result = self._run(name, flat, signature + _MAX_SIGNATURES * step)
        return result if name == "all_gather" else result[:size]

    def _run(self, name, flat, key):
        is_hosts = not flat.dtype.is_floating
        place = self._host if is_hosts else self.device
        by_nccl = self.transport == "nccl" and not is_hosts
        arguments = {
            "group_size": self.num_workers,
            "group_key": self._group_key + is_hosts,
            "instance_key": key,
            "timeout": self.timeout_seconds,
            "ordering_token": self._ordering_tokens[place].handle,
            # Without a hint TensorFlow takes its ring, between GPUs too (tensorflow#50178).
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
        if self.transport != "ring_tuned" or flat.shape[0] is None:
            return _STOCK_PIECES
        wanted = flat.shape[0] * flat.dtype.size // (self.num_workers * _PIECE_BYTES)
        return min(wanted, _MAX_PIECES) if wanted > 1 else _STOCK_PIECES


def _added_up(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Their sum, in order; of 16 bits in 32, and rounded once."""
    dtype = terms[0].dtype
    if dtype.size > 2:
        return functools.reduce(operator.add, terms)
    return tf.cast(functools.reduce(operator.add, [tf.cast(t, tf.float32) for t in terms]), dtype)
