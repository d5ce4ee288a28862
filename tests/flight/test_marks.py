"""Marks in a graph: they are passed in time, and hold nothing up."""

import time

import pytest
import tensorflow as tf

from tests.forked import run_python
from tfparallel.flight import marks
from tfparallel.flight.record import FlightRecord, read_record


@pytest.fixture(name="current")
def recording(tmp_path, monkeypatch):
    record = FlightRecord(tmp_path / "a.flight", {"worker": 0})
    current = marks.Marks(record)
    monkeypatch.setattr(marks.Marks, "current", current)
    yield current
    record.close()


def sleep(seconds):
    return tf.numpy_function(lambda: time.sleep(seconds) or 1.0, [], tf.float64)


@pytest.mark.slow
def test_marks_are_passed_in_order_and_kept(current):
    @tf.function
    def step(x):
        with tf.control_dependencies(marks.mark("input", [x])):
            x = tf.identity(x)
        y = marks.around("sum float32[1]", x, lambda: x + tf.cast(sleep(0.05), x.dtype))
        # What follows the sum at once may be marked before it.
        with tf.control_dependencies([y]):
            marks.mark("backward", [sleep(0.05)])
        return y

    for number in range(2):
        current.step = number
        begin = time.time()
        step(tf.ones([1]))
        current.end_step(begin, time.time())
    flight_record = read_record(current.record.path)
    events = {event.what: event for event in flight_record.events if event.step == 1}
    assert list(events) == ["input", "sum float32[1]", "backward", "update", "step"]
    collective = events["sum float32[1]"]
    assert 0.05 <= collective.end - collective.begin < 0.5
    assert events["input"].end <= collective.begin <= collective.end <= events["backward"].end
    assert events["step"].begin == begin


@pytest.mark.slow
def test_nothing_waits_for_a_mark(current):
    """A canary: without `run_independently`, what has a state waits for the clock of a mark."""

    @tf.function
    def step():
        slow = sleep(0.0)
        marks.mark("late", [slow])
        return tf.numpy_function(lambda: 1.0, [], tf.float64)

    graph = step.get_concrete_function().graph
    (clock,) = [op for op in graph.get_operations() if op.type == "Timestamp"]
    functions = [op for op in graph.get_operations() if "PyFunc" in op.type]
    waits = {name.name for op in functions for name in op.control_inputs}
    assert clock.name not in waits

    @tf.function
    def usual():
        tf.timestamp()
        return tf.numpy_function(lambda: 1.0, [], tf.float64)

    graph = usual.get_concrete_function().graph
    (function,) = [op for op in graph.get_operations() if "PyFunc" in op.type]
    assert [op.type for op in function.control_inputs] == ["Timestamp"]


def test_what_python_does_is_marked_too(current):
    current.step = 0
    begin = time.time()
    with marks.around_python("sum float32[9]"):
        time.sleep(0.01)
    current.end_step(begin, time.time())
    (event, *_) = read_record(current.record.path).events
    assert event.what == "sum float32[9]" and 0.01 <= event.end - event.begin < 0.2


def test_without_a_record_there_are_no_marks(monkeypatch):
    monkeypatch.setattr(marks.Marks, "current", None)

    @tf.function
    def step(x):
        marks.mark("input", [x])
        return marks.around("sum float32[1]", x, lambda: x + 1)

    operations = step.get_concrete_function(tf.TensorSpec([1])).graph.get_operations()
    assert not [op for op in operations if op.type == "Timestamp"]


@pytest.mark.slow
def test_deterministic_operations_have_no_clock(tmp_path):
    """Story: `check` of a job on GPUs, which asks for them, stopped in its first step."""
    program = f"""
import tensorflow as tf
from tfparallel.flight import marks
from tfparallel.flight.record import FlightRecord

tf.config.experimental.enable_op_determinism()
marks.Marks.current = marks.Marks(FlightRecord({str(tmp_path / "a.flight")!r}, {{"worker": 0}}))

@tf.function
def step(x):
    with tf.control_dependencies(marks.mark("input", [x])):
        return marks.around("sum float32[1]", x, lambda: x + 1)

assert step(tf.ones([1])).numpy() == 2
try:
    tf.function(tf.timestamp)()  # A canary: if it is let in, marks may be, too.
except tf.errors.FailedPreconditionError:
    print("refused")
"""
    done = run_python(["-c", program], timeout=120)
    assert done.stdout == "refused\n", done.stderr


def test_too_many_marks_are_left_out(current):
    names = [current.place(f"m{number}") for number in range(200)]
    assert names.count(None) == 72
