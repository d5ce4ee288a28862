"""The workers of a job, connected by MPI.

A collective is a Python function in TensorFlow's graph (`tf.numpy_function`) that reads the tensors
in place and returns arrays that TensorFlow aliases. All collectives of a worker run in program
order, because each one reads and then writes the same variable.

16-bit numbers are summed in 32 bits and rounded once, not at every step as in TensorFlow's ring.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.mpi.communicator import Communicator
from tfparallel.collectives.packing import by_dtype
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import SUMS
from tfparallel.flight.marks import around_python

_HALVES = (tf.float16, tf.bfloat16)


class MpiProcessGroup(ProcessGroup):
    """The workers of a job, connected by TensorFlow in `group` and by MPI in `communicator`."""

    def __init__(self, group: ProcessGroup, communicator: Communicator):
        vars(self).update({k: v for k, v in vars(group).items() if k != "for_users"})
        self._group = group
        self.communicator = communicator
        self.transport = communicator.algorithm

    @functools.cached_property
    def for_users(self) -> "MpiProcessGroup":
        """The same group: every call is compared, so user calls cannot pair with other calls."""
        return self

    @property
    def implementation(self) -> str:
        """Name of the implementation that computes the sums."""
        return self.communicator.implementation("all_reduce")

    @property
    def by_tensorflow(self) -> ProcessGroup:
        """The same workers, connected by TensorFlow's own collectives."""
        return self._group

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over the workers. One collective for each dtype."""
        results: list = [None] * len(tensors)
        wide = [tf.cast(x, tf.float32) if x.dtype in _HALVES else x for x in tensors]
        for indices in by_dtype(wide).values():
            reduce = functools.partial(self._reduce, op)
            reduced = self._run(op, reduce, [wide[i] for i in indices])
            for i, y in zip(indices, reduced, strict=True):
                results[i] = tf.cast(tf.ensure_shape(y, tensors[i].shape), tensors[i].dtype)
        return results

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over the workers; each receives its rows. See `ProcessGroup`."""
        wide = [tf.cast(x, tf.float32) if x.dtype in _HALVES else x for x in tensors]
        pairs = zip(super().reduce_scatter(wide), tensors, strict=True)
        return [tf.cast(y, x.dtype) for y, x in pairs]

    def all_reduce_halves(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of one 16-bit dtype over the workers, and sends them in 16 bits.

        MPI cannot sum such types. Each worker receives its part of all vectors, sums it in 32 bits,
        rounds once, and sends the result to the others.
        """
        flats = [tf.reshape(tensor, [-1]) for tensor in tensors]
        sizes = [flat.shape[0] for flat in flats]
        padding = -sum(sizes) % self.num_workers
        vector = tf.pad(tf.concat(flats, 0), [[0, padding]])
        (total,) = self._run("sum", self._reduce_halves, [vector])
        total = tf.ensure_shape(total, vector.shape)[: sum(sizes)]
        parts = zip(tf.split(total, sizes), tensors, strict=True)
        return [tf.reshape(part, tensor.shape) for part, tensor in parts]

    def _scattered(self, flat: tf.Tensor) -> tf.Tensor:
        (shard,) = self._run("reduce_scatter", self._reduce_scatter, [flat])
        return shard

    def _collective(self, name: str, flat: tf.Tensor, kind: str = SUMS) -> tf.Tensor:
        if name != "all_gather":
            return self.all_reduce([flat], name)[0]
        (joined,) = self._run("all_gather", functools.partial(self._gather, kind), [flat])
        length = flat.shape[0]
        return tf.ensure_shape(joined, [None if length is None else length * self.num_workers])

    def run_on_arrays(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        """Runs a collective that only benchmarks use, such as "reduce_scatter"."""
        function = getattr(self.communicator, name)
        return self._run(name, lambda array: [function(array)], [tensor])[0]

    def _reduce(self, op: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, sum(array.nbytes for array in arrays))
        return self.communicator.all_reduce(op, arrays)

    def _reduce_scatter(self, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, array.nbytes // 2)
        return [self.communicator.reduce_scatter(array)]

    def _reduce_halves(self, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, array.nbytes)  # Counted as one sum, despite its two steps.
        bits = self.communicator.all_to_all(array.view(np.uint16))
        terms = bits.view(array.dtype).reshape(self.num_workers, -1).astype(np.float32)
        total = terms.sum(0).astype(array.dtype)
        return [self.communicator.all_gather(total.view(np.uint16)).view(array.dtype)]

    def _gather(self, kind: str, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(kind, array.nbytes)
        return [self.communicator.all_gather(array)]

    def _run(self, name, function, tensors) -> list[tf.Tensor]:
        check_all_take_part()

        def call(*arrays: Any) -> list[np.ndarray]:
            size = sum(array.size for array in arrays)
            try:
                with around_python(f"{name} {arrays[0].dtype}[{size}]"):
                    return function(*arrays)
            except Exception as error:
                ProcessGroup.failure = error  # TensorFlow preserves only its text.
                raise

        dtypes = [tensor.dtype for tensor in tensors]
        with tf.device("CPU:0"):
            if tf.executing_eagerly():
                try:
                    return tf.nest.flatten(tf.numpy_function(call, tensors, dtypes))
                except tf.errors.OpError as error:
                    if ProcessGroup.failure is None:
                        raise
                    raise ProcessGroup.failure from error
            # TensorFlow orders a read after the last write, and a write after the last read.
            ordering_token = self._ordering_tokens[self._host]
            before = ordering_token.read_value()
            with tf.control_dependencies([before]):
                results = tf.nest.flatten(tf.numpy_function(call, tensors, dtypes))
            with tf.control_dependencies(results):
                ordering_token.assign(before)
        return results
