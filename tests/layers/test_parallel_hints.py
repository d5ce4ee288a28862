"""Layers that a model's definition asks to be split: plain Keras, until somebody splits them."""

import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.extend import extend
from tfparallel.layers import (
    ChannelParallelConv2D,
    ChannelReducingConv2D,
    ColumnParallelDense,
    ParallelMultiHeadAttention,
    RowParallelDense,
    SpatialParallelConv2D,
    SpatialParallelPooling2D,
    VocabParallelEmbedding,
)
from tfparallel.layers.composite import Group
from tfparallel.layers.parallel_hints import hint_of
from tfparallel.layers.split_plan import plan

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = ["CPU:0", "CPU:1"]
PLAIN = {
    VocabParallelEmbedding: layers.Embedding,
    ParallelMultiHeadAttention: layers.MultiHeadAttention,
    ColumnParallelDense: layers.Dense,
    RowParallelDense: layers.Dense,
    ChannelParallelConv2D: layers.Conv2D,
    ChannelReducingConv2D: layers.Conv2D,
    SpatialParallelConv2D: layers.Conv2D,
}


def texts(of=lambda cls: cls):
    """Rows first, then two columns: nothing that a graph alone suggests."""
    ids = keras.Input((4,), dtype="int64")
    x = of(VocabParallelEmbedding)(9, 6)(ids)
    x = of(ParallelMultiHeadAttention)(3, 2)(x, x)
    inner = keras.Sequential(
        [
            keras.Input((4, 6)),
            of(RowParallelDense)(7, activation="gelu"),
            of(ColumnParallelDense)(5, activation="tanh"),
            of(ColumnParallelDense)(6),
        ],
        name="inner",
    )
    return keras.Model(ids, layers.Dense(1, name="e")(layers.Flatten()(inner(x))))


TEXTS = {"embedding": "vocabulary", "multi_head_attention": "heads", "dense": "row"}
TEXTS |= dict.fromkeys(["dense_1", "dense_2"], "column, gathered")


def pictures(of=lambda cls: cls):
    """Rows of the height, through pooling, then channels."""
    x = inputs = keras.Input((8, 6, 2))
    x = of(SpatialParallelConv2D)(3, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D(3, 2)(x)
    x = of(ChannelReducingConv2D)(5, 1)(x)
    x = of(ChannelParallelConv2D)(4, 1, activation="relu")(x)
    x = of(ChannelReducingConv2D)(2, 1)(x)
    return keras.Model(inputs, layers.Dense(1, name="e")(layers.Flatten()(x)))


PICTURES = {"conv2d": "height", "batch_normalization": "height", "max_pooling2d": "height"}
PICTURES |= {"conv2d_1": "row", "conv2d_2": "column", "conv2d_3": "row"}


def plain(build):
    return lambda: seeded(lambda: build(PLAIN.get))


def by_hand(build):
    return lambda: seeded(build)


def fresh(make):
    """Names are counted from zero, as in a program of its own."""
    keras.backend.clear_session()
    return make()


def train(model):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    generator, shape = np.random.default_rng(0), model.input_shape[1:]
    x = generator.integers(0, 9, (10, *shape)).astype("float64")
    history = model.fit(x, np.ones((10, 1)), batch_size=4, shuffle=False, verbose=0).history
    return history, state_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "split"), [(texts, TEXTS), (pictures, PICTURES)])
def test_layers_are_split_as_they_are_written(build, split):
    expected = train(fresh(plain(build)))
    model = fresh(lambda: tfparallel.tensor_parallel(by_hand(build), DEVICES))
    assert model.split == split
    # The sums of parts are rounded in another order.
    assert_equal(train(model), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("build", "split"), [(texts, TEXTS), (pictures, PICTURES)])
def test_a_built_model_keeps_what_was_written(build, split):
    model = fresh(by_hand(build))
    copy = tfparallel.tensor_parallel(model, DEVICES)
    assert copy.split == split
    again = tfparallel.tensor_parallel(copy, DEVICES)
    assert again.split == split
    for values in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(*values)


@pytest.mark.slow
def test_it_is_plain_keras_by_itself(tmp_path):
    for build in (texts, pictures):
        model, plain_model = fresh(by_hand(build)), fresh(plain(build))
        configs = [(type(layer), layer.get_config()) for layer in model._flatten_layers()]
        expected = [(type(layer), layer.get_config()) for layer in plain_model._flatten_layers()]
        assert str(configs) == str(expected)
        parts = fresh(lambda build=build: tfparallel.tensor_parallel(by_hand(build), DEVICES))
        for each in (model, parts):
            each.save(tmp_path / "model.keras")
            with zipfile.ZipFile(tmp_path / "model.keras") as archive:
                assert b"arallel" not in archive.read("config.json")
            loaded = keras.models.load_model(tmp_path / "model.keras")
            for value, other in zip(loaded.get_weights(), plain_model.get_weights(), strict=True):
                np.testing.assert_array_equal(value, other)


@pytest.mark.slow
def test_other_forms_take_it_as_plain_keras():
    def build():
        return keras.Sequential(
            [keras.Input((3,)), RowParallelDense(7, activation="tanh"), ColumnParallelDense(1)]
        )

    expected = train(seeded(build))
    for make in (
        lambda: tfparallel.data_parallel(by_hand(build), devices=DEVICES),
        lambda: tfparallel.model_parallel(by_hand(build), DEVICES),
        lambda: tfparallel.pipeline_parallel(by_hand(build), DEVICES, num_micro_batches=2),
    ):
        assert_equal(train(make()), expected)


def test_the_call_outweighs_the_definition():
    def build():
        return keras.Sequential(
            [keras.Input((6,)), RowParallelDense(7, name="a"), ColumnParallelDense(6, name="b")]
        )

    assert tfparallel.tensor_parallel(build, DEVICES).split == {
        "a": "row",
        "b": "column, gathered",
    }
    split = {"a": None, "b": "row"}
    assert tfparallel.tensor_parallel(build, DEVICES, split=split).split == {"b": "row"}


def test_a_single_layer_is_split_by_height_where_that_is_asked_for():
    def build():
        return keras.Sequential(
            [keras.Input((7, 6, 2)), layers.AveragePooling2D(3, 2, "same", name="pool"),
             layers.Conv2D(3, 2, name="a"), layers.Flatten(name="b")]
        )  # fmt: skip

    model = seeded(build)
    parts = tfparallel.tensor_parallel(model, DEVICES, split={"pool": "height", "a": None})
    assert parts.split == {"pool": "height"}
    x = np.random.default_rng(0).normal(size=(3, 7, 6, 2))
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(parts.predict(x, verbose=0), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match=r"6 output rows.*'pool': 'height'\}. Leave it out"):
        plan(Group(model, graph=model), 6, {"pool": "height"})


def test_what_is_made_of_a_split_layers_class_is_plain_and_not_noted():
    layer = layers.Dense(3)
    extend(layer, ColumnParallelDense)
    other = type(layer)(4)
    assert type(layer) is not layers.Dense and type(other) is layers.Dense
    assert hint_of(other) is None


# --- What is refused --------------------------------------------------------------------------


class MyDense(ColumnParallelDense):
    pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RowParallelDense(2, "no"), ValueError, "`RowParallelDense` takes.*identifier: no"),
        (lambda: RowParallelDense(), TypeError, r"arguments of `keras.layers.Dense`. .*'units'"),
        (lambda: VocabParallelEmbedding(3, 4, width=5), ValueError, r"`Vocab.*{'width': 5}"),
        (lambda: SpatialParallelPooling2D(2), TypeError, "`SpatialParallelPooling2D` stands for"),
        (lambda: MyDense(2), TypeError, "`MyDense` stands for none. Received: a call of `MyDense`"),
    ],
)
def test_a_wrong_argument_names_the_class_that_was_written(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (
            lambda: ColumnParallelDense(1, name="a"),
            (6,),
            "'a' written as ColumnParallelDense; layer 'a' with 1 units, for 2 devices",
        ),
        (lambda: ParallelMultiHeadAttention(1, 2, name="a"), None, "'a' with 1 heads, for 2"),
        (lambda: VocabParallelEmbedding(1, 2, name="a"), (3,), "'a' with 1 vocabulary entries"),
        (
            lambda: ChannelParallelConv2D(4, 1, groups=2, name="a"),
            (4, 4, 2),
            r"or groups.*written as ChannelParallelConv2D. Leave .* split=\{'a': None\}",
        ),
        (
            lambda: SpatialParallelConv2D(4, 4, name="a"),
            (4, 4, 2),
            "at least 2 output rows.*'a' written as SpatialParallelConv2D. Leave it in place",
        ),
        (
            lambda: layers.TimeDistributed(ColumnParallelDense(4, name="a")),
            (4, 4),
            "inside other Keras layers: 'a' written as ColumnParallelDense. Use plain Keras layers",
        ),
    ],
)
def test_what_cannot_be_split_as_it_is_written(make, shape, message):
    def build():
        if shape is not None:
            return keras.Sequential([keras.Input(shape), make(), layers.Dense(8, name="b")])
        inputs = keras.Input((4, 6))
        return keras.Model(inputs, layers.Dense(8, name="b")(make()(inputs, inputs)))

    with pytest.raises(ValueError, match=message):
        tfparallel.tensor_parallel(build, DEVICES)
