"""A random step gives the same as one program on each device and as TensorFlow runs it.

A step here is a list of random operations on random devices: with variables that are written and
read again, loops, branches and functions that write, checks, Python's functions, lists and control
dependencies.
"""

import random

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.xla.compiled_step import in_programs

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
COLUMNS = 3


@tf.function(autograph=False)
def waved(x):
    return 1.3 * tf.sin(x)


class Step:
    """What each operation of a step may take, and what it leaves."""

    def __init__(self, seed, variables, batch):
        self.random = random.Random(seed)
        self.variables = variables
        self.tensors = [batch, tf.sin(batch)]
        self.lists = []

    @property
    def x(self):
        """One of the newest tensors."""
        return self.random.choice(self.tensors[-8:])

    @property
    def y(self):
        """Any tensor."""
        return self.random.choice(self.tensors)

    @property
    def variable(self):
        return self.random.choice(self.variables)

    def gives(self, tensor):
        self.tensors.append(tensor)


def mean(x):
    return tf.reduce_mean(tf.sin(x), 0, keepdims=True)


def reads(step):
    step.gives(tf.sin(step.x) + 2 * tf.square(step.variable))


def computes(step):
    step.gives(0.5 * tf.sin(step.x) + tf.cos(step.y))


def multiplies(step):
    x = step.x
    step.gives(tf.sin(x @ tf.matmul(x, step.y, transpose_a=True)))


def writes(step):
    step.variable.assign(mean(step.x))


def adds(step):
    step.variable.assign_add(0.1 * mean(step.x))


def calls(step):
    step.gives(waved(step.x))


def calls_what_writes(step):
    variable = step.variable

    @tf.function(autograph=False)
    def written(x):
        variable.assign_add(0.1 * mean(x))
        return tf.sin(x) * variable

    step.gives(written(step.x))


def loops(step):
    variable = step.variable

    def body(i, x):
        variable.assign_add(0.1 * mean(x))
        return i + 1, tf.sin(x) + variable

    step.gives(tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), step.x])[1])


def branches(step):
    variable, x = step.variable, step.x

    def halved():
        variable.assign(0.5 * variable)
        return tf.sin(x)

    def grown():
        variable.assign_add(tf.ones_like(variable))
        return tf.cos(x) + variable

    step.gives(tf.cond(tf.reduce_sum(variable) > 1, halved, grown))


def asks_python(step):
    x = step.x
    step.gives(tf.ensure_shape(tf.numpy_function(np.cos, [x], x.dtype), x.shape))


def counts_values(step):
    x = step.x
    values, where = tf.unique(tf.cast(tf.round(3 * x[:, 0]), tf.int64))
    step.gives(x + tf.cast(tf.gather(values, where), x.dtype)[:, None])


def counts_rows(step):
    step.gives(0.1 * tf.sin(step.x) * tf.cast(tf.shape(step.y)[0], tf.float64))


def checks(step):
    tf.debugging.assert_less(tf.reduce_max(tf.abs(step.x)), tf.constant(1e9, tf.float64))


def waits(step):
    value, other = 1.1 * tf.square(step.variable), step.variable
    with tf.control_dependencies([value, step.y]):
        other.assign_add(0.01 * tf.ones_like(other))
    step.gives(tf.sin(step.y) * value)


def waits_for_group(step):
    variable = step.variable
    group = tf.group(variable.assign_add(0.01 * tf.ones_like(variable)), step.y)
    with tf.control_dependencies([group]):
        step.gives(step.x + step.variable.read_value())


def begins_list(step):
    x = step.x
    step.lists.append(tf.TensorArray(x.dtype, 2, element_shape=x.shape).write(0, x))


def ends_list(step):
    if step.lists:
        step.gives(tf.reduce_sum(step.lists.pop(0).write(1, tf.sin(step.x)).stack(), 0))


def differentiates(step):
    x, variable = step.x, step.variable
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(waved(x) * tf.sin(x) * variable)
    of_x, of_variable = tape.gradient(loss, [x, variable])
    step.gives(of_x)
    variable.assign_sub(0.01 * of_variable)


OPERATIONS = [
    *(reads, reads, computes, computes, computes, multiplies, writes, adds, calls),
    *(calls_what_writes, loops, branches, asks_python, counts_values, counts_rows, checks),
    *(waits, waits_for_group, begins_list, ends_list, differentiates),
]


def trace(seed, variables, batch):
    step = Step(seed, variables, batch)
    devices = DEVICES[: step.random.choice([1, 2, 3])]
    variables_of = {name: variables[2 * k : 2 * k + 2] for k, name in enumerate(DEVICES)}
    for _ in range(24):
        device = step.random.choice(devices)
        step.variables = variables_of[device]
        with tf.device(device):
            step.random.choice(OPERATIONS)(step)
    return step.tensors[-4:]


def results(seed, call):
    """Outputs and variables of three calls, the last one of fewer rows."""
    variables = []
    for k, device in enumerate(DEVICES):
        with tf.device(device):
            variables += [
                tf.Variable(np.full((1, COLUMNS), 0.3 + 0.1 * k + 0.05 * j)) for j in (0, 1)
            ]
    spec = tf.TensorSpec([None, COLUMNS], tf.float64)

    @tf.function(autograph=False, input_signature=[spec])
    def function(batch):
        return call(lambda rows: trace(seed, variables, rows), batch)

    values = []
    for number in (4, 4, 3):
        values += function(np.random.default_rng(number).normal(size=(number, COLUMNS)))
        values += [variable.numpy() for variable in variables]
    return values


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))]
)
def test_a_step_in_programs_does_what_it_did(seed):
    expected = results(seed, lambda step, batch: step(batch))
    actual = results(seed, lambda step, batch: in_programs(step, DEVICES, batch))
    for each, one in zip(actual, expected, strict=True):
        np.testing.assert_allclose(each, one, rtol=1e-9, atol=1e-9)


def test_what_waits_for_a_value_that_a_later_program_reads_is_done():
    """The value is made in time for both, though the program that reads it is a later one."""
    with tf.device(DEVICES[0]):
        variable, counter = tf.Variable([[2.0]]), tf.Variable([[0.0]])

    def step(batch):
        with tf.device(DEVICES[0]):
            value = 1.1 * tf.square(variable)
            with tf.control_dependencies([value]):
                counter.assign_add(tf.ones_like(counter) * tf.reduce_sum(batch))
            sine = tf.sin(batch)
        with tf.device(DEVICES[1]):
            there = tf.cos(sine)
        with tf.device(DEVICES[0]):
            return there * value

    @tf.function(autograph=False)
    def function(batch):
        return in_programs(step, DEVICES[:2], batch)

    batch = np.array([[1.0], [2.0]], "float32")
    np.testing.assert_allclose(function(batch), np.cos(np.sin(batch)) * 4.4, rtol=1e-5)
    assert counter.numpy() == 3


def test_a_number_that_is_drawn_is_drawn_by_xla():
    """Outside of all programs, where other numbers alone stay, it would be refused."""

    def step(x):
        with tf.device(DEVICES[0]):
            drawn = tf.random.uniform([])
        with tf.device(DEVICES[1]):
            return x * drawn

    function = tf.function(lambda x: in_programs(step, DEVICES[:2], x), autograph=False)
    assert 0 <= function(tf.constant(1.0)).numpy() < 1
