"""What a layer may write while it computes a micro-batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfparallel.keras_compat import ACTIVITY_IS_SUMMED
from tfparallel.piece import Piece, working_on
from tfparallel.pipeline.allowed_writes import PassScope, check_state, writable
from tfparallel.problems import PlacementError


@pytest.fixture(name="variable")
def make_variable():
    return keras.Variable([1.0, 2.0], name="state")


class Doubles(keras.Model):
    """A functional model with a `call` of its own, which no stage would make."""

    def call(self, x):
        return 2.0 * super().call(x)


def replaced():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    call = model.call
    model.call = lambda x, **options: 2.0 * call(x, **options)
    return model


def doubles():
    inputs = keras.Input((2,))
    return Doubles(inputs, layers.Dense(3)(inputs))


@pytest.mark.parametrize("build", [doubles, replaced])
def test_a_call_of_the_models_own_is_refused(build):
    """Story: a pipeline left it out, silently."""
    with pytest.raises(PlacementError, match="layers of a model's graph.*Received: `call`"):
        check_state(build(), None)


def test_a_write_that_is_allowed_is_made_at_once(variable):
    with PassScope({id(variable): variable}, is_recomputed=False):
        variable.assign([3.0, 4.0])
        np.testing.assert_array_equal(variable._value, [3.0, 4.0])


def test_any_other_is_refused(variable):
    with PassScope({}, is_recomputed=False):
        with pytest.raises(PlacementError, match="Received: a write to 'state'"):
            variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(variable._value, [1.0, 2.0])


def test_a_micro_batch_without_rows_writes_nothing(variable):
    with working_on(Piece(2, 3, 2, 0, 2)), PassScope({id(variable): variable}, is_recomputed=False):
        variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(variable._value, [1.0, 2.0])


def test_losses_that_layers_add_are_kept():
    layer = layers.ActivityRegularization(l2=1.0)
    with PassScope({}, is_recomputed=False) as scope:
        layer(np.ones((2, 3), "float32"))
    (loss,) = scope.losses
    assert float(loss) == (6.0 if ACTIVITY_IS_SUMMED else 3.0)  # Of 2 examples, a mean.


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("is_in_function", [False, True])
def test_a_draw_that_cannot_be_repeated_is_refused_in_a_recompute(is_in_function, is_recomputed):
    scope = PassScope({}, is_recomputed)

    def normal():
        return tf.random.normal([2])

    @tf.function(autograph=False)
    def drawn():
        with scope, scope.refusing_operations():
            return tf.function(normal)() if is_in_function else normal()

    if not is_recomputed:
        assert drawn().shape == [2]
        return
    with pytest.raises(PlacementError, match="Received: a draw from RandomStandardNormal"):
        drawn()


def test_a_draw_from_the_global_seed_is_refused_in_a_recompute():
    with PassScope({}, is_recomputed=True):
        with pytest.raises(PlacementError, match="Keras's global seed generator"):
            keras.random.normal([2])


class Counting(layers.Layer):
    """Holds a metric."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x):
        self.seen.update_state(x)
        return x


def test_seeds_and_metrics_may_be_written_but_no_metric_twice():
    model = keras.Sequential([keras.Input((2,)), layers.Dropout(0.5), Counting()])
    dropout, counting = model.layers
    seed, total = dropout.seed_generator.state, counting.seen.variables[0]
    assert {id(seed), id(total)} <= {*writable(model, "never")}
    assert id(seed) in writable(model, "always")
    assert id(total) not in writable(model, "always")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layers.BatchNormalization(name="norm"), r"batch_normalization=None with \['norm'\]"),
        (layers.LSTM(2, stateful=True, name="lstm"), r"Received: \['lstm'\]"),
    ],
    ids=["batch normalization", "stateful recurrent"],
)
def test_states_that_micro_batches_change_are_refused(layer, message):
    model = keras.Sequential([keras.Input((3, 2), batch_size=4), layer])
    with pytest.raises(PlacementError, match=message):
        check_state(model, None)


def test_a_frozen_batch_normalization_keeps_no_state():
    model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization(trainable=False)])
    check_state(model, None)


def test_a_write_to_a_variable_that_keras_does_not_know_is_refused(variable):
    unknown = tf.Variable(0.0)
    scope = PassScope({id(variable): variable}, is_recomputed=False)

    def written(whose):
        with scope, scope.refusing_operations():
            whose.assign_add(tf.ones_like(whose))

    tf.function(lambda: written(variable), autograph=False)()
    np.testing.assert_array_equal(variable._value, [2.0, 3.0])
    with pytest.raises(PlacementError, match="Received: AssignAddVariableOp"):
        tf.function(lambda: written(unknown), autograph=False)()
