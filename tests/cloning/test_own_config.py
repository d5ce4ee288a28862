"""Functional models whose class has a constructor and a config of its own, as KerasHub's have."""

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.own_steps import updated
from tfparallel.placement.graph import edges

TWO = ["CPU:0", "CPU:1"]
BUILDERS = {
    "data": lambda model: tfparallel.data_parallel(model, devices=TWO),
    "model": lambda model: tfparallel.model_parallel(model, TWO),
    "pipeline": lambda model: tfparallel.pipeline_parallel(model, TWO, 2, balance="memory"),
    "pipeline by time": lambda model: tfparallel.pipeline_parallel(model, TWO, 2, balance="time"),
    "tensor": lambda model: tfparallel.tensor_parallel(model, TWO),
}
COPIERS = ["data", "model", "tensor"]
every_builder = pytest.mark.parametrize("build", [BUILDERS[form] for form in COPIERS], ids=COPIERS)
WORDS = ["a", "b", "c", "d"]


class Block(layers.Layer):
    """Dense layers made in `build`; its config names what its constructor does not take."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.more = 2 * units

    def build(self, shape):
        self.inner = layers.Dense(self.more, activation="tanh", name="inner")
        self.inner.build(shape)
        self.outer = layers.Dense(self.units, name="outer")
        self.outer.build((*shape[:-1], self.more))

    def call(self, inputs):
        return inputs + self.outer(self.inner(inputs))

    def get_config(self):
        return super().get_config() | {"units": self.units, "more": self.more}


class Backbone(keras.Model):
    """A graph, and a config that says nothing of it."""

    def __init__(self, units, **kwargs):
        embed = layers.Embedding(8, units, name="embed")
        inputs = keras.Input((3,), dtype="int32", name="ids")
        x = Block(units, name="first")(embed(inputs))
        super().__init__(inputs=inputs, outputs=Block(units, name="second")(x), **kwargs)
        self.units = units
        self.embed = embed

    def get_config(self):
        return {"name": self.name, "trainable": self.trainable, "units": self.units}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


class Words(layers.Layer):
    """A tokenizer: words that stand in no config, and a part that is made when it is built."""

    def __init__(self, words=None, **kwargs):
        super().__init__(**kwargs)
        self.words = list(words or [])

    def build(self, shape):
        self.table = layers.StringLookup(vocabulary=self.words)

    def call(self, texts):
        return self.table(tf.strings.split(texts).to_tensor("", shape=[None, 3]))

    def get_config(self):
        return super().get_config() | {"words": None}


class Classifier(keras.Model):
    """A backbone under a head; its constructor compiles it."""

    def __init__(self, backbone, preprocessor=None, **kwargs):
        self.preprocessor = preprocessor
        x = layers.GlobalAveragePooling1D(name="mean")(backbone(backbone.input))
        logits = layers.Dense(2, name="logits")(x)
        super().__init__(inputs=backbone.input, outputs=logits, **kwargs)
        self.backbone = backbone
        self.compile("sgd", "mse")

    def get_config(self):
        return {
            "name": self.name,
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "preprocessor": keras.saving.serialize_keras_object(self.preprocessor),
        }

    @classmethod
    def from_config(cls, config):
        return cls(**keras.saving.deserialize_keras_object(config))


def classifier(preprocessor=None):
    keras.utils.set_random_seed(3)
    return Classifier(Backbone(4, name="backbone"), preprocessor, name="classifier")


def around_the_graph():
    """The backbone's layers are those of the model."""
    keras.utils.set_random_seed(3)
    backbone = Backbone(4, name="backbone")
    x = layers.GlobalAveragePooling1D(name="mean")(backbone.output)
    return keras.Model(backbone.input, layers.Dense(2, name="logits")(x))


def around_the_model():
    """The backbone is one of the model's layers."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,), dtype="int32")
    x = layers.GlobalAveragePooling1D(name="mean")(Backbone(4, name="backbone")(inputs))
    return keras.Model(inputs, layers.Dense(2, name="logits")(x))


def trained(model):
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x = np.arange(24).reshape(8, 3) % 8
    model.fit(x, np.arange(8) % 2, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


def assert_same(model, expected):
    # float32; sums over devices or micro-batches are taken in another order.
    for ours, theirs in zip(model.variables, expected.variables, strict=True):
        assert ours.path == theirs.path
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["built", pytest.param("function", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("form", "make"),
    [
        ("data", classifier),
        pytest.param("model", classifier, marks=pytest.mark.slow),
        pytest.param("pipeline", classifier, marks=pytest.mark.slow),
        ("tensor", classifier),
        # Who copies a graph does not call the class.
        ("data", around_the_graph),
        pytest.param("pipeline by time", around_the_graph, marks=pytest.mark.slow),
        pytest.param("pipeline by time", around_the_model, marks=pytest.mark.slow),
        pytest.param("model", around_the_graph, marks=pytest.mark.slow),
        pytest.param("tensor", around_the_graph, marks=pytest.mark.slow),
    ],
)
def test_it_trains_to_the_weights_of_one_device(form, make, kind):
    model = BUILDERS[form](make() if kind == "built" else make)
    assert_same(trained(model), trained(make()))


def test_it_stays_of_its_class_on_its_devices(tmp_path):
    model = tfparallel.model_parallel(classifier(), TWO)
    assert isinstance(model, Classifier) and isinstance(model.backbone, Backbone)
    assert model.placement == {"backbone": "CPU:0", "mean": "CPU:1", "logits": "CPU:1"}
    for layer in (model.backbone, model.get_layer("logits")):
        devices = {variable.value.device[-5:] for variable in layer.variables}
        assert devices == {model.placement[layer.name]}
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope(
        {"Classifier": Classifier, "Backbone": Backbone, "Block": Block}
    ):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is Classifier
    assert_same(loaded, model)


def test_what_passes_between_the_layers_is_told_by_the_graph():
    # 3 positions of 4 numbers in float32 each, and then 4 numbers.
    assert edges(around_the_graph()) == {0: (48, [1]), 1: (48, [2]), 2: (48, [3]), 3: (16, [4])}
    assert edges(classifier()) == {0: (48, [1]), 1: (16, [2])}


@every_builder
def test_the_preprocessor_is_the_objects_own(build):
    """Story: a tokenizer that is built from its config has no words."""
    model = classifier(Words(WORDS))
    model.preprocessor(tf.constant(["a c"]))  # Which makes a layer more.
    copy = build(model)
    assert copy.preprocessor is model.preprocessor
    assert copy.preprocessor(tf.constant(["a d"])).numpy().tolist() == [[1, 4, 0]]


@every_builder
def test_a_preprocessor_may_come_and_go(build):
    model = classifier(Words(WORDS))
    model.preprocessor = None
    assert build(model).preprocessor is None
    model.preprocessor = words = Words(WORDS)
    assert build(model).preprocessor is words


@pytest.mark.slow
@every_builder
def test_lora_within_such_a_model(build):
    def with_lora():
        model = classifier()
        for layer in model._flatten_layers():
            if isinstance(layer, layers.Dense) and layer.name == "inner":
                layer.enable_lora(2)
        return model

    assert_same(trained(build(with_lora())), trained(with_lora()))


class HandingOn(keras.Model):
    """A functional model that hands its arguments on, and has metrics of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        self.loss_tracker.update_state(updated(self, data))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


@pytest.mark.slow
def test_a_model_that_hands_its_arguments_on():
    """Story: the second model of Keras's guide on custom steps; Keras cannot read its config."""

    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((3,))
        x = layers.Dense(4, "tanh", name="first")(inputs)
        return HandingOn(inputs, layers.Dense(1, name="last")(x))

    models = build(), tfparallel.data_parallel(build(), devices=TWO)
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    for model in models:
        model.compile("sgd")
        model.fit(x, x[:, :1], batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert_same(*models)


@pytest.mark.slow
@pytest.mark.parametrize("build", [BUILDERS["pipeline"], BUILDERS["tensor"]])
def test_a_task_of_keras_hub(build):
    if importlib.util.find_spec("keras_hub") is None:
        pytest.skip("keras-hub is not installed")
    keras_hub = importlib.import_module("keras_hub")

    def task():
        keras.utils.set_random_seed(3)
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=8, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=8,
            max_sequence_length=3, dropout=0.0,
        )  # fmt: skip
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
        tokenizer = keras_hub.models.BertTokenizer(vocabulary=words)
        preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, 3)
        return keras_hub.models.BertTextClassifier(backbone, 2, preprocessor, dropout=0.0)

    def trained_on_texts(model):
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        texts = np.array(["a b", "c", "b a", "a"])
        model.fit(texts, np.array([0, 1, 0, 1]), batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model

    assert_same(trained_on_texts(build(task())), trained_on_texts(task()))


class Unknown(layers.Layer):
    """Of which Keras cannot make a config: an argument that is no value, and no `get_config`."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, x):
        return x


@pytest.mark.parametrize("builder", [tfparallel.data_parallel, tfparallel.model_parallel])
def test_a_layer_without_a_config_is_refused_by_the_name_of_the_model(builder):
    """Story: `data_parallel` ended in Keras's own `NotImplementedError`."""
    model = keras.Sequential([keras.Input((3,)), Unknown(object()), layers.Dense(2)])
    with pytest.raises(ValueError, match="cannot be rebuilt|Unknown"):
        builder(model, devices=["CPU:0", "CPU:1"])
