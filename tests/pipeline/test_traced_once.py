"""A function that is traced with the first micro-batch, and called for all."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.data.partition import row_ranges
from tfparallel.data.provenance import made_of
from tfparallel.data.shard import Shard
from tfparallel.pipeline.traced_once import TracedOnce

NUM_MICRO_BATCHES = 3


def shards_of(num_rows):
    ranges = row_ranges(num_rows, NUM_MICRO_BATCHES)
    return [
        Shard(m, NUM_MICRO_BATCHES, start, size, num_rows) for m, (start, size) in enumerate(ranges)
    ]


def called(function, x):
    """What the function returns of each micro-batch's rows of `x`, in a step that is traced."""

    @tf.function(autograph=False)
    def step(x):
        shards = shards_of(x.shape[0])
        once = TracedOnce(function, shards)
        return [once([shard.rows(x)], shard) for shard in shards]

    return step(tf.constant(x))


@pytest.mark.parametrize("num_rows", [6, 7])
def test_it_is_traced_once_and_told_of_each_micro_batch(num_rows):
    traced = []

    def function(tensors, shard):
        traced.append(shard.num_rows)
        return [tensors[0] * 2.0, shard.replica, shard.start, tf.convert_to_tensor(shard.num_rows)]

    x = np.arange(num_rows, dtype="float32")
    found = called(function, x)
    np.testing.assert_array_equal(np.concatenate([own[0] for own in found]), 2 * x)
    told = [tuple(int(each) for each in own[1:]) for own in found]
    assert told == [(shard.replica, shard.start, shard.num_rows) for shard in shards_of(num_rows)]
    assert len(traced) == 1
    assert (traced[0] == 2) if num_rows == 6 else tf.is_tensor(traced[0])


def test_what_is_not_there_and_masks_go_in_and_out():
    def function(tensors, shard):
        x, nothing = tensors
        assert nothing is None
        doubled = tf.identity(x)
        doubled._keras_mask = tf.logical_not(x._keras_mask)
        return [doubled, None]

    @tf.function(autograph=False)
    def step(x):
        shards = shards_of(6)
        once = TracedOnce(function, shards)
        found = []
        for shard in shards:
            own = shard.rows(x)
            own._keras_mask = own > 2.0
            made, nothing = once([own, None], shard)
            assert nothing is None
            found.append(made._keras_mask)
        return tf.concat(found, 0)

    np.testing.assert_array_equal(step(tf.range(6.0)), np.arange(6) <= 2)


def test_what_an_argument_was_made_of_is_known_inside():
    found = []

    def function(tensors, shard):
        found.extend(made_of(tensor) for tensor in tensors)
        return [tensors[0]]

    @tf.function(autograph=False)
    def step(x):
        shards = shards_of(6)
        TracedOnce(function, shards)([shards[0].rows(x), tf.range(tf.shape(x)[1])], shards[0])

    step(tf.ones((6, 2)))
    of_rows, constant = found
    assert of_rows
    assert not constant


def test_it_knows_what_a_gradient_reaches():
    kernel, bias, other = (tf.Variable(1.0) for _ in range(3))
    known = []

    def function(tensors, shard):
        x, y = tensors
        return [x * kernel, y + bias + tf.stop_gradient(other)]

    @tf.function(autograph=False)
    def step(x):
        shards = shards_of(6)
        once = TracedOnce(function, shards)
        own = shards[0].rows(x)
        once([own, own], shards[0])
        for place in range(2):
            sources = (0, 1, kernel, bias, other)
            known.append([once.reaches([place], source) for source in sources])

    step(tf.range(6.0))
    assert known == [[True, False, True, False, False], [False, True, False, True, False]]


def test_a_weight_that_is_looked_up_in_two_places_is_traced_for_each():
    table, traced = tf.Variable(np.ones((5, 2), "float32")), []

    def function(tensors, shard):
        traced.append(shard.replica)
        (tokens,) = tensors
        return [tf.gather(table, tokens) + tf.gather(table, tf.range(2))]

    called(function, np.zeros((6, 2), "int32"))
    assert traced[-NUM_MICRO_BATCHES:] == list(range(NUM_MICRO_BATCHES))


def test_its_graph_is_given_free():
    graphs = []

    def function(tensors, shard):
        graphs.append(weakref.ref(tensors[0].graph))
        return [tensors[0] * 2.0]

    called(function, np.arange(6.0))
    gc.collect()
    assert [graph() for graph in graphs] == [None]


# In a pipeline, against one device.


class Positions(layers.Layer):
    """A weight for each place, the same for all examples."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(1, *shape[1:]))

    def call(self, inputs):
        return self.table


def dropped_constant():
    """What the first stage sends has no rows, and the second drops parts of it."""
    inputs = keras.Input((6, 4))
    x = layers.Dense(4, name="first")(inputs)
    positions = Positions(name="positions")(inputs)
    x = layers.Dense(4, name="second")(x)
    x = layers.Add(name="add")([x, layers.Dropout(0.5, name="drop")(positions)])
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


def unused_head():
    """An output without a loss, beside one that has one."""
    inputs = keras.Input((6, 4))
    x = layers.Dense(4, name="first")(inputs)
    x = layers.Dense(4, name="second")(x)
    used = layers.Dense(3, name="used")(x)
    return keras.Model(inputs, {"used": used, "unused": layers.Dense(3, name="unused")(x)})


class Tied(layers.Layer):
    """Reads one table by tokens and by places: two kinds of sparse gradients."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(9, 4))

    def call(self, tokens):
        places = keras.ops.arange(keras.ops.shape(tokens)[1])
        return keras.ops.take(self.table, tokens, 0) + keras.ops.take(self.table, places, 0)


def tied():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Dense(4, name="second")(Tied(name="tied")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="logits")(x))


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("build", [dropped_constant, unused_head, tied])
def test_a_pipeline_trains_to_the_weights_of_one_device(build, schedule):
    generator = np.random.default_rng(0)
    of_tokens = build is tied
    x = generator.integers(0, 9, (10, 6)) if of_tokens else generator.normal(size=(10, 6, 4))
    y = generator.normal(size=(10, 6, 3))
    is_one_of_two = build is unused_head
    loss, targets = ({"used": "mse"}, {"used": y}) if is_one_of_two else ("mse", y)
    single = seeded(build)
    num_first = next(i for i, layer in enumerate(single.layers) if layer.name == "second") - 1
    pipelined = tfparallel.pipeline_parallel(
        lambda: seeded(build), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, schedule=schedule,
        layers_per_stage=[num_first, len(single.layers) - 1 - num_first],
    )  # fmt: skip
    found = []
    for model in (single, pipelined):
        decaying = keras.optimizers.AdamW(0.01, weight_decay=0.1)
        model.compile(keras.optimizers.Adagrad(0.1) if of_tokens else decaying, loss)
        told = model.fit(x, targets, batch_size=7, epochs=2, shuffle=False, verbose=0)
        found.append((told.history, state_of(model)))
    assert_equal(found[1], found[0])
