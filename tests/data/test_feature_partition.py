"""Inputs split along their features, and the split layer that reads them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.data import by_feature

X = np.random.default_rng(0).normal(size=(20, 7))
Y = np.random.default_rng(1).normal(size=(20, 3))


@pytest.mark.parametrize(
    ("num_parts", "weights", "sizes"), [(2, None, [3, 4]), (7, None, [1] * 7), (2, [3, 1], [5, 2])]
)
def test_parts_join_to_the_whole(num_parts, weights, sizes):
    parts = by_feature(X, num_parts, weights=weights)
    assert [part.shape[1] for part in parts] == sizes
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), X)


def test_any_axis_but_that_of_the_examples():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    top, bottom = by_feature(images, 2, axis=1)
    np.testing.assert_array_equal(np.concatenate([top, bottom], axis=1), images)
    for axis in (0, -4, 4):
        with pytest.raises(ValueError, match="other than that of the examples"):
            by_feature(images, 2, axis=axis)


def test_data_sets():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for (left, right), y in by_feature(dataset, 2):
        assert left.shape[1:] == (3,) and right.shape[1:] == (4,) and y.shape[1:] == (3,)
    alone = by_feature(tf.data.Dataset.from_tensor_slices(X).batch(8), 2)
    assert [part.shape.as_list() for part in next(iter(alone))] == [[8, 3], [8, 4]]


def test_mistakes():
    with pytest.raises(ValueError, match=r"num_parts=8, axis=-1, for inputs of shape \(20, 7\)"):
        by_feature(X, 8)
    with pytest.raises(ValueError, match="The inputs must be one tensor"):
        by_feature(tf.data.Dataset.from_tensor_slices(({"a": X}, Y)).batch(4), 2)


@pytest.mark.slow
def test_a_layer_split_by_features_trains_as_the_whole_one():
    def split():
        left, right = keras.Input((3,)), keras.Input((4,))
        total = layers.Add(name="sum")(
            [
                layers.Dense(3, use_bias=False, name="left")(left),
                layers.Dense(3, name="right")(right),
            ]
        )
        return keras.Model([left, right], total)

    whole = keras.Sequential([keras.Input((7,)), layers.Dense(3)])
    parts = tfparallel.model_parallel(
        split, device_map={"left": "CPU:0", "right": "CPU:1", "sum": "CPU:1"}
    )
    kernel, bias = whole.get_weights()
    parts.set_weights([kernel[:3], kernel[3:], bias])
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for model, data in ((whole, dataset), (parts, by_feature(dataset, 2))):
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
        model.fit(data, epochs=3, verbose=0)
    kernel, bias = whole.get_weights()
    left, right, own_bias = parts.get_weights()
    np.testing.assert_allclose(np.concatenate([left, right]), kernel, atol=1e-6)
    np.testing.assert_allclose(own_bias, bias, atol=1e-6)
