"""What Keras's distribution objects say trains on TensorFlow, to the weights of one device."""

import pathlib
import re

import keras
import numpy as np
import pytest
from keras import layers
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tests.forked import run_python
from tfparallel.problems import PlacementError
from tfparallel.replication import sharding
from tfparallel.strategies.variables import copies as copies_of
from tfparallel.variables.sharded import ShardedVariable
from tfparallel.variables.split import SplitVariable

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
AXES = ("batch", "model")
NUM_EXAMPLES, NUM_CLASSES, LENGTH = 23, 3, 5
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "internals" / "split_layers.md"


def digits():
    """A small network of pictures; `narrow` is in no layout."""
    pictures = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, activation="relu", name="conv")(pictures)
    x = layers.Conv2D(4, 3, name="reduce")(x)
    x = layers.LayerNormalization(name="normalize")(x)
    x = layers.Dense(7, activation="gelu", name="up")(layers.Flatten(name="flat")(x))
    x = layers.Dense(6, name="down")(x)
    x = layers.Dense(4, activation="tanh", name="narrow")(x)
    return keras.Model(pictures, layers.Dense(NUM_CLASSES, name="head")(x))


PAIRS = {
    "conv/kernel": (None, None, None, "model"),
    "conv/bias": ("model",),
    "reduce/kernel": (None, None, "model"),  # A layout may be shorter than the shape.
    "up/kernel": (None, "model"),
    "down/kernel": ("model", None),
    "down/bias": (None,),
}


@keras.saving.register_keras_serializable("keras_distribution")
class Attention(layers.Layer):
    """Attention as KerasHub writes it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query = layers.EinsumDense("btd,dnh->btnh", (None, 2, 3), name="query")
        self.key = layers.EinsumDense("bsd,dnh->bsnh", (None, 2, 3), name="key")
        self.attention_output = layers.EinsumDense(
            "btnh,nhd->btd", (None, 4), bias_axes="d", name="attention_output"
        )

    def build(self, shape):
        self.query.build(shape)
        self.key.build(shape)
        self.attention_output.build((*shape[:2], 2, 3))
        super().build(shape)

    def call(self, x):
        query, key = self.query(x), self.key(x)
        scores = keras.ops.softmax(keras.ops.einsum("btnh,bsnh->bnts", query, key))
        return x + self.attention_output(keras.ops.einsum("bnts,bsnh->btnh", scores, key))


def text():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(9, 4, name="words")(words)
    x = Attention(name="block")(x)
    x = layers.MultiHeadAttention(2, 3, name="attend")(x, x)
    return keras.Model(words, layers.Dense(NUM_CLASSES, name="head")(layers.Flatten()(x)))


TEXT = {
    "words/embeddings": ("model", None),
    "block/query/kernel": (None, "model", None),
    "block/key/kernel": ("model", None, None),
    "block/attention_output/kernel": ("model", None, None),
    "attend/(query|key|value)/kernel": (None, "model", None),
    "attend/(query|key|value)/bias": ("model", None),
    "attend/attention_output/kernel": ("model", None, None),
}
SPLITS = {
    digits: {"conv": "column", "reduce": "row", "up": "column", "down": "row"},
    text: {
        "words": "vocabulary",
        "block/query": "axis 1",
        "block/key": "axis 0",
        "block/attention_output": "axis 0",
        "attend": "heads",
    },
}


def model_parallel(layouts, shape=(2, 2), axes=AXES, devices=None, **options):
    mesh = DeviceMesh(shape, axes, devices or DEVICES[: np.prod(shape)])
    layout_map = LayoutMap(mesh)
    for path, layout in layouts.items():
        layout_map[path] = layout
    return ModelParallel(layout_map=layout_map, batch_dim_name="batch", **options)


def train(model, build, state=state_of):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES, 8, 8, 1))
    if build is text:
        x = generator.integers(0, 9, (NUM_EXAMPLES, LENGTH))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss)
    y = np.arange(NUM_EXAMPLES) % NUM_CLASSES
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=2, **options).history, state(model)


def assert_exact(model, build, **options):
    actual, expected = train(model, build, **options), train(seeded(build), build, **options)
    assert_equal(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
@pytest.mark.parametrize(("build", "layouts"), [(digits, PAIRS), (text, TEXT)])
def test_a_layout_map_divides_what_it_names(build, layouts, shape):
    distribution = model_parallel(layouts, shape)
    model = tfparallel.distribute(lambda: seeded(build), distribution)
    assert model.layout.mesh == tfparallel.Mesh(data=shape[0], tensor=2)
    assert model.split == SPLITS[build]
    for variable in model.variables:
        axes = distribution.get_variable_layout(variable).axes
        if "model" in axes:
            assert isinstance(variable, SplitVariable), variable.path
            assert variable.axis == axes.index("model"), variable.path
    assert not isinstance(model.get_layer("head").kernel, SplitVariable)
    assert_exact(model, build)


@pytest.mark.slow
def test_batch_normalization_between_a_pair_is_split_with_it():
    def build():
        pictures = keras.Input((8, 8, 1))
        x = layers.Conv2D(6, 3, name="conv")(pictures)
        x = layers.BatchNormalization(momentum=0.8, name="normalize")(x)
        x = layers.Conv2D(4, 3, name="reduce")(layers.ReLU()(x))
        return keras.Model(pictures, layers.Dense(NUM_CLASSES, name="head")(layers.Flatten()(x)))

    layouts = {path: PAIRS[path] for path in ("conv/kernel", "reduce/kernel")}
    model = tfparallel.distribute(lambda: seeded(build), model_parallel(layouts, (1, 2)))
    assert model.split["normalize"] == "features"
    assert_exact(model, build)


@pytest.mark.slow
def test_a_built_model_is_copied_as_the_map_says():
    source = seeded(digits)
    model = tfparallel.distribute(source, model_parallel(PAIRS))
    assert model.split == SPLITS[digits]
    assert_exact(model, digits)


@pytest.mark.slow
def test_data_parallel_uses_the_devices_of_its_mesh():
    distribution = DataParallel(devices=["cpu:2", "cpu:0", "cpu:1"])
    model = tfparallel.distribute(lambda: seeded(digits), distribution)
    assert model.layout.devices == ("CPU:2", "CPU:0", "CPU:1")
    assert_exact(model, digits)


@pytest.mark.slow
def test_weights_along_the_axis_of_the_batch_are_sharded(monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 20)
    distribution = model_parallel({".*kernel": (None, "batch")}, (4, 1))
    model = tfparallel.distribute(lambda: seeded(digits), distribution)
    assert isinstance(model.get_layer("up").kernel, ShardedVariable)
    assert_exact(model, digits, state=keras.Model.get_weights)  # Slots have another shape.


@pytest.mark.slow
def test_the_optimizer_is_sharded_where_weights_cannot_be():
    layouts = {"up/kernel": ("batch", "model"), "down/kernel": ("model", "batch")}
    distribution = model_parallel(layouts)
    model = tfparallel.distribute(lambda: seeded(digits), distribution, shard="optimizer")
    assert model.split == {"up": "column", "down": "row"}
    assert_exact(model, digits, state=keras.Model.get_weights)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_the_paths_are_those_of_the_model_that_is_passed(shape):
    with keras.name_scope("outer"):
        source = digits()
    layouts = {"outer/up/kernel": (None, "model")}
    model = tfparallel.distribute(source, model_parallel(layouts, shape))
    assert model.split == {"up": "column, gathered"}


def test_the_axes_of_a_mesh_have_any_order():
    distribution = model_parallel({"up/kernel": (None, "model")}, axes=("model", "batch"))
    model = tfparallel.distribute(digits, distribution)
    assert model.layout.devices == ("CPU:0", "CPU:2", "CPU:1", "CPU:3")
    first, second = model.get_layer("up").kernel.parts
    devices = [[copy.device[-5:] for copy in copies_of(part)] for part in (first, second)]
    assert devices == [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]


def test_meshes_that_do_not_fit_are_refused():
    mesh = DeviceMesh((2, 2, 2), ["batch", "model", "expert"], [f"cpu:{k}" for k in range(8)])
    layout_map = LayoutMap(mesh)
    three = ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with pytest.raises(PlacementError, match="Received: a mesh of batch=2, model=2, expert=2."):
        tfparallel.distribute(digits, three)
    nowhere = ModelParallel(layout_map=layout_map, batch_dim_name="rows")
    with pytest.raises(PlacementError, match="must have the axis 'rows' for"):
        tfparallel.distribute(digits, nowhere)


LAYOUTS = {
    "a bias without its kernel": (
        {"up/bias": ("model",)},
        r"Layer 'up' \(Dense\) cannot .* \{kernel: \(None, 'model'\), bias: \('model',\)\} or "
        r"\{kernel: \('model', None\)\};.* Received: 'up/bias': \('model',\).",
    ),
    "the bias of rows": (
        {"up/kernel": ("model", None), "up/bias": ("model",)},
        r"Received: 'up/kernel': \('model', None\), 'up/bias': \('model',\)",
    ),
    "an axis of pixels": (
        {"conv/kernel": ("model", None, None, None)},
        r"Layer 'conv' \(Conv2D\) .*\{kernel: \(None, None, 'model', None\)\}",
    ),
    "another layer": (
        {"up/kernel": (None, "model"), "normalize/gamma": ("model",)},
        r"Only Dense, .* Received: 'normalize/gamma': \('model',\)",
    ),
    "too few units": (
        {"head/kernel": (None, "model")},
        "layer 'head' with 3 units, for 4 devices",
    ),
    "both axes": (
        {"up/kernel": ("batch", "model")},
        r"Received: 'up/kernel' of shape \(64, 7\): \('batch', 'model'\). Use a mesh .*'optimizer'",
    ),
    "one axis twice": ({"up/kernel": ("model", "model")}, "names a mesh axis once"),
    "too many axes": ({"up/.*": (None, "model")}, r"Received: 'up/bias' of shape \(7,\)"),
    "two keys": ({"up.kernel": (None, "model"), "up.*l": ()}, "matches multiple layout"),
    "nothing": (
        {"upp/kernel": (None, "model")},
        r"Received: layouts for 'upp/kernel'; variables .* begin it with '\.\*' to match the end",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_cannot_be_placed_is_refused(case):
    layouts, message = LAYOUTS[case]
    shape = (1, 4) if case == "too few units" else (2, 2)
    with pytest.raises(ValueError, match=message):
        tfparallel.distribute(digits, model_parallel(layouts, shape))


def test_all_layers_that_cannot_be_placed_are_named():
    layouts = {"up/bias": ("model",), "conv/bias": ("model",), "normalize/beta": ("model",)}
    with pytest.raises(PlacementError) as caught:
        tfparallel.distribute(digits, model_parallel(layouts))
    for name in ("'up'", "'conv'", "'normalize/beta'"):
        assert name in str(caught.value)


def test_what_the_distribution_decides_is_no_option():
    distribution = DataParallel(devices=DEVICES)
    with pytest.raises(PlacementError, match=r"Received: devices=2, split=\{\}"):
        tfparallel.distribute(digits, distribution, devices=2, split={})
    with pytest.raises(PlacementError, match="must be a `keras.distribution.DataParallel`"):
        tfparallel.distribute(digits, "data")


def test_workers_share_one_data_set(monkeypatch):
    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", config)
    distribution = DataParallel(devices=DEVICES, auto_shard_dataset=False)
    with pytest.raises(PlacementError, match="Each of the 2 workers must get the whole data set"):
        tfparallel.distribute(digits, distribution)


def test_keras_alone_divides_nothing():
    with model_parallel(PAIRS).scope():
        kernel = digits().get_layer("up").kernel
    assert kernel.value.device.endswith("CPU:0") and not hasattr(kernel.value, "layout")
    with pytest.raises(TypeError):  # Its warning is malformed.
        DataParallel(DeviceMesh((2, 2), AXES, DEVICES))


@pytest.mark.slow
def test_keras_own_tests_of_its_objects_pass():
    """Unchanged, and also those that Keras only runs on JAX; the page lists those that fail."""
    module = "keras.src.distribution.distribution_lib_test"
    output = run_python(["-m", "unittest", "-v", module], timeout=900).stderr
    # Warnings may stand between a name and its result.
    pattern = rf"{module}\.(\w+\.\w+) \.\.\..*?(ok|ERROR|FAIL|skipped)"
    results = re.findall(pattern, output, re.DOTALL)
    failed = [name for name, result in results if result != "ok"]
    page = PAGE.read_text(encoding="utf-8")
    assert len(results) == 39 and len(failed) == 7, output
    assert not [name for name in failed if f"`{name}`" not in page]
