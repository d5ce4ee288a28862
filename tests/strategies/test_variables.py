"""The variables of a strategy as a program sees them, and the rules of TensorFlow they answer.

The first half fails on the day that TensorFlow's own variables need no answer.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.strategies import variables

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def tensorflows_strategy():
    return tf.distribute.MirroredStrategy(
        DEVICES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def make_variables(strategy):
    """A mirrored variable of value 2, and one that is summed on read, as Keras's metrics are."""
    with strategy.scope():
        mirrored = tf.Variable(2.0)
        summed = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    return mirrored, summed


def test_tensorflows_mirrored_variable_has_no_handle_outside_a_replica():
    strategy = tensorflows_strategy()
    mirrored, _ = make_variables(strategy)
    with strategy.scope():
        with pytest.raises(ValueError, match="handle is not available outside the replica"):
            _ = mirrored.handle
        with tf.GradientTape() as tape:
            square = mirrored * mirrored
        with pytest.raises(ValueError, match="handle is not available outside the replica"):
            tape.gradient(square, mirrored)


def test_tensorflows_summed_variable_refuses_to_grow_outside_a_replica():
    strategy = tensorflows_strategy()
    _, summed = make_variables(strategy)
    with strategy.scope(), pytest.raises(ValueError, match="does not support `assign_add`"):
        summed.assign_add(1.0)
    with strategy.scope(), pytest.raises(ValueError, match="does not support `assign_sub`"):
        summed.assign_sub(1.0)


def test_tensorflows_summed_variable_shares_out_what_it_is_assigned():
    """A third of 1 in each of three copies, which rounds."""
    strategy = tensorflows_strategy()
    _, summed = make_variables(strategy)
    with strategy.scope():
        summed.assign(1.0)
    np.testing.assert_allclose([copy.numpy() for copy in summed.values], [1 / 3] * 3, rtol=1e-6)


def test_tensorflows_mirrored_variable_is_no_number():
    mirrored, _ = make_variables(tensorflows_strategy())
    with pytest.raises(TypeError):
        int(mirrored)
    with pytest.raises(TypeError):
        float(mirrored)


@pytest.fixture(name="strategy")
def make_strategy():
    return tfparallel.MirroredStrategy(DEVICES)


def test_each_device_holds_a_copy(strategy):
    mirrored, summed = make_variables(strategy)
    assert isinstance(mirrored, variables.MirroredVariable)
    assert isinstance(summed, variables.MetricVariable)
    for variable in (mirrored, summed):
        devices = [copy.device.removeprefix("/job:localhost/replica:0/task:0/device:")
                   for copy in variables.copies(variable)]
        assert devices == DEVICES
    with strategy.scope():
        alone = tf.constant(1.0)
    assert variables.copies(alone) == (alone,)


def test_a_gradient_outside_a_replica_is_the_first_copys(strategy):
    mirrored, _ = make_variables(strategy)
    for enter in (strategy.scope, strategy.program):
        with enter():
            assert mirrored.handle is mirrored.values[0].handle
            with tf.GradientTape() as tape:
                square = mirrored * mirrored
            assert float(tape.gradient(square, mirrored)) == 4.0
    assert (int(mirrored), float(mirrored)) == (2, 2.0)


def test_a_replica_sees_its_own_copy(strategy):
    mirrored, _ = make_variables(strategy)

    for index, copy in enumerate(mirrored.values):
        copy.assign(10.0 * index)  # Told apart, which training never does.

    @tf.function
    def squares():
        def on_replica():
            with tf.GradientTape() as tape:
                square = mirrored * mirrored
            return tape.gradient(square, mirrored)

        return strategy.run(on_replica)

    gradients = strategy.experimental_local_results(squares())
    assert [float(gradient) for gradient in gradients] == [0.0, 20.0, 40.0]


def test_what_is_written_outside_a_replica_reaches_all_copies(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0, 3.0])

    def write():
        variable.assign(value=[8.0, 0.0, 0.0])
        variable[1:].assign([5.0, 6.0])
        variable.scatter_nd_add([[0]], [7.0])
        variable.scatter_add(tf.IndexedSlices(tf.constant([1.0]), tf.constant([2])))

    write()
    with strategy.program():
        write()
    for copy in variables.copies(variable):
        np.testing.assert_array_equal(copy, [15.0, 5.0, 7.0])


@pytest.mark.parametrize("change, total", [("assign_add", 12.0), ("assign_sub", -2.0)])
def test_a_program_holds_a_sum_in_the_first_copy(strategy, change, total):
    _, summed = make_variables(strategy)
    with strategy.program():
        summed.assign(5.0)
        getattr(summed, change)(7.0)
        assert float(summed.value()) == total
    assert [float(copy) for copy in summed.values] == [total, 0.0, 0.0]
    with strategy.scope():
        assert float(summed.read_value()) == total


def test_replicas_add_each_to_their_own_copy_and_a_read_sums_them(strategy):
    _, summed = make_variables(strategy)

    @tf.function
    def add_index():
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            summed.assign_add(tf.cast(replica, tf.float32) + 1.0)

        strategy.run(on_replica)

    add_index()
    assert [float(copy) for copy in summed.values] == [1.0, 2.0, 3.0]
    with strategy.scope():
        assert float(summed.read_value()) == 6.0
        # Outside a replica a sum is set, not shared out: 10 + 0 + 0.
        summed.assign(10.0)
        assert float(summed.read_value()) == 10.0
    assert [float(copy) for copy in summed.values] == [10.0, 0.0, 0.0]
    add_index()
    with strategy.scope():
        assert float(summed.read_value()) == 16.0


def test_a_mean_on_read_keeps_tensorflows_rules(strategy):
    with strategy.scope():
        mean = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        mean.assign(3.0)
    assert [float(copy) for copy in mean.values] == [3.0] * 3
