"""Layers inside of composite ones, in parts: the weights of one device."""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.suites import also_slow

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
WIDTH, WORDS, LENGTH = 6, 11, 5
needs_reversible = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="this Keras has no ReversibleEmbedding"
)


@keras.saving.register_keras_serializable("composite")
class Block(layers.Layer):
    """A transformer's block as Keras's examples write it, with the feed-forward part in a model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attend = layers.MultiHeadAttention(3, 2, dropout=0.2, name="attend")
        self.forward = keras.Sequential(
            [layers.Dense(7, activation="relu", name="up"), layers.Dense(WIDTH, name="down")],
            name="forward",
        )
        self.norm, self.drop = layers.LayerNormalization(name="norm"), layers.Dropout(0.2)

    def build(self, shape):
        self.attend.build(shape, shape)
        self.forward.build(shape)
        self.norm.build(shape)
        super().build(shape)

    def call(self, x, training=None):
        x = self.norm(x + self.attend(x, x, use_causal_mask=True))
        return x + self.drop(self.forward(x), training=training)


@keras.saving.register_keras_serializable("composite")
class Written(layers.Layer):
    """Dense layers that a `call` joins; a subclass says how."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(7, activation="tanh", name="up")
        self.drop = layers.Dropout(0.3, name="drop")
        self.down = layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 7))
        super().build(shape)

    def call(self, x, training=None):
        return x + self.down(self.drop(self.up(x), training=training))


@keras.saving.register_keras_serializable("composite")
class InTensorFlow(Written):
    """With functions that take no symbolic tensor."""

    def call(self, x, training=None):
        return tf.add(x, self.down(tf.nn.relu(self.up(x))))


@keras.saving.register_keras_serializable("composite")
class AlsoRead(Written):
    """Without training others read what stays in parts."""

    def call(self, x, training=None):
        hidden = self.up(x)
        if not training:
            hidden = 1.5 * hidden / (2 - ops.ones_like(hidden)) - tf.nn.relu(hidden[..., :1])
        return x + self.down(self.drop(hidden, training=training))


@keras.saving.register_keras_serializable("composite")
class AlsoAsked(Written):
    """Does what a tensor alone can, in training and without."""

    def call(self, x, training=None):
        hidden = self.up(x)
        scale = ops.cond(ops.sum(x) > 0, lambda: ops.mean(hidden * 2), lambda: ops.mean(hidden))
        if not training and isinstance(hidden, tf.Tensor) and hidden.get_shape().rank == 3:
            hidden = ops.where(hidden == hidden + 0.0, hidden / 2, hidden)
        return x * (1 + scale) + self.down(self.drop(hidden, training=training))


@keras.saving.register_keras_serializable("composite")
class OfItsAttention(layers.Layer):
    """Calls a projection of the attention that it holds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attend = layers.MultiHeadAttention(3, 2, name="attend")

    def build(self, shape):
        self.attend.build(shape, shape)
        super().build(shape)

    def call(self, x):
        return x + self.attend(x, x) + self.attend._query_dense(x)[:, :, 0, :1]


@keras.saving.register_keras_serializable("composite")
class Twice(Written):
    """Calls its layers twice."""

    def call(self, x, training=None):
        return self.down(self.up(self.down(self.up(x)))) + x


@keras.saving.register_keras_serializable("composite")
class Deep(layers.Layer):
    """A composite layer of composite layers, one of them called twice, and an own weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = Written(name="first"), Written(name="second")
        self.project = layers.EinsumDense(
            "btd,dhk->bthk", (None, 2, 4), bias_axes="hk", activation="softmax", name="project"
        )

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        self.project.build(shape)
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", name="scale")
        super().build(shape)

    def call(self, x, training=None):
        x = self.second(self.first(x, training=training), training=training)
        weights = ops.reshape(self.project(x), (-1, LENGTH, 8))
        return self.first(x, training=training) * self.scale + weights[..., :WIDTH]


def with_blocks(block, number=1):
    def build():
        ids = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, mask_zero=block is Block, name="words")(ids)
        for k in range(number):
            x = block(name=f"block{k}")(x)
        return keras.Model(ids, layers.Dense(WORDS, name="head")(x))

    return build


def train(model, optimizer=None):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss)
    ids = np.random.default_rng(0).integers(0, WORDS, (10, LENGTH))
    ids[::3, 3:] = 0
    losses = model.fit(ids, ids[:, ::-1], batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return losses, [*state_of(model), model.predict(ids, verbose=0)]


KINDS = {
    Block: {
        "block0/attend": "heads",
        "block0/forward/up": "column",
        "block0/forward/down": "row",
    },
    Written: {
        "block0/up": "column",
        "block0/drop": "features",
        "block0/down": "row",
    },
    InTensorFlow: {"block0/up": "column, gathered", "block0/down": "column, gathered"},
    AlsoRead: {"block0/up": "column", "block0/drop": "features", "block0/down": "row"},
    AlsoAsked: {"block0/up": "column", "block0/drop": "features", "block0/down": "row"},
    OfItsAttention: {"block0/attend": "heads"},
    Twice: {"block0/up": "column, gathered", "block0/down": "column, gathered"},
    Deep: {
        "block0/first/up": "column",
        "block0/first/drop": "features",
        "block0/first/down": "row",
        "block0/second/up": "column",
        "block0/second/drop": "features",
        "block0/second/down": "row",
        "block0/project": "column, gathered",
    },
}


@pytest.mark.parametrize("block", also_slow(KINDS, [Written]))
def test_weights_are_those_of_one_device(block):
    build = with_blocks(block)
    expected = train(seeded(build))
    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES[:2]))
    ends = {"words": "vocabulary", "head": "column, gathered"}
    assert model.split == KINDS[block] | ends
    assert_equal(train(model), expected, rtol=1e-9, atol=1e-11)


def test_what_weight_decay_leaves_out_by_the_name_of_a_block():
    """Story: a part's own name, `attend/query/kernel:0`, lacks that of the block."""
    results = []
    for make in (seeded, lambda build: tfparallel.tensor_parallel(build, DEVICES[:2])):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["block0/"])
        results.append(train(seeded(lambda make=make: make(with_blocks(Written))), optimizer))
    assert_equal(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("block", KINDS)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_copy_has_the_weights_of_one_device_and_plain_files(block, num_devices, tmp_path):
    build = with_blocks(block, 2)
    expected = train(seeded(build))
    source = seeded(build)
    model = tfparallel.tensor_parallel(source, DEVICES[:num_devices])
    keras.utils.set_random_seed(0)
    actual = train(model)
    assert_equal(actual, expected, rtol=1e-9, atol=1e-11)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    for value, weight in zip(plain.get_weights(), source.get_weights(), strict=True):
        assert value.shape == weight.shape
    ids = np.arange(LENGTH)[None] % WORDS
    predictions = model.predict(ids, verbose=0)
    np.testing.assert_allclose(plain.predict(ids, verbose=0), predictions, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("block", [Block, Written, Deep])
def test_replicas_and_stages_of_split_composite_layers(block):
    build = with_blocks(block, 2)
    expected = train(seeded(build))
    devices = [f"CPU:{k}" for k in range(4)]
    for mesh in (tfparallel.Mesh(data=2, tensor=2), tfparallel.Mesh(pipeline=2, tensor=2)):
        model = seeded(lambda mesh=mesh: tfparallel.hybrid_parallel(build, mesh, devices))
        assert "block1/" in str(model.split)
        assert_equal(train(model), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2}])
def test_dropout_in_parts_is_that_of_the_whole_batch(mesh):
    """Of rows that another replica, or another micro-batch, draws the beginning of."""

    def build():
        inner = [layers.Dense(7, name="up"), layers.Dropout(0.4), layers.Dense(6, name="down")]
        inputs = keras.Input((LENGTH, 6))
        x = keras.Sequential([keras.Input((LENGTH, 6)), *inner], name="inner")(inputs)
        x = layers.MultiHeadAttention(3, 2, dropout=0.3, name="attend")(x, x)
        return keras.Model(inputs, layers.Dense(1, name="head")(x))

    def train(model):
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(12, LENGTH, 6))
        history = model.fit(x, x[..., :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return history.history, state_of(model)

    devices = [f"CPU:{k}" for k in range(4)]
    model = seeded(lambda: tfparallel.hybrid_parallel(build, tfparallel.Mesh(**mesh), devices))
    assert {"up": "column", "down": "row", "attend": "heads"}.items() <= model.split.items()
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


def test_single_layers_are_left_in_place_by_their_names():
    split = {"block0/up": None, "words": None}
    model = tfparallel.tensor_parallel(with_blocks(Written), DEVICES[:2], split=split)
    assert model.split == {"block0/down": "column, gathered", "head": "column, gathered"}
    with pytest.raises(ValueError, match="no such layer: up. The layers are .*block0/up"):
        tfparallel.tensor_parallel(with_blocks(Written), DEVICES[:2], split={"up": None})


def test_a_hint_inside_of_a_composite_layer_is_followed():
    class Hinted(Written):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            # Keras still holds the layer that was here before.
            self.down = tfparallel.layers.ColumnParallelDense(WIDTH, name="down")

    model = tfparallel.tensor_parallel(with_blocks(Hinted), DEVICES[:2])
    assert model.split["block0/down"] == "column, gathered"


def test_a_report_of_many_layers_counts_them():
    model = tfparallel.tensor_parallel(with_blocks(Block, 4), DEVICES[:2])
    split = str(model.layout).splitlines()[-1]
    assert split.startswith("  split, 9") and split.endswith(
        "% of the weights: 4 layers by column, 4 layers by row, 4 layers by heads, "
        "1 layer by vocabulary, 1 layer by column, gathered"
    )


def test_most_weights_in_place_are_a_warning_that_names_their_layers(caplog):
    def build():
        inputs = keras.Input((8,))
        x = layers.Dense(2, name="narrow")(inputs)
        x = layers.TimeDistributed(layers.Dense(50), name="wrapped")(x[:, None])
        return keras.Model(inputs, layers.Flatten()(x))

    with caplog.at_level(logging.WARNING):
        tfparallel.tensor_parallel(build, DEVICES[:2])
    assert "11% of the weights of model" in caplog.text
    assert "The largest unsplit layers are wrapped (TimeDistributed): 89%." in caplog.text


@pytest.mark.parametrize(
    ("equation", "shape", "options"),
    [
        ("abc,cde->abde", (4, 3, 4), {"bias_axes": "de"}),
        ("abc,cde->abed", (4, 4, 3), {"bias_axes": "e", "activation": "softmax"}),
        ("...x,xy->...y", 5, {"bias_axes": "y"}),
        ("abc,cd->abd", (4, 5), {}),
        ("abc,bcd->abd", (4, 5), {"bias_axes": "bd", "kernel_regularizer": "l2"}),
    ],
)
def test_einsum_dense(equation, shape, options):
    def build():
        inputs = keras.Input((4, 6))
        outputs = layers.EinsumDense(equation, shape, name="sum", **options)(inputs)
        return keras.Model(inputs, layers.Dense(1, name="head")(layers.Flatten()(outputs)))

    def train(model):
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(8, 4, 6))
        model.fit(x, x[:, 0, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return {}, state_of(model)

    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert model.split["sum"] == "column, gathered"
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("equation", "shape", "axes"),
    [
        ("abc,cde->abde", (4, 3, 4), [0, 1, 2]),
        ("...x,xy->...y", 5, [0, 1]),
        ("abc,bcd->abd", (4, 5), [0, 1, 2]),
        ("abc,bd->adc", (5, 6), [0, 1]),
    ],
)
def test_einsum_dense_is_split_along_any_axis_of_its_kernel(equation, shape, axes):
    def build():
        inputs = keras.Input((4, 6))
        last = equation[-1]
        outputs = layers.EinsumDense(equation, shape, "tanh", bias_axes=last, name="sum")(inputs)
        return keras.Model(inputs, layers.Dense(1, name="head")(layers.Flatten()(outputs)))

    def train(model):
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(8, 4, 6))
        model.fit(x, x[:, 0, :1], batch_size=4, epochs=1, shuffle=False, verbose=0)
        return {}, state_of(model)

    expected = train(seeded(build))
    for axis in axes:
        split = {"sum": axis, "head": None}
        model = seeded(lambda split=split: tfparallel.tensor_parallel(build, DEVICES, split=split))
        assert model.split == {"sum": f"axis {axis}"}
        assert model.get_layer("sum").kernel.axis == axis
        assert_equal(train(model), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("equation", "axis", "message"),
    [
        ("abc,cd->abd", 2, "It can be column or 0 or 1. Received: split={'sum': 2}"),
        ("ab...,bc->ac...", 0, "It can be column. Received: split={'sum': 0}"),
        ("abc,cd->abd", 1, "'sum' with 2 elements along axis 1 of its kernel, for 3 devices"),
    ],
)
def test_an_axis_along_which_einsum_dense_cannot_be_split(equation, axis, message):
    inputs = keras.Input((4, 6))
    layer = layers.EinsumDense(equation, (2, 6) if "..." in equation else (4, 2), name="sum")
    model = keras.Model(inputs, layer(inputs))
    with pytest.raises(ValueError, match=re.escape(message)):
        tfparallel.tensor_parallel(model, DEVICES, split={"sum": axis})


@pytest.mark.slow
def test_a_dense_layer_with_unknown_calls_is_split_by_rows():
    model = seeded(
        lambda: tfparallel.tensor_parallel(
            with_blocks(Twice), DEVICES, split={"block0/up": "column", "block0/down": "row"}
        )
    )
    assert model.split["block0/down"] == "row"
    assert_equal(train(model), train(seeded(with_blocks(Twice))), rtol=1e-9, atol=1e-11)


@needs_reversible
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tie_weights": False, "logit_soft_cap": 3.0}])
def test_an_embedding_in_reverse(options):
    def build():
        ids = keras.Input((LENGTH,), dtype="int32")
        words = layers.ReversibleEmbedding(WORDS, WIDTH, mask_zero=True, name="words", **options)
        return keras.Model(ids, words(Block(name="block0")(words(ids)), reverse=True))

    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert model.split["words"] == "vocabulary"
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


def test_a_subclass_that_defines_nothing_is_as_its_class():
    class Renamed(layers.Dense):
        """Another name."""

    class Attention(layers.MultiHeadAttention):
        """The same."""

    class Changed(layers.Dense):
        def call(self, inputs):
            return super().call(inputs) * 2

    def build():
        inputs = keras.Input((5, 6))
        x = Changed(9, name="b")(Renamed(8, name="a")(inputs))
        return keras.Model(inputs, Renamed(3, name="c")(Attention(3, 2, name="attend")(x, x)))

    model = tfparallel.tensor_parallel(build, DEVICES)
    gathered = "column, gathered"
    assert model.split == {"a": gathered, "attend": "heads", "c": gathered}


@pytest.mark.slow
def test_layers_with_methods_set_on_them_are_left_whole():
    class Patched(Block):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            compute = self.attend._compute_attention
            self.attend._compute_attention = lambda q, *args, **kw: compute(3 * q, *args, **kw)

    build = with_blocks(Patched)
    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert "block0/attend" not in model.split
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


def test_a_weight_that_is_replaced_in_a_call_is_refused():
    class Normalized(Written):
        def call(self, x):
            kernel, self.up._kernel = self.up._kernel, self.up._kernel / 2
            outputs = self.up(x)
            self.up._kernel = kernel
            return self.down(outputs)

    model = tfparallel.tensor_parallel(with_blocks(Normalized), DEVICES)
    with pytest.raises(ValueError, match="before it is split.*_kernel=.* of layer 'up'"):
        train(model)


def test_a_block_that_is_told_of_training_though_it_does_not_ask():
    class Plain(Written):
        def call(self, x):
            return self.down(self.up(x))

    class Telling(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Plain(name="inner")

        def build(self, shape):
            self.inner.build(shape)
            super().build(shape)

        def call(self, x, training=None):
            return self.inner(x, training=training)

    model = tfparallel.tensor_parallel(with_blocks(Telling), DEVICES)
    assert model.split["block0/inner/up"] == "column"


@pytest.mark.slow
def test_a_model_that_calls_a_projection_of_its_attention():
    def build():
        ids = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 6, name="words")(ids)
        attend = layers.MultiHeadAttention(3, 2, name="attend")
        x = attend(x, x) + attend._query_dense(x)[:, :, 0, :1]
        return keras.Model(ids, layers.Dense(WORDS, name="head")(x))

    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert set(model.split) == {"words", "attend", "head"}
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_block_that_calls_a_layer_of_the_block_in_it():
    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Written(name="inner")

        def build(self, shape):
            self.inner.build(shape)
            super().build(shape)

        def call(self, x):
            return self.inner(x) + ops.mean(self.inner.up(x), axis=-1, keepdims=True)

    build = with_blocks(Outer)
    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert {"block0/inner/up": "column", "block0/inner/down": "row"}.items() <= model.split.items()
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)


def test_blocks_of_one_name_in_two_models_have_names_of_their_own():
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = inputs
        for name in ("first", "second"):
            inner = keras.Input((LENGTH, WIDTH))
            x = keras.Model(inner, Written(name="block")(inner), name=name)(x)
        return keras.Model(inputs, x)

    model = tfparallel.tensor_parallel(build, DEVICES)
    assert {"first/block/up", "second/block/up"} < set(model.split)


def test_a_layer_that_is_called_twice_is_split_by_itself():
    def build():
        inputs = keras.Input((6,))
        twice = layers.Dense(6, name="twice")
        return keras.Model(inputs, twice(layers.Dense(6, name="a")(twice(inputs))))

    def train(model):
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(8, 6))
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return {}, state_of(model)

    model = seeded(lambda: tfparallel.tensor_parallel(build, DEVICES))
    assert model.split == {"twice": "column, gathered", "a": "column, gathered"}
    assert_equal(train(model), train(seeded(build)), rtol=1e-9, atol=1e-11)
