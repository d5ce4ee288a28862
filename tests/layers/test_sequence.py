"""Models whose sequences are divided over devices: the weights of one device."""

import logging
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.layers.test_composite import AlsoAsked, AlsoRead, Block, Deep, InTensorFlow, Twice
from tests.suites import also_slow
from tfparallel.layers.ring_attention import Block as AttentionBlock
from tfparallel.layers.ring_attention import attend
from tfparallel.layers.sequence_attention import ALL_TO_ALL, RING, exchange_of

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = [f"CPU:{k}" for k in range(4)]
WIDTH, WORDS, LENGTH = 6, 11, 5
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@keras.saving.register_keras_serializable("sequence")
class Positions(layers.Layer):
    """Words and their positions, as Keras's examples write it."""

    def __init__(self, mask_zero=False, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero, name="words")
        self.places = layers.Embedding(32, WIDTH, name="places")

    def build(self, shape):
        self.words.build(shape)
        self.places.build(shape)
        super().build(shape)

    def call(self, ids):
        return self.words(ids) + self.places(ops.arange(ops.shape(ids)[-1]))

    def compute_mask(self, ids, mask=None):
        return self.words.compute_mask(ids)


class Scaled(layers.Layer):
    """A user's own normalization, with a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale / ops.sqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-3)


class Centred(layers.Layer):
    """Takes the mean over the positions, which are then not apart."""

    def call(self, x):
        return x - ops.mean(x, 1, keepdims=True)


class Counting(layers.Layer):
    """Multiplies by the number of its positions, of which each device has another."""

    def call(self, x):
        number = ops.sum(ops.ones_like(x[:, :, :1]), 1, keepdims=True)
        return x * (number + ops.cast(ops.shape(x)[1], x.dtype))


def language_model(block=Block, mask_zero=False, length=LENGTH, blocks=1):
    def build():
        ids = keras.Input((length,), dtype="int32")
        x = Positions(mask_zero, name="positions")(ids)
        for k in range(blocks):
            x = block(name=f"block{k}")(x)
        return keras.Model(ids, layers.Dense(WORDS, name="head")(x))

    return build


def around(*steps, length=LENGTH):
    """A functional model of a dense layer, of what the steps make of it, and of another one."""

    def build():
        inputs = keras.Input((length, WIDTH))
        x = layers.Dense(WIDTH)(inputs)
        for step in steps:
            x = step(x)
        return keras.Model(inputs, layers.Dense(1)(x))

    return build


def train_words(model, length=LENGTH):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    ids = np.random.default_rng(0).integers(1, WORDS, (10, length))
    ids[::3, length // 2 :] = 0
    ids[1, 0] = 0
    history = model.fit(ids, ids[:, ::-1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return history.history, [*state_of(model), model.predict(ids, verbose=0)]


def train(model, epochs=2):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(10, LENGTH, WIDTH))
    y = x.sum(-1, keepdims=True)
    history = model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return history.history, [*state_of(model), model.predict(x, verbose=0)]


def divided(build, number, **axes):
    mesh = tfparallel.Mesh(sequence=number, **axes)
    return seeded(lambda: tfparallel.hybrid_parallel(build, mesh, DEVICES[: mesh.size]))


BLOCKS = [Block, InTensorFlow, AlsoRead, AlsoAsked, Twice, Deep]


@pytest.mark.parametrize("block", also_slow(BLOCKS, [Block]))
def test_weights_are_those_of_one_device(block):
    build = language_model(block)
    model = divided(build, 2)
    assert model.split["positions/words"] == model.split["head"] == "positions"
    assert_equal(train_words(model), train_words(seeded(build)), **CLOSE)


def test_a_block_is_divided_from_end_to_end():
    split = divided(language_model(), 2).split
    inner = ("norm", "dropout", "forward/up", "forward/down")
    assert {f"block0/{name}": "positions" for name in inner}.items() <= split.items()
    assert split["block0/attend"] == "positions, attention"
    assert "positions/places" not in split


@pytest.mark.slow
@pytest.mark.parametrize(("number", "length"), [(2, 1), (2, 7), (3, 3), (3, 7), (4, 3), (4, 7)])
def test_any_length_over_any_number(number, length):
    build = language_model(length=length)
    actual = train_words(divided(build, number), length)
    assert_equal(actual, train_words(seeded(build), length), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 2])
def test_a_length_that_only_the_batch_knows(length):
    build = language_model(length=None)
    actual = train_words(divided(build, 3), length)
    assert_equal(actual, train_words(seeded(build), length), **CLOSE)


@pytest.mark.slow
def test_padding_is_masked():
    build = language_model(mask_zero=True)
    assert_equal(train_words(divided(build, 2)), train_words(seeded(build)), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipeline": 2}])
@pytest.mark.parametrize("mask_zero", [False, True])
def test_replicas_and_stages_of_divided_sequences(axes, mask_zero):
    build = language_model(mask_zero=mask_zero, blocks=2)
    assert_equal(train_words(divided(build, 2, **axes)), train_words(seeded(build)), **CLOSE)


def attention(x, mask=None, **options):
    masks = {} if mask is None else {"attention_mask": mask}
    causal = options.pop("causal", False)
    layer = layers.MultiHeadAttention(options.pop("heads", 3), 2, name="attend", **options)
    return layer(x, x, use_causal_mask=causal, **masks)


ATTENTIONS = {
    "all-to-all": lambda x: attention(x),
    "all-to-all, causal": lambda x: attention(x, causal=True),
    "ring": lambda x: attention(x, heads=1),
    "ring, causal": lambda x: attention(x, heads=1, causal=True),
    "dropout": lambda x: attention(x, dropout=0.3),
    "dropout, ring": lambda x: attention(x, heads=1, dropout=0.3, causal=True),
    "mask": lambda x: attention(x, ops.abs(x[:, :, None, 0] - x[:, None, :, 0]) < 1),
    "mask of heads": lambda x: attention(x, ops.abs(x[:, None, :, :1] - 0.5) < 1),
    "no bias": lambda x: attention(x, use_bias=False, value_dim=3, output_shape=4),
    "grouped": lambda x: layers.GroupQueryAttention(2, 4, 2)(x, x, use_causal_mask=True),
    "grouped, ring": lambda x: layers.GroupQueryAttention(2, 4, 1)(x, x, use_causal_mask=True),
    "two sequences": lambda x: layers.MultiHeadAttention(2, 2)(x, x[:, :3], x[:, :3] * 2),
    "scores": lambda x: layers.MultiHeadAttention(2, 2)(x, x, return_attention_scores=True)[0],
}


@pytest.mark.parametrize("kind", also_slow(ATTENTIONS, ["ring, causal"]))
def test_attention_is_that_of_the_whole_sequence(kind):
    build = around(ATTENTIONS[kind])
    number = 3 if kind.startswith("all-to-all") else 2
    assert_equal(train(divided(build, number)), train(seeded(build)), **CLOSE)


@pytest.mark.parametrize("cls", also_slow([Scaled, Centred, Counting], [Centred]))
def test_the_judge_says_which_layers_keep_positions_apart(cls):
    build = around(lambda x: cls()(x))
    model = divided(build, 2)
    assert len(model.split) == (3 if cls is Scaled else 2)
    assert_equal(train(model), train(seeded(build)), **CLOSE)


def test_a_layer_that_draws_reads_the_whole():
    assert len(divided(around(lambda x: layers.GaussianNoise(0.1)(x)), 2).split) == 2


@pytest.mark.slow
def test_a_call_that_was_not_judged_reads_the_whole():
    """It takes the mean over the positions, or adds, by which argument it is given."""

    class Either(layers.Layer):
        def call(self, x, add=None, mean_of=None, flips=False):
            other = add if add is not None else ops.mean(mean_of, 1, keepdims=True)
            return x + (other[:, ::-1] if flips else other)

    class Caller(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.either = Either()

        def call(self, x, training=None):
            return self.either(x, add=x, flips=not training)

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x, either = layers.Dense(WIDTH)(inputs), Either()
        x = either(either(x, add=inputs), mean_of=inputs)
        return keras.Model(inputs, layers.Dense(1)(Caller()(x)))

    assert_equal(train(divided(build, 2)), train(seeded(build)), **CLOSE)


@pytest.mark.slow
class Lengthwise(layers.Layer):
    """Does something else with few positions."""

    def call(self, x):
        return x * 0.5 if x.shape[1] < 4 else x


class Averaged(layers.Layer):
    """Divides by its length where that is known."""

    def call(self, x):
        return x / ops.cast(x.shape[1] or LENGTH, x.dtype)


class Chosen(layers.Layer):
    """Has other weights for few positions."""

    def build(self, shape):
        self.long = self.add_weight(shape=shape[-1:], initializer="ones", name="long")
        self.short = self.add_weight(shape=shape[-1:], initializer="zeros", name="short")
        super().build(shape)

    def call(self, x):
        return x * (self.short if (x.shape[1] or LENGTH) < 4 else self.long)


class AtIndex(layers.Layer):
    """Adds what it has learned of each length."""

    def build(self, shape):
        shape = (LENGTH + 1, shape[-1])
        self.table = self.add_weight(shape=shape, initializer="uniform", name="table")
        super().build(shape)

    def call(self, x):
        return x + ops.take(self.table, x.shape[1] or LENGTH, axis=0)


class Whimsical(layers.Layer):
    """Draws in Python, as a layer does that is now and then left out."""

    def call(self, x):
        return x * random.choice([0.0, 1.0, 2.0])


class Checked(layers.Layer):
    """Wants all positions."""

    def call(self, x):
        tf.debugging.assert_equal(tf.shape(x)[1], LENGTH)
        return x


class Changed(layers.Layer):
    """Has a function of its own."""

    function = staticmethod(lambda x: x * 2)

    def call(self, x):
        return self.function(x)


class Perturbed(layers.Layer):
    """Moves its input along the gradient of what follows, as adversarial training does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(WIDTH, "tanh"), layers.Dense(WIDTH)

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        super().build(shape)

    def call(self, x):
        hidden = self.first(x)
        if keras.backend.is_keras_tensor(x):
            return self.second(hidden)
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            size = tf.reduce_sum(self.second(hidden) ** 2 + hidden)
        return self.second(hidden + 0.1 * tape.gradient(size, hidden))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Lengthwise, Averaged, Chosen, AtIndex, Whimsical, Checked])
def test_what_looks_at_the_length_or_draws_reads_the_whole(cls):
    # A length that is known would fail the check when it is judged.
    build = around(lambda x: cls(name="own")(x), length=None if cls is Checked else LENGTH)
    model = divided(build, 2)
    assert "own" not in model.split
    if cls is not Whimsical:
        assert_equal(train(model), train(seeded(build)), **CLOSE)


@pytest.mark.slow
def test_a_gradient_within_a_layer_is_that_of_the_whole():
    build = around(lambda x: Perturbed(name="own")(x))
    model = divided(build, 2)
    assert len(model.split) == 4
    assert_equal(train(model), train(seeded(build)), **CLOSE)


def test_a_gradient_in_what_a_layer_returns_is_that_of_the_whole():
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Dense(WIDTH, "tanh", name="one")(inputs)
        x = layers.Add()([x[:, ::-1], layers.Dense(WIDTH, "tanh")(x)])
        return keras.Model(inputs, layers.Dense(1)(x))

    def gradient(model):
        both = keras.Model(model.inputs, [model.get_layer("one").output, model.output])
        with tf.GradientTape() as tape:
            hidden, outputs = both(np.ones((2, LENGTH, WIDTH)))
            total = tf.reduce_sum(outputs)
        return tape.gradient(total, hidden)

    np.testing.assert_allclose(gradient(divided(build, 2)), gradient(seeded(build)), rtol=1e-12)


def test_what_changes_after_it_was_judged_is_judged_again():
    def changed(model):
        model.get_layer("own").function = lambda x: ops.cumsum(x, 1)
        return model

    build = around(lambda x: Changed(name="own")(x))
    assert "own" in divided(build, 2).split
    assert_equal(train(changed(divided(build, 2))), train(changed(seeded(build))), **CLOSE)


@pytest.mark.slow
def test_attention_with_a_projection_of_ones_own_reads_the_whole():
    class Centring(layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x - ops.mean(x, 1, keepdims=True))

    def replaced(model):
        layer = model.get_layer("attend")
        layer._tracker.unlock()
        layer._query_dense = Centring(layer._query_dense)
        layer._tracker.lock()
        return model

    def changed():
        return replaced(around(ATTENTIONS["ring"])())

    assert_equal(train(divided(changed, 2)), train(seeded(changed)), **CLOSE)


@pytest.mark.slow
def test_what_mixes_positions_reads_the_whole_and_is_named(caplog):
    caplog.set_level(logging.WARNING, "absl")
    build = around(
        lambda x: layers.Conv1D(WIDTH, 3, padding="same", name="conv")(x),
        lambda x: layers.GRU(4, return_sequences=True, name="gru")(x),
    )
    model = divided(build, 2)
    assert "conv (Conv1D), gru (GRU)" in caplog.text
    assert_equal(train(model), train(seeded(build)), **CLOSE)


PENALIZED = {
    "dense": lambda x: layers.Dense(WIDTH, activity_regularizer="l2")(x),
    "dropout": lambda x: layers.Dropout(0.3, activity_regularizer="l2")(x),
    "attention": lambda x: attention(x, activity_regularizer="l2"),
    "grouped": lambda x: layers.GroupQueryAttention(2, 2, 2, activity_regularizer="l2")(x, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PENALIZED)
def test_penalties_on_activities_are_added_once(kind):
    build = around(PENALIZED[kind])
    assert_equal(train(divided(build, 2)), train(seeded(build)), **CLOSE)


def test_a_model_without_sequences_is_refused():
    def build():
        inputs = keras.Input((WIDTH,))
        return keras.Model(inputs, layers.Dense(1)(layers.Dense(3, "relu")(inputs)))

    message = "2 parts by position; inputs .* mesh with sequence=2. Use sequence=1; data=2"
    with pytest.raises(ValueError, match=message):
        divided(build, 2)


def test_a_mesh_divides_weights_or_sequences():
    with pytest.raises(ValueError, match="Use tensor=1 or sequence=1"):
        tfparallel.Mesh(tensor=2, sequence=2)


def test_a_saved_model_is_plain_keras(tmp_path):
    model = divided(around(ATTENTIONS["ring"]), 2)
    x = np.ones((2, LENGTH, WIDTH))
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(plain.predict(x, verbose=0), model.predict(x, verbose=0), 1e-12)


def test_no_device_has_scores_of_the_whole_sequence():
    """Of 4 × 64 positions each block has 64 × 64; no tensor of the step is of 256 × 256."""
    length = 256
    inputs = keras.Input((length, 4))
    plain = keras.Model(inputs, layers.MultiHeadAttention(2, 2)(inputs, inputs))
    model = tfparallel.hybrid_parallel(plain, {"sequence": 4}, DEVICES)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec((1, length, 4), tf.float64)).graph
    shapes = [tuple(out.shape) for op in graph.get_operations() for out in op.outputs
              if out.shape.rank is not None]  # fmt: skip
    assert (1, 1, 64, 64) in shapes or (1, 2, 64, 64) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (length, length)]


def test_blocks_of_attention_have_the_gradients_of_the_whole():
    random = np.random.default_rng(0)
    query, key, value = (tf.constant(random.normal(size=(2, 6, 4, 3))) for _ in range(3))
    mask = tf.constant(random.random((2, 1, 6, 6)) < 0.6)

    def whole(query, key, value):
        scores = tf.einsum("btnh,bsnh->bnts", query, key)
        scores = tf.where(mask, scores, tf.constant(-1e9, tf.float64))
        return tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), value)

    def in_blocks(query, key, value):
        parts = [tf.split(each, [2, 0, 4], 1) for each in (key, value)]
        masks = tf.split(mask, [2, 0, 4], 3)
        blocks = [AttentionBlock(lambda part=part: part, lambda: None) for part in masks]
        return attend(query, *parts, blocks, DEVICES[0])

    results = []
    for function in (whole, in_blocks):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            result = function(query, key, value)
            loss = tf.reduce_sum(result * tf.cos(result))
        results.append([result, *tape.gradient(loss, [query, key, value])])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-13)


def test_the_cheaper_exchange_is_taken():
    assert exchange_of(8, 8, 4, is_causal=False) == ALL_TO_ALL
    assert exchange_of(8, 8, 2, is_causal=False) == RING
    assert exchange_of(8, 8, 2, is_causal=True) == ALL_TO_ALL
    assert exchange_of(32, 4, 4, is_causal=False) == RING
    assert exchange_of(32, 2, 4, is_causal=True) == RING


def test_devices_hold_their_positions_alone():
    lengths_and_devices = []

    class Watched(layers.Layer):
        def call(self, x):
            lengths_and_devices.append((x.shape[1], (x * 2).device))
            return x * 2

    model = divided(around(lambda x: Watched()(x)), 2)
    lengths_and_devices.clear()
    tf.function(model)(tf.ones((2, LENGTH, WIDTH)))
    assert [length for length, _ in lengths_and_devices[-2:]] == [2, 3]  # Before, it was judged.
    assert [device[-5:] for _, device in lengths_and_devices[-2:]] == DEVICES[:2]
