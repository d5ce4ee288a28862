"""Marks in the graph of a step, which record when the step passes them, without Python.

A mark is an operation that reads the clock once its tensors are available, and one that writes the
time into the mark's slot of a small variable: about five microseconds. Nothing waits for a mark,
except a collective for the mark at its start. On a GPU, which runs asynchronously, a mark records
when the work was enqueued.

There are no marks in eager mode, without a recorder (`Marks.current`), and with deterministic
operations, which forbid reading the clock.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.flight.record import BEGINS, NUM_MARKS, FlightRecord
from tfparallel.seams.tensorflow import is_deterministic, run_independently

_LOOK_SECONDS = 0.01  # Shorter steps are sampled.


class Marks:
    """The marks of this process, and the record that they are written to."""

    current: "Marks | None" = None  # One per process, as is the record.

    def __init__(self, record: FlightRecord):
        self.record = record
        self.names: list[str] = []
        self.step = 0
        with tf.init_scope(), tf.device("CPU:0"):
            self.times, self.times_of_collectives = (
                tf.Variable(tf.zeros([NUM_MARKS], tf.float64), trainable=False) for _ in range(2)
            )
        self._python_times = np.zeros(NUM_MARKS)
        self._mean, self._one_in = 1.0, 1

    def place(self, name: str) -> int | None:
        """Returns the mark's slot in the variable; None if all slots are taken."""
        if name not in self.names:
            if len(self.names) == NUM_MARKS:
                return None
            self.names.append(name)
            self.record.name_marks(self.names)
        return self.names.index(name)

    def passed(self, name: str) -> None:
        """Records that Python passes a mark now."""
        place = self.place(name)
        if place is not None:
            self._python_times[place] = time.time()

    def read(self) -> np.ndarray:
        """Returns the times when each mark was last passed."""
        times = self._python_times
        for variable in (self.times, self.times_of_collectives):
            read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float64)
            times = np.maximum(times, read.numpy())
        self.record.passed(times.tobytes())
        return times

    def end_step(self, begin: float, end: float, *, is_one: bool = True) -> None:
        """Records a step from `begin` to `end`, in seconds since 1970, and the marks it passed.

        If an execution runs several steps (`is_one` is false), only the step itself is recorded.
        """
        step, last = self.step, begin
        events, passed = [], {}
        self._mean += (end - begin - self._mean) / 8
        if is_one and step % self._one_in == 0:
            times = self.read()
            fresh = np.flatnonzero(times >= begin)
            passed = {self.names[place]: float(times[place]) for place in fresh}
            # Powers of two, so that workers of different speeds sample the same steps.
            mean = max(self._mean, 1e-4)  # The clock may be set back.
            self._one_in = 1 << max(0, math.ceil(math.log2(_LOOK_SECONDS / mean)))
        for name in sorted(passed, key=passed.__getitem__):
            if not name.endswith(BEGINS):
                when = passed[name]
                events.append((name, step, min(passed.get(name + BEGINS, last), when), when))
                last = when
        events += [("update", step, last, end)] if passed else []
        events.append(("step", step, begin, end))
        self.record.add(events)


def mark(name: str, tensors: Sequence[Any]) -> list[tf.Operation]:
    """Adds a mark to a traced graph, passed once `tensors` are available; returns its operation."""
    if not _is_marked():
        return []
    written = _write(name, tensors, Marks.current.times)
    return [] if written is None else [written]


def around(name: str, tensor: tf.Tensor, run: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Runs a collective between two marks; it waits for the first mark and for the tensor.

    Otherwise a worker might block in the collective before it writes the first mark.
    """
    if not _is_marked():
        return run()
    variable = Marks.current.times_of_collectives
    begun = _write(name + BEGINS, [tensor], variable)
    with tf.control_dependencies([] if begun is None else [begun]):
        result = run()
    _write(name, [result], variable)
    return result


def _is_marked():
    return Marks.current is not None and not is_deterministic()


def _write(name, tensors, variable) -> tf.Operation | None:
    """Creates the op that writes the time into the mark's slot; such ops run in program order."""
    place = None if tf.executing_eagerly() else Marks.current.place(name)
    if place is None:
        return None
    dense = [x.values if isinstance(x, tf.IndexedSlices) else x for x in tensors]
    with tf.device("CPU:0"), tf.control_dependencies([x for x in dense if tf.is_tensor(x)]):
        now = tf.timestamp()
        run_independently(now.op)
        return tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle, indices=place, updates=now
        )


@contextlib.contextmanager
def around_python(name: str) -> Iterator[None]:
    """Marks the start and the end of Python code within a step."""
    marks = Marks.current
    if marks is None:
        yield
        return
    marks.passed(name + BEGINS)
    yield
    marks.passed(name)
