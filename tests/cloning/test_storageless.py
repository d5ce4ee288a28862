"""Models built without storage, and files written in a stream."""

import io
import random
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.saving import saving_lib

import tfparallel
from tfparallel.cloning.storageless import NeedsStorage, StoragelessModel

DEVICES = ["CPU:0", "CPU:1"]


def build():
    inputs = keras.Input((6,))
    x = layers.Dense(8, name="first")(inputs)
    x = layers.BatchNormalization(name="normalize")(x)
    x = layers.Dropout(0.5, name="drop")(x)
    return keras.Model(inputs, layers.Dense(2, name="second")(x))


def test_values_are_those_of_the_plain_model():
    keras.utils.set_random_seed(3)
    plain, drawn = build(), random.random()
    keras.utils.set_random_seed(3)
    built = StoragelessModel(build)
    assert random.random() == drawn
    assert all(built.waits_for(variable) for variable in built.model.variables)
    built.initialize(built.model.variables, "CPU:1")
    assert not any(built.waits_for(variable) for variable in built.model.variables)
    for one, other in zip(plain.variables, built.model.variables, strict=True):
        np.testing.assert_array_equal(other.numpy(), one.numpy())
        assert other.value.device.endswith("CPU:1")


def test_what_the_function_assigns_is_kept(tmp_path):
    path, trained = tmp_path / "model.weights.h5", build()
    trained.save_weights(path)

    def build_and_load():
        model = build()
        model.load_weights(path)
        return model

    placed = tfparallel.model_parallel(build_and_load, devices=DEVICES)
    for one, other in zip(trained.get_weights(), placed.get_weights(), strict=True):
        np.testing.assert_array_equal(other, one)


def drawn_by_numpy():
    return lambda shape, dtype=None: np.random.normal(size=shape)


def drawn_from_one_seed():
    return keras.initializers.GlorotUniform(seed=keras.random.SeedGenerator(3))


@pytest.mark.parametrize("drawn", [drawn_by_numpy, drawn_from_one_seed])
def test_initializers_that_share_a_generator_draw_in_the_order_of_the_function(drawn):
    """Keras lists layers by their depth: branches that the function builds in turn alternate."""

    def two_branches():
        inputs, initializer = keras.Input((4,)), drawn()
        branches = []
        for units in ((5, 6), (6, 3)):
            x = inputs
            for number in units:
                x = layers.Dense(number, kernel_initializer=initializer)(x)
            branches.append(x)
        return keras.Model(inputs, layers.Dense(3)(layers.concatenate(branches)))

    def weights(make):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        return make().get_weights()

    expected = weights(two_branches)
    mesh = tfparallel.Mesh(data=2, pipeline=2)
    for make in (
        lambda: tfparallel.model_parallel(two_branches, DEVICES),
        lambda: tfparallel.tensor_parallel(two_branches, DEVICES),
        lambda: tfparallel.hybrid_parallel(two_branches, mesh, balance="memory"),
    ):
        for one, other in zip(expected, weights(make), strict=True):
            np.testing.assert_array_equal(other, one)


def compiled():
    model = build()
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    "draw",
    [lambda: np.random.normal(size=(6, 8)), lambda: np.asarray(keras.random.normal((6, 8)))],
    ids=["numpy", "keras"],
)
def test_a_function_that_is_called_again_draws_the_same_numbers(draw):
    """It compiles, so it needs storage after all; its first call has drawn numbers."""

    def random_features():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(2)])
        model.layers[0].set_weights([draw(), np.zeros(8)])
        model.compile("sgd", "mse")
        return model

    def weights(make):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        return [*make().get_weights(), np.asarray(keras.random.normal((2,)))]

    expected = weights(random_features)
    actual = weights(lambda: tfparallel.model_parallel(random_features, DEVICES))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(other, one)


@pytest.mark.slow
def test_a_function_that_compiles_needs_storage():
    keras.utils.set_random_seed(3)
    state = random.getstate()
    with pytest.raises(NeedsStorage):
        StoragelessModel(compiled)
    assert random.getstate() == state
    keras.utils.set_random_seed(3)
    placed = tfparallel.model_parallel(compiled, devices=DEVICES)
    keras.utils.set_random_seed(3)
    for one, other in zip(build().get_weights(), placed.get_weights(), strict=True):
        np.testing.assert_array_equal(other, one)
    placed.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)
    assert set(placed.placement.values()) == set(DEVICES)


def test_names_of_keras_are_taken_once():
    """A function that needs storage is called a second time."""

    def unnamed():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    expected = [variable.path for variable in unnamed().variables]
    keras.backend.clear_session()
    placed = tfparallel.model_parallel(unnamed, devices=DEVICES)
    assert [variable.path for variable in placed.variables] == expected


def test_a_layer_from_elsewhere_is_copied():
    shared = layers.Dense(6, name="shared")
    shared.build((None, 6))

    def build_around():
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(2, name="own")(shared(inputs)))

    placed = tfparallel.model_parallel(build_around, devices=DEVICES)
    np.testing.assert_array_equal(placed.get_layer("shared").kernel, shared.kernel)
    placed.get_layer("shared").kernel.assign_add(np.ones((6, 6)))
    assert not np.array_equal(placed.get_layer("shared").kernel, shared.kernel)


@pytest.mark.slow
def test_a_streamed_file_holds_what_keras_writes(tmp_path):
    placed = tfparallel.model_parallel(build, devices=DEVICES)
    placed.compile(keras.optimizers.Adam(0.1), "mse")
    placed.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)
    placed.save(tmp_path / "ours.keras")
    loaded = keras.models.load_model(tmp_path / "ours.keras")
    loaded.save(tmp_path / "theirs.keras")
    names = [zipfile.ZipFile(tmp_path / f"{n}.keras").namelist() for n in ("ours", "theirs")]
    assert sorted(names[0]) == sorted(names[1])
    pairs = zip(placed.optimizer.variables, loaded.optimizer.variables, strict=True)
    for one, other in [*pairs, *zip(placed.weights, loaded.weights, strict=True)]:
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_keras_gathers_a_file_in_memory(tmp_path, monkeypatch):
    """Fails on the day that Keras streams: then checkpoint/model_files.py can go."""
    largest = []
    written = io.BytesIO.write

    class Watched(io.BytesIO):
        def write(self, data):
            count = written(self, data)
            largest.append(self.tell())
            return count

    monkeypatch.setattr(saving_lib.io, "BytesIO", Watched)
    keras.Sequential([keras.Input((64,)), layers.Dense(64)]).save(tmp_path / "model.keras")
    assert max(largest) > 4 * 64 * 64


class Keeps(layers.Layer):
    """Keeps a weight's value, or a function that has read it."""

    def __init__(self, in_function, **options):
        super().__init__(**options)
        self.in_function = in_function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        if self.in_function:
            self.product = tf.function(lambda x: x @ self.kernel.value, autograph=False)
        else:
            value = self.kernel.value
            self.product = lambda x: x @ value

    def call(self, x):
        return self.product(x)


@pytest.mark.slow
@pytest.mark.parametrize("in_function", [False, True])
def test_a_layer_that_keeps_what_it_reads_is_built_with_storage(in_function):
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((6,)), Keeps(in_function, name="keeps"),
                                 layers.Dense(2, name="out")])  # fmt: skip

    def trained(model):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(np.ones((8, 6)), np.ones((8, 2)), epochs=2, verbose=0)
        return model.get_weights()

    with pytest.raises(NeedsStorage, match="keeps/kernel' is read before it has a value"):
        StoragelessModel(build)
    placed = tfparallel.model_parallel(build, devices=DEVICES, layers_per_stage=[1, 1])
    for one, other in zip(trained(build()), trained(placed), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


class ReadsInBranch(layers.Layer):
    """Has no config, and reads its weight while Keras looks at its shapes."""

    def __init__(self, scale, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), name="weight")

    def call(self, x):
        return tf.cond(tf.timestamp() > 0.0, lambda: x * self.weight * self.scale(), lambda: x)


class SaysItsShape(ReadsInBranch):
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_why_a_model_is_cloned_that_a_function_builds_is_said():
    def of(layer):
        return lambda: keras.Sequential([keras.Input((2,)), layer(lambda: 2.0), layers.Dense(2)])

    said = r"'.*/weight' is read before .*`compute_output_spec`"
    with pytest.raises(ValueError, match=said) as raised:
        tfparallel.model_parallel(of(ReadsInBranch), DEVICES, layers_per_stage=[1, 1])
    assert "Pass the function" not in str(raised.value)
    tfparallel.model_parallel(of(SaysItsShape), DEVICES, layers_per_stage=[1, 1])
