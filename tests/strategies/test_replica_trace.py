"""What is traced for the first replica is made again for the others."""

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.collectives import in_replica
from tfparallel.strategies.replica_trace import ReplicaTrace
from tfparallel.strategies.variables import copies
from tfparallel.tracing.graphs import operations_here, with_inner
from tfparallel.tracing.one_trace import OneTrace
from tfparallel.tracing.replay import Again

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture
def strategy():
    return tfparallel.MirroredStrategy(DEVICES)


def run(strategy, program, *arguments, calls=1):
    """What a traced program returns; `program` takes a `ReplicaTrace` and the arguments."""
    traced = tf.function(lambda *args: program(ReplicaTrace(strategy), *args), autograph=False)
    return tf.nest.map_structure(lambda leaf: leaf.numpy(), traced(*arguments))


def variable_of(strategy, *values):
    """A variable whose copies differ."""
    with strategy.scope():
        variable = tf.Variable(tf.constant(values[0]), trainable=True)
    for copy, value in zip(copies(variable), values, strict=True):
        copy.assign(value)
    return variable


def test_python_runs_once_and_each_replica_has_its_own_rows_and_copies(strategy):
    weight, calls = variable_of(strategy, 1.0, 10.0, 100.0), []

    def program(trace, x):
        def function(rows):
            calls.append(rows)
            weight.assign_add(1.0)
            return {"device": rows * weight, "same": tf.constant(3.0), "none": None}

        return [each["device"] for each in trace.run(function, tf.unstack(x))]

    results = run(strategy, program, tf.constant([1.0, 2.0, 3.0]))
    assert results == [2.0, 22.0, 303.0] and len(calls) == 1
    assert [copy.numpy() for copy in copies(weight)] == [2.0, 11.0, 101.0]


def test_operations_are_on_the_replicas_own_device(strategy):
    def program(trace, x):
        sines = trace.run(lambda rows: tf.sin(rows), tf.unstack(x))
        assert [each.device[-5:] for each in sines] == DEVICES
        return sines

    run(strategy, program, tf.zeros([3]))


def test_a_variable_without_copies_is_read_and_written_once(strategy):
    shared = tf.Variable(1.0)

    def program(trace, x):
        def function(rows):
            before = rows * shared
            shared.assign_add(2.0)
            return before, rows * shared

        return trace.run(function, tf.unstack(x))

    results = run(strategy, program, tf.constant([1.0, 2.0, 3.0]))
    assert results == [(1.0, 3.0), (2.0, 6.0), (3.0, 9.0)] and shared.numpy() == 3.0


@pytest.mark.parametrize("is_last", [False, True])
def test_a_variable_without_copies_is_not_looked_up_where_it_is_written(strategy, is_last):
    shared = tf.Variable([1.0, 2.0])

    def program(trace, x):
        def function(rows):
            if is_last:
                shared.assign_add([1.0, 1.0])
            looked_up = tf.gather(shared, tf.cast(rows, tf.int32))
            if not is_last:
                shared.assign_add([1.0, 1.0])
            return looked_up

        return trace.run(function, tf.unstack(x))

    with pytest.raises(ValueError, match="has no copy on each replica.*ResourceGather"):
        run(strategy, program, tf.constant([0.0, 1.0, 1.0]))


def test_what_a_program_has_read_of_a_variable_is_not_read_again(strategy):
    """It was of the first copy, and before a write."""
    weight = variable_of(strategy, 1.0, 2.0, 3.0)

    def program(trace, x):
        before = tf.convert_to_tensor(copies(weight)[0])
        for copy in copies(weight):
            copy.assign(5.0)
        return trace.run(lambda rows: (rows * before, rows * weight), tf.unstack(x))

    results = run(strategy, program, tf.constant([1.0, 2.0, 3.0]))
    assert results == [(1.0, 5.0), (2.0, 10.0), (3.0, 15.0)]


def test_an_eager_step_runs_each():
    strategy, calls = tfparallel.MirroredStrategy(DEVICES), []

    def function(rows):
        calls.append(rows)
        return in_replica.all_reduce(rows)

    results = ReplicaTrace(strategy).run(function, tf.unstack(tf.constant([1.0, 2.0, 3.0])))
    assert [each.numpy() for each in results] == [6.0] * 3 and len(calls) == 3


def test_replicas_meet_in_their_order(strategy):
    def program(trace, x):
        def function(rows):
            (of_all,) = in_replica.of_all_here([rows * 2])
            return rows + in_replica.all_reduce(rows), tf.stack(of_all), of_all[0] - rows

        return trace.run(function, tf.unstack(x))

    results = run(strategy, program, tf.constant([1.0, 2.0, 3.0]))
    for index, (with_sum, of_all, behind_first) in enumerate(results):
        assert with_sum == 7.0 + index and behind_first == 2.0 - (index + 1)
        np.testing.assert_array_equal(of_all, [2.0, 4.0, 6.0])


def test_a_gradient_is_that_of_the_replica(strategy):
    weight = variable_of(strategy, 1.0, 2.0, 3.0)

    def program(trace, x):
        def forward(rows):
            with tf.GradientTape(persistent=True) as tape:
                loss = in_replica.all_reduce(rows * weight**2) * rows
            return tape, loss

        def backward(k, upstream):
            tape, loss = forwards[k]
            return tape.gradient(loss, copies(weight)[k], upstream)

        forwards = trace.run(forward, tf.unstack(x))
        return trace.run(backward, range(3), [tf.constant(1.0), tf.constant(2.0), tf.constant(1.0)])

    # Σ_j u_j x_j · 2 x_k w_k
    np.testing.assert_allclose(
        run(strategy, program, tf.constant([1.0, 2.0, 3.0])),
        [8.0 * 2 * 1.0 * 1.0, 8.0 * 2 * 2.0 * 2.0, 8.0 * 2 * 3.0 * 3.0],
    )


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("how", ["loop", "branch", "function"])
def test_a_gradient_that_changes_what_was_made_before(strategy, how, is_persistent):
    """TensorFlow gives calls, loops and branches outputs for it, when somebody asks for it."""

    def called(x):
        return tf.sin(x) * x

    def forward(rows):
        with tf.GradientTape(persistent=is_persistent) as tape:
            tape.watch(rows)
            if how == "loop":
                loop = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, called(a)), (0, rows))
                result = loop[1]
            elif how == "branch":
                result = tf.cond(rows > 1.5, lambda: called(rows), lambda: tf.cos(rows))
            else:
                result = tf.function(called)(rows)
        return tape, rows, result

    def program(trace, x):
        forwards = trace.run(forward, tf.unstack(x))
        trace.run(lambda k: in_replica.all_reduce(forwards[k][1]), range(3))  # They meet.

        def backward(k, upstream):
            tape, rows, result = forwards[k]
            return tape.gradient(result, rows, upstream)

        gradients = trace.run(backward, range(3), tf.unstack(x))
        for op in operations_here():
            for each in op.inputs if op.type in ("While", "StatelessWhile") else ():
                assert not op.name.startswith("replica_") or "CPU:0" not in each.device
        return gradients

    x = tf.constant([1.0, 2.0, 3.0])
    expected = []
    for rows in tf.unstack(x):
        tape, rows, result = forward(rows)
        expected.append(rows * tape.gradient(result, rows))
    np.testing.assert_allclose(run(strategy, program, x), expected, 1e-6)


@pytest.mark.parametrize("how", ["loop", "branch", "function"])
def test_functions_read_the_replicas_own_copies(strategy, how):
    weight = variable_of(strategy, 1.0, 2.0, 3.0)
    called = tf.function(lambda x: x + weight, autograph=False)

    def function(rows):
        if how == "loop":
            return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x + weight), (0, rows))[1]
        if how == "branch":
            return tf.cond(rows > 1.5, lambda: rows + weight, lambda: rows - weight)
        return called(rows)

    def program(trace, x):
        return trace.run(function, tf.unstack(x))

    expected = {"loop": [3.0, 6.0, 9.0], "branch": [0.0, 4.0, 6.0], "function": [2.0, 4.0, 6.0]}
    assert run(strategy, program, tf.constant([1.0, 2.0, 3.0])) == expected[how]


def test_draws_by_a_seed_of_tensorflows_differ(strategy):
    tf.random.set_seed(3)

    def program(trace, x):
        return trace.run(lambda rows: tf.random.uniform([4]) + rows, tf.unstack(x))

    results = run(strategy, program, tf.zeros([3]))
    assert not np.allclose(results[0], results[1]) and not np.allclose(results[1], results[2])


@pytest.mark.parametrize("how", ["loop", "branch", "function"])
def test_draws_in_functions_differ(strategy, how):
    tf.random.set_seed(3)

    def drawn(x):
        return x + tf.random.uniform([], seed=4)

    def function(rows):
        if how == "loop":
            return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, drawn(x)), (0, rows))[1]
        if how == "branch":
            return tf.cond(rows > 1.5, lambda: drawn(rows), lambda: rows)
        return tf.function(lambda x: tf.function(drawn)(x))(rows)  # One in another.

    def program(trace, x):
        return trace.run(function, tf.unstack(x))

    results = run(strategy, program, tf.fill([3], 2.0))
    assert len({float(each) for each in results}) == 3


@pytest.mark.parametrize("how", ["alone", "function"])
def test_replicas_of_other_processes_draw_other_numbers(how):
    """Of a process that comes later; in a function, after TensorFlow was asked for its gradient."""
    tf.random.set_seed(3)

    def drawn(x):
        return x * tf.random.uniform([], seed=4)

    @tf.function(autograph=False)
    def program(x):
        gradients = []
        for index in (0, 2):
            others = [Again(1, lambda device: device, lambda handle: handle)]
            call = tf.function(drawn) if how == "function" else drawn
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                trace = OneTrace(others, index)
                outputs = trace.run(call, [x, x])
            gradients += trace.run(lambda y, tape=tape: tape.gradient(y, x), outputs)
        return gradients

    assert len({float(each) for each in program(tf.constant(2.0))}) == 4


def test_a_function_that_names_a_device_is_on_the_replicas_own(strategy):
    """And one in which nothing differs is not made again."""

    def sine(x):
        with tf.device(DEVICES[0]):
            return tf.sin(x)

    def program(trace, x):
        def function(rows):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                total = tf.function(sine)(rows) + tf.function(tf.cos)(rows)
            return total, tape.gradient(total, rows)

        before = {op.name for op in operations_here()}
        results = trace.run(function, tf.unstack(x))
        devices, functions = {}, []
        for op in operations_here():
            if op.name not in before and "PartitionedCall" in op.type:
                functions.append(op.get_attr("f").name)
                for inner in with_inner([op]):
                    if inner.type in ("Sin", "Cos"):
                        devices.setdefault(op.device[-5:], set()).add(inner.device[-5:])
        assert devices == {name: {name, ""} for name in DEVICES}
        assert len(functions) == 12 and len(set(functions)) == 6
        return results

    x = np.array([1.0, 2.0, 3.0], "float32")
    values, slopes = zip(*run(strategy, program, tf.constant(x)), strict=True)
    np.testing.assert_allclose(values, np.sin(x) + np.cos(x), 1e-6)
    np.testing.assert_allclose(slopes, np.cos(x) - np.sin(x), 1e-6)


def test_a_replica_knows_which_it_is(strategy):
    def program(trace, x):
        def function(rows):
            return rows * 0 + tf.cast(
                tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32
            )

        return trace.run(function, tf.unstack(x))

    assert run(strategy, program, tf.zeros([3])) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("how", ["alone", "loop", "function"])
def test_python_keeps_a_tape_for_each_replica(strategy, how):
    def cube(x):
        return tf.ensure_shape(tf.py_function(lambda a: a**3, [x], tf.float32), [])

    def called(x):
        if how == "loop":
            return tf.while_loop(lambda i, _: i < 1, lambda i, a: (i + 1, cube(a)), (0, x))[1]
        return cube(x) if how == "alone" else tf.function(cube)(x)

    def program(trace, x):
        def forward(rows):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(rows)
                result = called(rows)
            return tape, rows, result

        def backward(k, upstream):
            tape, rows, cubes = forwards[k]
            return tape.gradient(cubes, rows, upstream)

        forwards = trace.run(forward, tf.unstack(x))
        return trace.run(backward, range(3), [tf.constant(1.0)] * 3)

    np.testing.assert_allclose(
        run(strategy, program, tf.constant([1.0, 2.0, 3.0])), [3.0, 12.0, 27.0]
    )


def test_ragged_rows_and_masks(strategy):
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]])

    def program(trace, ragged):
        parts = []
        for k in range(3):
            part = ragged[k : k + 1]
            part.value_rowids()  # Which it keeps.
            parts.append(part)
        dense = [part.to_tensor() for part in parts]
        for k, each in enumerate(dense):
            each._keras_mask = tf.fill([1, k + 1], k < 2)

        def function(rows, padded):
            shown = tf.reduce_sum(tf.where(padded._keras_mask, padded, 0.0))
            result = padded + 1.0
            result._keras_mask = tf.logical_not(padded._keras_mask)
            return tf.reduce_sum(rows, 1), rows.value_rowids(), shown, result

        results = trace.run(function, parts, dense)
        return [(*rest, result._keras_mask) for *rest, result in results]

    for k, (sums, ids, shown, mask) in enumerate(run(strategy, program, ragged)):
        assert sums == [[1.0], [5.0], [15.0]][k] and ids.tolist() == [0] * (k + 1)
        assert shown == [1.0, 5.0, 0.0][k] and mask.tolist() == [[k == 2] * (k + 1)]


def test_a_check_of_one_replica_fails_the_step(strategy):
    def program(trace, x):
        def function(rows):
            with tf.control_dependencies([tf.debugging.assert_less(rows, 3.0)]):
                return rows * 2

        return trace.run(function, tf.unstack(x))

    assert run(strategy, program, tf.constant([1.0, 2.0, 2.5])) == [2.0, 4.0, 5.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Condition x < y"):
        run(strategy, program, tf.constant([1.0, 2.0, 3.0]))


def test_control_dependencies_across_an_all_reduce_stay_within_the_replica(strategy):
    def program(trace, x):
        def function(rows):
            early = tf.sin(rows)
            total = in_replica.all_reduce(rows)
            with tf.control_dependencies([early]):
                return early, tf.identity(total)

        pairs = trace.run(function, tf.unstack(x))
        assert [late.op.control_inputs for _, late in pairs] == [[early.op] for early, _ in pairs]
        return pairs

    run(strategy, program, tf.zeros([3]))


def test_a_step_in_a_loop(strategy):
    weight = variable_of(strategy, 1.0, 2.0, 3.0)

    def program(trace, x):
        def body(i, total):
            inner = ReplicaTrace(strategy)
            results = inner.run(lambda rows: in_replica.all_reduce(rows * weight), tf.unstack(x))
            return i + 1, total + results[1]

        return tf.while_loop(lambda i, _: i < 3, body, (0, 0.0))[1]

    assert run(strategy, program, tf.constant([1.0, 2.0, 3.0])) == 3 * 14.0


def test_meeting_in_a_branch_is_refused(strategy):
    def program(trace, x):
        def function(rows):
            return tf.cond(rows > 0, lambda: in_replica.all_reduce(rows), lambda: rows)

        return trace.run(function, tf.unstack(x))

    with pytest.raises(RuntimeError, match="Replicas cannot synchronize inside"):
        run(strategy, program, tf.zeros([3]))
