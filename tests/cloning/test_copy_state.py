"""A clone is like its model, or refused: for every builder that copies a built model."""

import os
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel.cloning import verify_clone
from tfparallel.cloning.copy_state import NotAlike

TWO = ["CPU:0", "CPU:1"]
FOUR = [*TWO, "CPU:2", "CPU:3"]
BUILDERS = {
    "data": lambda model: tfparallel.data_parallel(model, devices=TWO),
    "model": lambda model: tfparallel.model_parallel(model, TWO),
    "pipeline": lambda model: tfparallel.pipeline_parallel(model, TWO, 2, balance="memory"),
    "tensor": lambda model: tfparallel.tensor_parallel(model, TWO),
}
every_builder = pytest.mark.parametrize("clone", BUILDERS.values(), ids=BUILDERS)


def around(*inner):
    """The layers, between two that every builder can place."""
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, name="first"), *inner, layers.Dense(4)]
    )


def assert_alike(copy, model, shape=(5, 6)):
    x = np.random.default_rng(1).normal(size=shape)
    np.testing.assert_allclose(copy(x), model(x), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(copy.variables, model.variables, strict=True):
        assert ours.path == theirs.path
        assert ours.trainable == theirs.trainable, theirs.path


@every_builder
def test_operations_that_read_a_weight_read_that_of_the_clone(clone):
    """Story: they read the model's, so that the clone's lost their gradients."""
    tied, inputs = layers.Dense(8, use_bias=False, name="tied"), keras.Input((6,))
    again = keras.ops.matmul(tied(layers.Dense(8)(inputs)), tied.kernel)
    model = keras.Model(inputs, layers.Dense(3)(again))
    copy = clone(model)
    for each in (model, copy):
        each.compile(keras.optimizers.SGD(0.1), "mse")
        each.fit(np.ones((4, 6)), np.ones((4, 3)), batch_size=4, epochs=2, verbose=0)
    assert_alike(copy, model)


@every_builder
def test_flags_of_single_variables(clone):
    """Story: a kernel that was frozen by itself was thawed in the clone; weights 18% off."""
    model = around()
    model.get_layer("first").kernel.trainable = False
    model.layers[1].trainable = False
    model.layers[1].bias.trainable = True
    model.layers[1].bias.overwrite_with_gradient = True
    model.layers[1].bias.constraint = keras.constraints.NonNeg()
    copy = clone(model)
    assert_alike(copy, model)
    bias = copy.layers[1].bias
    assert bias.overwrite_with_gradient
    assert isinstance(bias.constraint, keras.constraints.NonNeg)
    assert [v.path for v in copy.trainable_variables] == [
        v.path for v in model.trainable_variables
    ]


@every_builder
def test_lora_keeps_its_alpha(clone):
    """Story: Keras builds a layer from its config with alpha = rank; predictions were wrong."""
    model = around()
    model.layers[0].enable_lora(2, lora_alpha=8)
    model.layers[0].lora_kernel_b.assign(tf.ones((2, 8)))
    copy = clone(model)
    assert copy.layers[0].lora_alpha == 8
    assert_alike(copy, model)


@pytest.mark.parametrize("name", [*BUILDERS, "hybrid"])
def test_a_call_that_was_replaced_on_the_layer_is_refused(name):
    """Story: the clone computed what the class does."""

    def hybrid(model):
        mesh = tfparallel.Mesh(data=2, pipeline=2)
        return tfparallel.hybrid_parallel(model, mesh, FOUR, num_micro_batches=2, balance="memory")

    model = around()
    call = model.layers[0].call
    model.layers[0].call = lambda x, **_: 2.0 * call(x)
    message = "Received: layer 'sequential.*/first': its method `call` was replaced by <function"
    with pytest.raises(NotAlike, match=message):
        (BUILDERS | {"hybrid": hybrid})[name](model)


class Sum(layers.Layer):
    """Adds a weight of another layer, or of its own."""

    def __init__(self, of=None, **kwargs):
        super().__init__(**kwargs)
        self.of = of

    def build(self, shape):
        self.bias = self.add_weight(shape=(8,)) if self.of is None else self.of.bias

    def call(self, inputs):
        return inputs + self.bias


@every_builder
def test_a_variable_of_two_layers_is_refused(clone):
    """Two variables would begin with equal values, and be trained apart."""
    first = layers.Dense(8, name="first")
    model = keras.Sequential([keras.Input((6,)), first, Sum(first, name="sum"), layers.Dense(4)])
    model.layers[1].get_config = lambda: {"name": "sum"}
    with pytest.raises(NotAlike, match="shares variable '.*first/bias' with another layer"):
        clone(model)


class Tied(layers.Layer):
    """Puts out logits of an embedding that it holds."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, inputs):
        return inputs @ keras.ops.transpose(self.embedding.embeddings)

    def get_config(self):
        embedding = keras.saving.serialize_keras_object(self.embedding)
        return {**super().get_config(), "embedding": embedding}

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(config["embedding"])
        return cls(**{**config, "embedding": embedding})


def tied_embedding():
    inputs, shared = keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, name="shared")
    return keras.Model(inputs, Tied(shared, name="tied")(layers.Dense(4)(shared(inputs))))


def nested_and_called_twice():
    inputs, shared = keras.Input((6,)), layers.Dense(6, name="shared")
    nested = keras.Sequential([shared, layers.Dense(2)], name="tied")
    return keras.Model(inputs, nested(shared(shared(inputs))))


@every_builder
@pytest.mark.parametrize("build", [tied_embedding, nested_and_called_twice])
def test_a_layer_that_two_others_hold_is_named(clone, build):
    """Story: "layer 'after the last' is a nothing", or a raw error of Keras's."""
    model = build()
    said = f"layer 'shared' is shared by '{model.name}' and 'tied', but the clone"
    with pytest.raises(NotAlike, match=f"Received: {said}"):
        clone(model)


class Helper:
    """No value, and nothing that Keras tracks."""

    factor = 1.0


class Helped(layers.Layer):
    """Computes with an object of the user's own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.helper = Helper()

    def call(self, inputs):
        return inputs * self.helper.factor


@every_builder
def test_what_cannot_be_seen_is_found_by_the_outputs(clone):
    model = around(Helped(name="helped"))
    assert_alike(clone(model), model)
    model.get_layer("helped").helper.factor = 3.0
    with pytest.raises(NotAlike, match="layer 'helped' and its clone compute different outputs"):
        clone(model)


class Grown(layers.Layer):
    """Has more layers after it was built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = []

    def call(self, inputs):
        for step in self.steps:
            inputs = step(inputs)
        return inputs


@every_builder
def test_layers_that_no_config_makes_are_refused(clone):
    grown = Grown(name="grown")
    grown.steps.append(layers.Dense(8))
    with pytest.raises(NotAlike, match="'.*' is a .*, but its clone has"):
        clone(around(grown))


def test_all_problems_are_told_at_once():
    model = around(Sum(name="one"), Sum(name="two"))
    for layer in model.layers[1:3]:
        layer.more = tf.Variable(1.0)
    with pytest.raises(NotAlike, match="(?s)one.*`more`.*two.*`more`.*Pass the function"):
        BUILDERS["model"](model)


@every_builder
def test_layers_after_a_clone_draw_what_they_draw_on_one_device(clone):
    keras.utils.set_random_seed(3)
    model = around(layers.Dropout(0.5))
    before = random.getstate()
    clone(model)
    assert random.getstate() == before


@every_builder
def test_a_comparison_changes_nothing(clone):
    """A model that counts its calls is called for the comparison, and does not notice."""

    class Counting(layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1.0)
            return inputs

    model = around(Counting(name="counting"))
    copy = clone(model)
    for each in (model, copy):
        assert float(each.get_layer("counting").calls) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: keras.applications.MobileNetV2((None, None, 3), 0.35, weights=None,
                                                include_top=False), (2, 32, 32, 3)),
        (lambda: keras.Sequential([keras.Input((None,), dtype="int32"), layers.Embedding(1, 4),
                                   layers.Dense(2)]), None),
        (lambda: keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(2)]), None),
    ],
    ids=["unknown lengths", "a vocabulary of one", "sparse"],
)  # fmt: skip
def test_models_that_not_every_batch_fits(build, shape):
    model = build()
    copy = BUILDERS["data"](model)
    if shape is not None:
        assert_alike(copy, model, shape)


def test_a_clone_is_tried_on_pictures_that_a_filter_fits_into():
    model = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(2, 3)])
    first, *_ = verify_clone._batches(model)
    assert first.shape == (2, 32, 32, 3)


@pytest.mark.slow
def test_a_depthwise_convolution_puts_out_what_nobody_computed():
    """A canary: what is smaller than the filter has no output, and a batch of it proves nothing."""
    program = (
        "import tensorflow as tf\n"
        "pictures, filters = tf.ones((2, 2, 2, 4)), tf.ones((3, 3, 4, 1))\n"
        "print(tf.nn.depthwise_conv2d(pictures, filters, [1, 1, 1, 1], 'VALID').shape)"
    )
    shapes = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": setting},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout.strip()
        for setting in ("0", "1")
    ]  # fmt: skip
    assert shapes == ["(2, 0, 0, 4)", "(2, 2, 2, 4)"]


@pytest.mark.parametrize("form", ["model", "pipeline", "tensor"])
def test_a_lambda_that_was_given_another_function(form):
    model = around(layers.Lambda(lambda x: x * 2, name="times"))
    model.get_layer("times").function = lambda x: x * 3
    assert_alike(BUILDERS[form](model), model)


@every_builder
def test_functions_that_a_config_names(clone):
    """Story: a layer of a function of the user's own, as in Keras's siamese network."""

    def halved(x):
        return x * 0.5

    def squared(x):
        return x * x

    model = around(layers.Lambda(halved), layers.Dense(8, activation=squared))
    assert_alike(clone(model), model)


@every_builder
def test_lambdas_that_read_names_of_their_module(clone):
    """Story: a config keeps a lambda's code, but `keras` was no name in the copy."""
    model = around(
        layers.Lambda(lambda x: keras.ops.tanh(x)),
        layers.Dense(8, activation=lambda x: keras.ops.square(x)),
    )
    assert_alike(clone(model), model)


@every_builder
@pytest.mark.parametrize("is_lambda", [True, False])
def test_a_function_that_reads_another_layer_is_refused(clone, is_lambda):
    """The copy would read the original layer, which is not trained."""
    scale = layers.Dense(8, name="scale")

    def scaled(x):
        return x * scale.kernel[0]

    function = (lambda x: x * scale.kernel[0]) if is_lambda else scaled
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Lambda(function)(scale(inputs)))
    with pytest.raises(ValueError, match="reads 'scale', which belongs to the original model"):
        clone(model)


@pytest.mark.parametrize("form", ["model", "pipeline", "tensor"])
def test_a_function_may_read_a_layer_that_is_no_part_of_the_model(form):
    teacher = layers.Dense(8)
    teacher.build((None, 8))
    model = around(layers.Lambda(lambda x: x + teacher(x)))
    assert_alike(BUILDERS[form](model), model)


def test_a_lambda_of_a_nested_model_may_be_trusted_as_one_of_the_model():
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Lambda(lambda t: t * 0.5), layers.Dense(3)], name="inner"
    )
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(inner(inputs)))
    x = np.ones((2, 4), "float32")
    placed = tfparallel.model_parallel(model, devices=["CPU:0", "CPU:1"], layers_per_stage=[1, 1])
    np.testing.assert_array_equal(placed(x), model(x))
