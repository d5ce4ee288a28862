"""Batches that Python code yields: training must leave the program's own arrays as they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import seeded
from tfparallel.seams.datasets import copied_from_python

DEVICES = ["CPU:0", "CPU:1"]
ROWS = 8


def aligned(array):
    """A copy at an address at which TensorFlow takes an array for a tensor without a copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays[0]) // ROWS

    def __getitem__(self, index):
        return tuple(array[index * ROWS : (index + 1) * ROWS] for array in self.arrays)


def generated(arrays):
    batches = Batches(arrays)
    return (batches[index] for index in range(len(batches)))


def from_generator(arrays):
    specs = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in arrays)
    return tf.data.Dataset.from_generator(lambda: generated(arrays), output_signature=specs)


@pytest.mark.parametrize("feed", [Batches, generated, from_generator])
def test_arrays_of_the_program_are_not_written_to(feed):
    """Story: the labels of a `PyDataset` became their differences from the predictions."""
    random = np.random.default_rng(0)
    arrays = tuple(aligned(random.normal(size=(24, 16)).astype("float32")) for _ in range(2))
    before = [array.copy() for array in arrays]
    model = seeded(lambda: tfparallel.data_parallel(net, devices=DEVICES))
    model.compile("sgd", "mse", metrics=["mse"])
    model.fit(feed(arrays), shuffle=False, verbose=0)
    model.evaluate(feed(arrays), verbose=0)
    for array, same in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, same)


def test_nor_by_a_loop_in_a_function():
    """TensorFlow's own strategy writes to them."""
    arrays = tuple(aligned(np.full((24, 16), 3.0)) for _ in range(2))
    strategy = tfparallel.MirroredStrategy(DEVICES)
    data = strategy.experimental_distribute_dataset(from_generator(arrays))
    with strategy.scope():
        kernel = tf.Variable(tf.zeros((16, 16), tf.float64))

    @tf.function
    def loss_of_epoch():
        total = tf.zeros((), tf.float64)
        for x, y in data:
            losses = strategy.run(lambda x, y: tf.reduce_sum((y - x @ kernel) ** 2), args=(x, y))
            total += strategy.reduce("sum", losses, axis=None)
        return total

    loss_of_epoch()
    assert all((array == 3).all() for array in arrays)


def net():
    return keras.Sequential([keras.Input((16,)), layers.Dense(16)])


def test_tensorflow_takes_an_array_of_the_program_for_a_tensor():
    """If this fails, `copied_from_python` may go."""
    array = aligned(np.zeros((ROWS, 16)))
    ((tensor,),) = from_generator([array])
    array[0, 0] = 1.0
    assert tensor[0, 0] == 1.0


def test_what_python_does_not_feed_is_not_copied():
    dataset = tf.data.Dataset.range(6).batch(2)
    assert copied_from_python(dataset) is dataset


def test_elements_stay_what_they_are():
    def generate():
        yield {"words": np.array(["a", "b"]), "absent": tf.experimental.Optional.empty(None)}, 1.0

    spec = {"words": tf.TensorSpec((2,), tf.string), "absent": tf.OptionalSpec(None)}
    spec = spec, tf.TensorSpec((), tf.float32)
    dataset = copied_from_python(
        tf.data.Dataset.from_generator(generate, output_signature=spec).prefetch(1)
    )
    assert dataset.element_spec == spec
    ((words, number),) = dataset
    assert words["words"].numpy().tolist() == [b"a", b"b"] and float(number) == 1.0


@pytest.mark.parametrize("in_tuple", [False, True])
def test_a_tuple_is_kept_even_of_one(in_tuple):
    """Story: a custom `train_step` that reads `data[0]` got the first row instead of the batch."""
    spec, element = tf.TensorSpec((3,), tf.int64), np.arange(3)
    if in_tuple:
        spec, element = (spec,), (element,)
    dataset = copied_from_python(
        tf.data.Dataset.from_generator(lambda: iter([element]), output_signature=spec)
    )
    assert dataset.element_spec == spec


def test_a_missing_part_stays_missing():
    """Story: `(x, None, sample_weight)` was an AttributeError."""
    spec = tf.TensorSpec((3,), tf.int64)
    dataset = tf.data.Dataset.from_generator(lambda: iter([np.arange(3)]), output_signature=spec)
    dataset = dataset.map(lambda x: (x, None, {"weight": x, "mask": None}))
    copied = copied_from_python(dataset)
    assert copied.element_spec == dataset.element_spec
    ((x, absent, rest),) = copied
    assert absent is None and rest["mask"] is None
    np.testing.assert_array_equal(rest["weight"], x)
