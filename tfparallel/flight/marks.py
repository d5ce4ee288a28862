"""Marks in the graph of a step: when the step passes each, without Python.

A mark is an operation that reads the clock once its tensors are there, and one that writes it into
the mark's place of one small variable: some ten microseconds. Nothing waits for a mark, and marks
wait for nothing but their tensors. On a GPU, which works behind the host, it is when the work was
handed over.

In eager mode, and where nobody records (`Marks.current`), there are none.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.flight.record import BEGINS, NUM_MARKS, Event, FlightRecord
from tfparallel.seams.tensorflow import run_independently

__all__ = ["Marks", "around", "around_python", "mark"]


class Marks:
    """The marks of this process, and the record that they are for.

    Args:
        record: It.
    """

    current: "Marks | None" = None  # A process has one clock, and one record.

    def __init__(self, record: FlightRecord):
        self.record = record
        self.names: list[str] = []
        self.step = 0
        with tf.init_scope(), tf.device("CPU:0"):
            self.times = tf.Variable(tf.zeros([NUM_MARKS], tf.float64), trainable=False)
        self._seen, self._python_times = np.zeros(NUM_MARKS), np.zeros(NUM_MARKS)

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
        times = np.maximum(self.times.numpy(), self._python_times)
        self.record.passed(times.tobytes())
        return times

    def events_since(self, begin: float) -> list[Event]:
        """What has happened since the last call, in a step that began then."""
        times = self.read()
        fresh = {
            name: times[place]
            for place, name in enumerate(self.names)
            if times[place] > self._seen[place]
        }
        self._seen = times
        found, last = [], begin
        for name, end in sorted(fresh.items(), key=lambda item: item[1]):
            if name.endswith(BEGINS):
                continue
            began = fresh.get(name + BEGINS, last)
            found.append(Event(name, self.step, min(began, end), end))
            last = end
        return found


def mark(name: str, tensors: Sequence[Any]) -> None:
    """Marks where tensors are there, in the graph that is being traced.

    Args:
        name: What ends there; it began where the last ended.
        tensors: They.
    """
    marks = Marks.current
    if marks is None or tf.executing_eagerly():
        return
    place = marks.place(name)
    if place is None:
        return
    known = [x.values if isinstance(x, tf.IndexedSlices) else x for x in tensors]
    with tf.device("CPU:0"), tf.control_dependencies([x for x in known if tf.is_tensor(x)]):
        now = tf.timestamp()
        run_independently(now.op)
        handle = marks.times.handle
        tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=place, updates=now)


def around(name: str, tensor: tf.Tensor, run: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Runs something between two marks.

    Args:
        name: What it is.
        tensor: What it waits for.
        run: It.

    Returns:
        What it returns.
    """
    mark(name + BEGINS, [tensor])
    result = run()
    mark(name, [result])
    return result


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
