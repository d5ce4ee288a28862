"""Calls of a pipeline that draw from one seed generator."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.problems import PlacementError

TWO = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(10, 8))
Y = X.sum(1, keepdims=True)


def drops_again():
    """The third call of the Dropout, on the way round, is in the first stage."""
    x, drop = keras.Input((8,)), layers.Dropout(0.5, seed=1)
    hidden = layers.Dense(8)(drop(x))
    through = layers.Dense(8)(drop(layers.Dense(8)(hidden)))
    return keras.Model(x, layers.Dense(1)(layers.Add()([through, drop(hidden)])))


def drops_in_turn():
    x, drop = keras.Input((8,)), layers.Dropout(0.5, seed=1)
    hidden = layers.Dense(8)(drop(x))
    return keras.Model(x, layers.Dense(1)(drop(layers.Dense(8)(hidden))))


def trained(model):
    model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    return history.history, state_of(model)


@pytest.mark.slow
def test_calls_in_the_order_of_stages_draw_as_one_device(in_float64):
    model = seeded(
        lambda: tfparallel.pipeline_parallel(drops_in_turn, TWO, 2, layers_per_stage=[2, 2])
    )
    assert_equal(trained(model), trained(seeded(drops_in_turn)))


@pytest.mark.slow
def test_calls_in_another_order_are_refused():
    """Story: they drew each other's numbers."""
    model = tfparallel.pipeline_parallel(drops_again, TWO, 2, layers_per_stage=[2, 4])
    with pytest.raises(PlacementError, match="in stage 1 that draws from"):
        trained(model)
