"""What each device does is compiled: nothing more, and nothing less."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.lint import edges
from tfparallel.seams.tensorflow import compile_at_first_run, without_fused_kernels
from tfparallel.step.xla import CompiledByDevice, compiled_if

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


def marked(function) -> list[str]:
    """The types of operations that TensorFlow was told to compile, in a function of tensors."""
    graph = function.get_concrete_function().graph
    return [op.type for op in graph.get_operations() if _is_marked(op)]


def _is_marked(operation) -> bool:
    try:
        return operation.get_attr("_XlaCompile")
    except ValueError:
        return False


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


@pytest.mark.parametrize("form", ALL_BUT_TWO_SLOWLY)
def test_a_model_that_nobody_compiled_predicts_beside_a_gpu(form, beside_a_gpu):
    expected = build()(X).numpy()
    found = WAYS[form](build()).predict(X, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


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


def test_one_program_of_several_devices_is_none(monkeypatch):
    """What the tests above would see: XLA finds a variable on another device."""
    monkeypatch.setattr(CompiledByDevice, "_not_as_one_program", contextlib.nullcontext)
    model = compiled(FORMS["data"](build()), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Trying to access resource"):
        loss_after_two_epochs(model)


# "auto" is no on several devices, also where a layout says GPUs.


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
def test_auto_is_no_on_several_gpus(way, monkeypatch):
    model = on_gpus(WAYS[way](compiled(build())), monkeypatch)
    assert not compiled(model).jit_compile
    assert compiled(model, jit_compile=True).jit_compile


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


# Of a forward pass, of a backward pass, and of an update.
PASSES = {"MatMul", "BiasAddGrad", "TanhGrad"}
INSIDE = PASSES | {"AssignSubVariableOp"}
# What TensorFlow may make part of a product, as the processor has it.
FUSED = {"BiasAdd", "Tanh"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "model", "tensor", "pipeline"])
def test_no_pass_and_no_update_stays_outside(form):
    def kinds(jit_compile):
        keras.backend.clear_session()
        placed = ["CPU:1", "CPU:2"]  # The lint takes the first device for the host.
        make = {
            "data": lambda model: tfparallel.data_parallel(model, devices=placed),
            "model": lambda model: tfparallel.model_parallel(model, placed),
            "tensor": lambda model: tfparallel.tensor_parallel(model, placed),
            "pipeline": lambda model: tfparallel.pipeline_parallel(model, placed, 2),
        }[form]
        step = edges.traced(lambda: compiled(make(build()), jit_compile=jit_compile), X, Y)
        return {kind.removeprefix("Fused") for kind in step.kinds()}

    assert INSIDE <= kinds(False)
    compiled_kinds = kinds(True)
    assert "XlaRun" in compiled_kinds
    assert not (INSIDE | FUSED) & compiled_kinds


def test_tensorflow_loses_the_marks_of_what_it_fuses():
    """The canary of `without_fused_kernels`."""

    def kinds():
        @tf.function
        def function(x, w, b):
            with tf.device("CPU:1"), compiled_if(True):
                return tf.tanh(tf.nn.bias_add(x @ w, b))

        return edges.graphs_of(lambda: function(x, w, b)).kinds()

    x, w, b = tf.ones([3, 3]), tf.ones([3, 3]), tf.ones([3])
    assert "FusedMatMul" in kinds()
    with without_fused_kernels():
        assert "XlaRun" in kinds()
    assert "FusedMatMul" in kinds()


def test_checks_and_sums_are_not_compiled():
    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
    def function(x):
        with compiled_if(True):
            tf.raw_ops.Assert(condition=x > 0, data=[x])
            x = tf.raw_ops.CollectiveReduceV2(
                input=x,
                group_size=1,
                group_key=1,
                instance_key=1,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            return x * 2

    kinds = marked(function)
    assert "Mul" in kinds
    assert not {"Assert", "CollectiveReduceV2"} & {*kinds}


def test_a_check_in_what_is_compiled_raises():
    @tf.function
    def function(x):
        with compiled_if(True):
            with tf.control_dependencies([tf.debugging.assert_positive(x, "not positive")]):
                y = tf.sqrt(x) + 1
            return y

    assert float(function(tf.constant(4.0))) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match="not positive"):
        function(tf.constant(-4.0))


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


@pytest.mark.parametrize("form", ["model", pytest.param("tensor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (DrawsInABranch, "draws random numbers in a loop, a branch or a function"),
        (DrawsFromAConstant, "draws random numbers from a seed that never changes"),
    ],
)
def test_a_draw_that_xla_would_not_make_is_refused(form, layer, message):
    def with_one():
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), layer(), layers.Dense(2)])

    model = FORMS[form](with_one())
    with pytest.raises(ValueError, match=f"(?s){message}.*compile with `jit_compile=False`"):
        loss_after_two_epochs(compiled(model, jit_compile=True))
    loss_after_two_epochs(compiled(model, jit_compile=False))


def test_nothing_is_marked_unless_it_is_wanted():
    @tf.function(input_signature=[tf.TensorSpec([3], tf.float32)])
    def function(x):
        with compiled_if(False):
            return x * 2

    assert not marked(function)
    with compiled_if(True):  # Eagerly there is nothing to mark.
        assert float(tf.constant(2.0) * 2) == 4


def test_tensorflow_draws_other_numbers_before_it_compiles():
    """The canary of `compile_at_first_run`: shapes that come for the first time run uncompiled."""

    def drawn(sizes):
        @tf.function(reduce_retracing=True, input_signature=[tf.TensorSpec([None], tf.float32)])
        def function(x):
            with tf.xla.experimental.jit_scope():
                return x + tf.random.stateless_uniform(tf.shape(x), [1, 2])

        return [function(tf.zeros(size)).numpy() for size in sizes]

    @tf.function(jit_compile=True)
    def by_xla(x):
        return x + tf.random.stateless_uniform(tf.shape(x), [1, 2])

    sizes = [5, 6]
    expected = [by_xla(tf.zeros(size)).numpy() for size in sizes]
    before = compile_at_first_run(False)
    try:
        late = drawn(sizes)
        compile_at_first_run()
        at_once = drawn(sizes)
    finally:
        compile_at_first_run(before)
    np.testing.assert_array_equal(at_once[0], expected[0])
    np.testing.assert_array_equal(at_once[1], expected[1])
    assert not np.array_equal(late[1], expected[1])
