"""What each device does is compiled: nothing more, and nothing less."""

import contextlib
import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.lint import edges
from tfparallel.step.jit_compile import CompiledByDevice
from tfparallel.xla.compilable import is_compilable

DEVICES = ["CPU:0", "CPU:1"]
FORMS = {
    "one device": lambda model: tfparallel.data_parallel(model, devices=DEVICES[:1]),
    "data": lambda model: tfparallel.data_parallel(model, devices=DEVICES),
    "model": lambda model: tfparallel.model_parallel(model, DEVICES),
    "tensor": lambda model: tfparallel.tensor_parallel(model, DEVICES),
    "pipeline": lambda model: tfparallel.pipeline_parallel(model, DEVICES, 2),
}


def dropped_in(model):
    """A plain copy that Keras trains under the scope of a drop-in strategy."""
    with tfparallel.MirroredStrategy(DEVICES).scope():
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        if model.compiled:
            copy.compile_from_config(model.get_compile_config())
    return copy


WAYS = FORMS | {"drop-in": dropped_in}
ON_SEVERAL = [way for way in WAYS if way != "one device"]
ALL_BUT_TWO_SLOWLY = [
    way if way in ("data", "pipeline") else pytest.param(way, marks=pytest.mark.slow)
    for way in WAYS
]
X = np.random.default_rng(0).normal(size=(10, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(10, 2)).astype("float32")


def build():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def compiled(model, **options):
    model.compile("sgd", "mse", **options)
    return model


def loss_after_two_epochs(model):
    return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


# Beside a GPU, Keras takes "auto" for True, and keeps that with the model and in its file. Every
# form takes such a model, and one that nobody compiled predicts.


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """Has "auto" mean what it means where a GPU is visible."""
    for owner in (keras.Model, CompiledByDevice):
        monkeypatch.setattr(owner, "_resolve_auto_jit_compile", lambda self: True)


@pytest.mark.slow
@pytest.mark.parametrize("form", WAYS)
def test_a_model_that_was_compiled_beside_a_gpu_trains(form, beside_a_gpu):
    expected = loss_after_two_epochs(compiled(build(), jit_compile=False))
    plain = compiled(build())
    assert plain.jit_compile
    model = WAYS[form](plain)
    assert model.jit_compile
    np.testing.assert_allclose(loss_after_two_epochs(model), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", WAYS)
def test_a_model_that_was_loaded_beside_a_gpu_trains(form, beside_a_gpu, tmp_path):
    expected = loss_after_two_epochs(compiled(build(), jit_compile=False))
    compiled(build()).save(tmp_path / "model.keras")
    model = WAYS[form](keras.saving.load_model(tmp_path / "model.keras"))
    np.testing.assert_allclose(loss_after_two_epochs(model), expected, rtol=1e-5)
    model.save(tmp_path / "again.keras")
    assert keras.saving.load_model(tmp_path / "again.keras").jit_compile


@pytest.mark.slow
@pytest.mark.parametrize("form", ALL_BUT_TWO_SLOWLY)
def test_a_model_that_nobody_compiled_predicts_beside_a_gpu(form, beside_a_gpu):
    expected = build()(X).numpy()
    predictions = WAYS[form](build()).predict(X, batch_size=4, verbose=0)
    np.testing.assert_allclose(predictions, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_model_with_a_step_of_its_own_holds_one_that_is_compiled(jit_compile):
    class Student(keras.Model):
        def __init__(self, teacher):
            super().__init__()
            self.teacher, self.head = teacher, layers.Dense(2)

        def call(self, x):
            return self.head(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(self.teacher(x) - y_pred))

    def losses(scope):
        keras.utils.set_random_seed(5)
        with scope:
            teacher = compiled(build(), jit_compile=jit_compile)
            student = compiled(Student(teacher), jit_compile=jit_compile)
        return loss_after_two_epochs(teacher) + loss_after_two_epochs(student)

    expected = losses(contextlib.nullcontext())
    np.testing.assert_allclose(
        losses(tfparallel.MirroredStrategy(DEVICES).scope()), expected, rtol=1e-5
    )


@pytest.mark.slow
def test_one_program_of_several_devices_is_none(monkeypatch):
    """What the tests above would see: XLA finds a variable on another device."""
    untouched = lambda model, name: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(CompiledByDevice, "_made_for_devices", untouched)
    model = compiled(FORMS["data"](build()), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Trying to access resource"):
        loss_after_two_epochs(model)


# What "auto" means is asked of the model's devices, not of the machine's: here those of a layout
# that says GPUs.


class Unsupported(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_jit = False

    def call(self, x):
        return x


def on_gpus(model, monkeypatch):
    on_paper = dataclasses.replace(model.layout, devices=("GPU:0", "GPU:1"))
    monkeypatch.setattr(type(model), "layout", property(lambda self: on_paper), raising=False)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_auto_is_no_on_cpus(way):
    assert not compiled(WAYS[way](compiled(build()))).jit_compile


@pytest.mark.parametrize("way", ON_SEVERAL)
def test_auto_is_yes_on_gpus(way, monkeypatch):
    model = on_gpus(WAYS[way](compiled(build())), monkeypatch)
    assert compiled(model).jit_compile
    assert not compiled(model, run_eagerly=True).jit_compile


@pytest.mark.parametrize("way", ON_SEVERAL)
def test_auto_is_no_of_a_layer_that_xla_cannot_compile(way, monkeypatch):
    network = [keras.Input((6,)), layers.Dense(4), Unsupported(), layers.Dense(2)]
    with keras.saving.custom_object_scope({"Unsupported": Unsupported}):
        model = on_gpus(WAYS[way](compiled(keras.Sequential(network))), monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Nobody has asked for it.
        assert not compiled(model).jit_compile


def test_a_layer_that_xla_cannot_compile_is_said():
    def with_one():
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), Unsupported()])

    model = tfparallel.data_parallel(with_one, devices=DEVICES)
    with pytest.warns(UserWarning, match="support `jit_compile=True`"):
        compiled(model, jit_compile=True)
    assert not model.jit_compile


# What is compiled, and what is not.


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_dropout_draws_what_it_draws_on_one_device(form):
    """XLA draws others than TensorFlow's kernels: they show what is compiled."""

    def losses(make, jit_compile):
        keras.utils.set_random_seed(5)
        network = [layers.Dense(4, "tanh"), layers.Dropout(0.5), layers.Dense(2)]
        plain = keras.Sequential([keras.Input((6,)), *network])
        return loss_after_two_epochs(compiled(make(plain), jit_compile=jit_compile))

    expected = losses(lambda plain: plain, True)
    assert abs(expected[0] - losses(lambda plain: plain, False)[0]) > 0.1
    np.testing.assert_allclose(losses(FORMS[form], True), expected, rtol=1e-5)


def accumulating():
    return keras.optimizers.Adam(gradient_accumulation_steps=2)


def with_loss_scale():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())


OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "accumulating": accumulating,
    "loss scale": with_loss_scale,
}


def traced_steps(form, jit_compile=True, build=build, optimizer="sgd"):
    """What a step does on which device, and how many programs each of them runs."""
    options = {"optimizer": OPTIMIZERS[optimizer](), "loss": "mse", "jit_compile": jit_compile}
    keras.backend.clear_session()
    placed = ["CPU:1", "CPU:2"]  # The lint takes the first device for the host.
    make = {
        "one replica": lambda model: under_scope(model, placed[:1]),
        "data": lambda model: tfparallel.data_parallel(model, devices=placed),
        "own moments": lambda model: tfparallel.data_parallel(
            model, devices=placed, synchronize_batch_norm=False
        ),
        "model": lambda model: tfparallel.model_parallel(model, placed),
        "tensor": lambda model: tfparallel.tensor_parallel(model, placed),
        "pipeline": lambda model: tfparallel.pipeline_parallel(model, placed, 2),
    }[form]

    def model_of_form():
        model = make(build())
        model.compile(**options)
        return model

    return edges.traced(model_of_form, X, Y)


def under_scope(model, devices):
    with tfparallel.MirroredStrategy(devices).scope():
        return keras.models.clone_model(model)


def with_batch_norm():
    keras.utils.set_random_seed(5)
    network = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), *network])


PROGRAMS = [
    ("one replica", build, "sgd", [1, 0]),
    ("one replica", with_batch_norm, "sgd", [1, 0]),
    ("data", build, "sgd", [2, 2]),
    ("data", with_batch_norm, "sgd", [4, 4]),
    ("own moments", with_batch_norm, "sgd", [2, 2]),
    ("model", build, "sgd", [2, 2]),
    ("tensor", build, "sgd", [2, 2]),
    # One of each selects the first micro-batch's gradients: of an unknown number, it may be idle.
    ("pipeline", build, "sgd", [7, 12]),
    # Whether to update is a branch, which is cut as a step is.
    ("one replica", build, "loss scale", [1, 0]),
    ("data", build, "loss scale", [4, 3]),
    ("data", build, "accumulating", [4, 4]),
    ("model", build, "loss scale", [3, 3]),
    ("tensor", build, "loss scale", [4, 3]),
    ("pipeline", build, "loss scale", [9, 13]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "network", "optimizer", "number"), PROGRAMS)
def test_a_step_is_cut_at_its_exchanges_alone(form, network, optimizer, number):
    step = traced_steps(form, build=network, optimizer=optimizer)
    assert [step.num_programs(device) for device in ("CPU:1", "CPU:2")] == number


# Of a forward pass, of a backward pass, and of an update.
PASSES = {"MatMul", "BiasAddGrad", "TanhGrad"}
INSIDE = PASSES | {"AssignSubVariableOp"}
# What TensorFlow may make part of a product, as the processor has it.
FUSED = {"BiasAdd", "Tanh"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", ["data", "model", "tensor", "pipeline"])
def test_no_pass_and_no_update_stays_outside(form, optimizer):
    def kinds(jit_compile):
        all_kinds = traced_steps(form, jit_compile, optimizer=optimizer).kinds()
        return {kind.removeprefix("Fused") for kind in all_kinds}

    assert INSIDE <= kinds(False)
    assert not (INSIDE | FUSED) & kinds(True)


class DrawsInABranch(layers.Layer):
    def build(self, shape):
        self.seed = self.add_weight(shape=(2,), dtype="int32", initializer="ones", trainable=False)

    def call(self, x):
        def drawn():
            return x + tf.random.stateless_uniform(tf.shape(x), self.seed)

        return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, drawn)


class DrawsFromAConstant(layers.Layer):
    def call(self, x):
        return x + tf.random.stateless_uniform(tf.shape(x), [1, 2])


class DrawsBesideAString(layers.Layer):
    def call(self, x):
        def drawn(row):
            return row + tf.strings.to_number(tf.strings.as_string(tf.random.uniform([])))

        return tf.map_fn(drawn, x)


def with_layer(layer):
    keras.utils.set_random_seed(5)
    network = [layers.Dense(4), layer(), layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), *network])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["model", "tensor"])
def test_what_xla_draws_from_a_constant_is_one_devices(form):
    expected = loss_after_two_epochs(compiled(with_layer(DrawsFromAConstant), jit_compile=True))
    model = compiled(FORMS[form](with_layer(DrawsFromAConstant)), jit_compile=True)
    np.testing.assert_allclose(loss_after_two_epochs(model), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DrawsInABranch, DrawsBesideAString])
def test_a_draw_that_xla_cannot_make_is_refused(layer):
    model = FORMS["model"](with_layer(layer))
    message = "(?s)A layer draws random numbers.*compile with `jit_compile=False`"
    with pytest.raises(ValueError, match=message):
        loss_after_two_epochs(compiled(model, jit_compile=True))
    loss_after_two_epochs(compiled(model, jit_compile=False))


class Branches(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return tf.cond(self.scale > 0.5, lambda: x * self.scale, lambda: tf.tanh(x))


class MapsRows(layers.Layer):
    def call(self, x):
        return tf.map_fn(lambda row: 2 * tf.tanh(row), x)


class Counts(layers.Layer):
    """Writes what it has read, and reads what it has written."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign(self.count + 1.0)
        doubled = 2 * self.count
        self.count.assign_add(doubled)
        return x + 0.1 * self.count


@tf.function
def squashed(x):
    return 2 * tf.tanh(x)


class CallsTwice(layers.Layer):
    def call(self, x):
        return squashed(squashed(x))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "model", "tensor", "pipeline"])
@pytest.mark.parametrize("layer", [Branches, MapsRows, Counts, CallsTwice])
def test_branches_loops_functions_and_states_are_those_of_one_device(form, layer):
    if (form, layer) == ("pipeline", Counts):
        pytest.skip("A state that each micro-batch would change is refused.")

    def predictions(make):
        model = compiled(make(with_layer(layer)), jit_compile=True)
        loss_after_two_epochs(model)
        return model.predict(X, batch_size=4, verbose=0)

    np.testing.assert_allclose(
        predictions(FORMS[form]), predictions(lambda plain: plain), rtol=1e-4, atol=1e-6
    )


class Checks(layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 100.0, "too large")]):
            return tf.identity(x)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "model"])
def test_a_check_raises_where_xla_compiles(form):
    model = compiled(FORMS[form](with_layer(Checks)), jit_compile=True)
    loss_after_two_epochs(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        model.fit(1e6 * X, Y, batch_size=4, verbose=0)


def test_what_xla_can_compile_has_a_kernel():
    """What the plan asks of TensorFlow's registry: by operation, by type, within functions."""

    @tf.function
    def function(x, text):
        tf.matmul(x, x, name="product")
        tf.strings.length(text, name="length")
        tf.argmax(tf.cast(x, tf.int32), 0, name="argmax")
        tf.cond(tf.reduce_any(x > 0), lambda: x + 1, lambda: x, name="compiles")
        tf.cond(tf.reduce_any(x > 0), lambda: tf.strings.to_number(text), lambda: 0.0, name="no")

    graph = function.get_concrete_function(tf.ones([2, 2]), tf.constant("a")).graph
    compilable = {
        name: is_compilable(graph.get_operation_by_name(name))
        for name in ("product", "length", "argmax", "compiles", "no")
    }
    expected = {"product": True, "length": False, "argmax": True, "compiles": True, "no": False}
    assert compilable == expected
