"""Where a model is cut, and what passes between the stages."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfparallel.pipeline.masks import Masks
from tfparallel.pipeline.stages import Values, cut_stages, functional_of, with_mask_of
from tfparallel.seams.functional import LEAVES_TRAINING
from tfparallel.seams.keras import mask_of


def inputs(name="in"):
    return keras.Input((3,), name=name)


def skipping():
    """Stage 0 sends to 1 and to 2; 1 makes an output of the model's."""
    x = inputs()
    a = layers.Dense(4, name="a")(x)
    b = layers.Dense(4, name="b")(a)
    c = layers.Add(name="c")([a, layers.Dense(4, name="d")(b)])
    return keras.Model(x, [b, c])


def sharing():
    """A layer that is called in two stages."""
    x, twice = inputs(), layers.Dense(3, name="a")
    return keras.Model(x, twice(layers.Dense(3, name="b")(twice(x))))


def wide_and_deep():
    """The last stage reads an input of the model's; another input is an output."""
    wide, deep = inputs("wide"), inputs("deep")
    x = layers.Dense(4, name="a")(deep)
    joined = layers.Concatenate(name="b")([x, wide])
    return keras.Model([wide, deep], [layers.Dense(2, name="c")(joined), deep])


def names_of(tensors):
    return [tensor._keras_history.operation.name for tensor in tensors.values()]


def passed(stages):
    """What each stage reads and makes, by the names of the layers that made it."""
    return [(names_of(stage.inputs), names_of(stage.outputs)) for stage in stages]


@pytest.mark.parametrize(
    ("build", "stage_of", "expected"),
    [
        (skipping, {"a": 0, "b": 1, "d": 2, "c": 2},
         [(["in"], ["a"]), (["a"], ["b"]), (["b", "a"], ["c"])]),
        (skipping, {"a": 0, "b": 0, "d": 0, "c": 0}, [(["in"], ["b", "c"])]),
        # The second call of "a" reads what stage 1 makes.
        (sharing, {"a": 0, "b": 1}, [(["in"], ["a"]), (["a"], ["a"])]),
        (wide_and_deep, {"a": 0, "b": 1, "c": 1},
         [(["deep"], ["a"]), (["a", "wide", "deep"], ["c"])]),
        # A stage without layers hands nothing on; what it reads passes it by.
        (skipping, {"a": 0, "b": 2, "d": 2, "c": 2},
         [(["in"], ["a"]), ([], []), (["a"], ["b", "c"])]),
    ],
    ids=["skipped stage", "one stage", "shared layer", "wide and deep", "empty stage"],
)  # fmt: skip
def test_which_tensors_pass_between_stages(build, stage_of, expected):
    stages = cut_stages(build(), stage_of, len(expected))
    assert passed(stages) == expected


@pytest.mark.parametrize("build", [skipping, sharing, wide_and_deep])
def test_stage_by_stage_it_is_the_model(build):
    model = build()
    order = [layer.name for layer in model.layers if not isinstance(layer, layers.InputLayer)]
    stages = cut_stages(model, {name: min(k, 2) for k, name in enumerate(order)}, 3)
    x = [np.random.default_rng(k).normal(size=(5, 3)) for k in range(len(model.inputs))]
    functional = functional_of(model)
    tensors = map(keras.ops.convert_to_tensor, x)
    values: Values = dict(zip(map(id, functional.inputs), tensors, strict=True))
    masks = Masks(model, functional, [*values.values()])
    for stage in stages:
        values.update(stage.run({key: values[key] for key in stage.inputs}, masks))
    expected = keras.tree.flatten(model(x if len(x) > 1 else x[0], training=True))
    for symbol, output in zip(functional.outputs, expected, strict=True):
        np.testing.assert_allclose(values[id(symbol)], output, rtol=1e-5)


class Looks(layers.Layer):
    """Notes whether it finds a mask, by its name."""

    def __init__(self, seen, **options):
        super().__init__(**options)
        object.__setattr__(self, "_seen", seen)

    def call(self, x):
        self._seen[self.name] = mask_of(x) is not None
        return x + 1.0

    def compute_mask(self, inputs, previous_mask):
        return None


class TakesOff(Looks):
    """Takes the mask off what it reads, as Keras's attention does."""

    def call(self, x):
        output = super().call(x)
        x._keras_mask = None
        return output


@pytest.mark.parametrize(
    "stage_of",
    [{"taker": 1, "after": 2}, {"taker": 2, "after": 1, "other": 0}, {"taker": 0, "before": 1}],
    ids=["in order", "the taker behind", "the taker in front"],
)
def test_each_call_finds_the_masks_that_it_finds_on_one_device(stage_of):
    """A call is made the earlier the more calls there are behind it; `other` is `x` itself."""
    seen: dict[str, bool] = {}
    x = layers.Masking(name="mask")(inputs("in"))
    other = layers.Identity(name="identity")(x)
    before, taken = Looks(seen, name="before")(x), TakesOff(seen, name="taker")(x)
    for k in range(4):
        before = layers.Identity(name=f"long_{k}")(before)
    for k in range(2):
        taken = layers.Identity(name=f"short_{k}")(taken)
    ends = [before, taken, Looks(seen, name="after")(x), Looks(seen, name="other")(other)]
    model = keras.Model(x._keras_history.operation.input, [layers.Add()(ends), other])
    rows = keras.ops.ones((2, 3))
    expected = [mask_of(output) is not None for output in model(rows, training=True)]
    on_one_device, key = dict(seen), id(model.inputs[0])
    assert on_one_device == {"before": True, "taker": True, "after": False, "other": False}
    values, masks = {key: rows}, Masks(model, model, [rows])
    for stage in cut_stages(model, stage_of, 3):
        seen.clear()
        sent = {key: with_mask_of(tf.identity(values[key]), values[key]) for key in stage.inputs}
        values.update(stage.run(sent, masks))
        assert seen == {name: on_one_device[name] for name in seen}
    masks_at_end = [masks.at_end(id(symbol), values[id(symbol)]) for symbol in model.outputs]
    assert [mask is not None for mask in masks_at_end] == expected


def test_a_layer_that_is_called_twice_counts_once():
    (stage,) = cut_stages(sharing(), {"a": 0, "b": 0}, 1)
    assert [layer.name for layer in stage.layers] == ["a", "b"]
    assert len(stage.nodes) == 3


def test_of_a_sequential_model_the_functional_one_is_cut():
    model = keras.Sequential([inputs(), layers.Dense(2, name="a"), layers.Dense(2, name="b")])
    assert passed(cut_stages(model, {"a": 0, "b": 1}, 2)) == [(["in"], ["a"]), (["a"], ["b"])]


class Probe(layers.Layer):
    """Notes with which `training` it is called."""

    seen: list = []

    def call(self, x, training=None):
        self.seen.append((self.name, training))
        return x + 0.0


def with_training(order):
    """Two branches, of which the deeper one has calls that are told `training` themselves."""
    x = inputs()
    a = Probe(name="a")(x)
    b = Probe(name="c")(Probe(name="b")(a, training=order[0]), training=order[1])
    return keras.Model(x, [Probe(name="d")(b), Probe(name="e")(a)])


@pytest.mark.parametrize("order", [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("stage_of", [{"b": 1, "c": 2, "d": 2}, {"e": 1, "d": 2}])
def test_each_call_has_the_training_that_it_has_on_one_device(order, stage_of):
    """Since Keras 3.16 a call leaves what it is told to all that follow, in other branches, too."""
    model = with_training(order)
    rows = np.zeros((2, 3))
    Probe.seen = []
    model(rows, training=True)
    expected, Probe.seen = sorted(Probe.seen), []
    values: Values = {id(model.inputs[0]): rows}
    masks = Masks(model, model, [rows])
    for stage in cut_stages(model, stage_of, 3):
        values |= stage.run({key: values[key] for key in stage.inputs}, masks)
    assert sorted(Probe.seen) == expected


@pytest.mark.skipif(not LEAVES_TRAINING, reason="Keras before 3.16 keeps it to the call")
def test_a_layer_that_leaves_another_training_is_refused():
    class Freezing(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Probe()

        def call(self, x):
            return self.inner(x, training=False)

    x = inputs()
    model = keras.Model(x, layers.Dense(1, name="b")(Freezing(name="a")(x)))
    stage, _ = cut_stages(model, {"b": 1}, 2)
    with pytest.raises(ValueError, match="Received: layer 'a', which calls an inner layer"):
        stage.run({id(model.inputs[0]): np.zeros((2, 3))}, Masks(model, model, [None]))
