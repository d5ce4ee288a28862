"""Marks in the graph of a step: when the step passes each, without Python.

A mark is an operation that reads the clock once its tensors are there, and one that writes it into
the mark's place of a small variable: some five microseconds. Nothing waits for a mark, but for that
where a collective begins. On a GPU, which works behind the host, it is when the work was handed
over.

In eager mode, where nobody records (`Marks.current`), and where operations are to be deterministic,
which forbids a clock, there are none.
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

__all__ = ["Marks", "around", "around_python", "mark"]


_LOOK_SECONDS = 0.01  # Of steps that are shorter, not each is looked at.


class Marks:
    """The marks of this process, and the record that they are for."""

    current: "Marks | None" = None  # A process has one clock, and one record.

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
        """The mark's place in the variable; None if there are too many."""
        if name not in self.names:
            if len(self.names) == NUM_MARKS:
                return None
            self.names.append(name)
            self.record.name_marks(self.names)
        return self.names.index(name)

    def passed(self, name: str) -> None:
        """Marks what Python does, now."""
        place = self.place(name)
        if place is not None:
            self._python_times[place] = time.time()

    def read(self) -> np.ndarray:
        """When each was passed last."""
        times = self._python_times
        for variable in (self.times, self.times_of_collectives):
            read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float64)
            times = np.maximum(times, read.numpy())
        self.record.passed(times.tobytes())
        return times

    def end_step(self, begin: float, end: float, *, is_one: bool = True) -> None:
        """Records a step from `begin` to `end`, in seconds since 1970, and what it has passed.

        Of several steps in one execution (`is_one` is false) the last alone is seen.
        """
        step, last = self.step, begin
        found, passed = [], {}
        self._mean += (end - begin - self._mean) / 8
        if is_one and step % self._one_in == 0:
            times = self.read()
            fresh = np.flatnonzero(times >= begin)
            passed = {self.names[place]: float(times[place]) for place in fresh}
            # Powers of two, so that workers of different speed look at the same steps.
            mean = max(self._mean, 1e-4)  # A clock may be set back.
            self._one_in = 1 << max(0, math.ceil(math.log2(_LOOK_SECONDS / mean)))
        for name in sorted(passed, key=passed.__getitem__):
            if not name.endswith(BEGINS):
                when = passed[name]
                found.append((name, step, min(passed.get(name + BEGINS, last), when), when))
                last = when
        found += [("update", step, last, end)] if passed else []
        found.append(("step", step, begin, end))
        self.record.add(found)


def mark(name: str, tensors: Sequence[Any]) -> list[tf.Operation]:
    """Marks in a traced graph when tensors are there; returns the operation, if marks are on."""
    if not _is_marked():
        return []
    written = _write(name, tensors, Marks.current.times)
    return [] if written is None else [written]


def around(name: str, tensor: tf.Tensor, run: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Runs a collective between two marks, and has it wait for the first and for the tensor.

    Else a worker whose collective waits for the others might not come to write it.
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
    """What writes the time into the mark's place; these run in the order of the program."""
    place = None if tf.executing_eagerly() else Marks.current.place(name)
    if place is None:
        return None
    known = [x.values if isinstance(x, tf.IndexedSlices) else x for x in tensors]
    with tf.device("CPU:0"), tf.control_dependencies([x for x in known if tf.is_tensor(x)]):
        now = tf.timestamp()
        run_independently(now.op)
        return tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle, indices=place, updates=now
        )


@contextlib.contextmanager
def around_python(name: str) -> Iterator[None]:
    """Marks what Python does within a step, at its begin and its end."""
    marks = Marks.current
    if marks is None:
        yield
        return
    marks.passed(name + BEGINS)
    yield
    marks.passed(name)
