"""Each builder decides a layout, and its model tells it."""

import keras
import pytest
from keras import layers

import tfparallel
from tfparallel.layout.layout import Layout

TWO, THREE = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]


def build():
    inputs = keras.Input((4,))
    x = layers.Dense(8, activation="relu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="down")(x))


FORMS = {
    "replicas": (
        lambda: tfparallel.data_parallel(build, devices=THREE),
        "data parallel: data=3\n  replica 0  CPU:0\n  replica 1  CPU:1\n  replica 2  CPU:2\n"
        "  gradients: summed on CPU:0",
    ),
    "replicas, another algorithm": (
        lambda: tfparallel.data_parallel(build, devices=TWO, all_reduce="ring"),
        "data parallel: data=2\n  replica 0  CPU:0\n  replica 1  CPU:1\n"
        "  gradients: all-reduce by ring (tfparallel schedule ring, in TensorFlow)",
    ),
    "replicas, still to be chosen": (
        lambda: tfparallel.data_parallel(build, devices=TWO, all_reduce="auto"),
        "data parallel: data=2\n  replica 0  CPU:0\n  replica 1  CPU:1\n"
        "  gradients: all-reduce, chosen by a measurement when training begins",
    ),
    "one device": (
        lambda: tfparallel.data_parallel(build, devices=["CPU:0"]),
        "one device\n  CPU:0",
    ),
    "stages": (
        lambda: tfparallel.model_parallel(build, devices=TWO, layers_per_stage=[1, 1]),
        "model parallel: pipeline=2\n  stage 0  CPU:0  up\n  stage 1  CPU:1  down",
    ),
    "stages by a map": (
        lambda: tfparallel.model_parallel(build, device_map={"up": "CPU:2", "down": "CPU:1"}),
        "model parallel: pipeline=2\n  stage 0  CPU:2  up\n  stage 1  CPU:1  down",
    ),
    "pipeline": (
        lambda: tfparallel.pipeline_parallel(
            build, TWO, 4, "gpipe", "always", layers_per_stage=[1, 1]
        ),
        "pipeline parallel: pipeline=2, 4 micro-batches by gpipe, recompute=always\n"
        "  stage 0  CPU:0  up\n  stage 1  CPU:1  down",
    ),
    "parts": (
        lambda: tfparallel.tensor_parallel(build, devices=TWO),
        "tensor parallel: tensor=2\n  part 0  CPU:0\n  part 1  CPU:1\n"
        "  split, 97% of the weights: up by column, down by row",
    ),
}


@pytest.mark.parametrize("make, shown", FORMS.values(), ids=FORMS)
def test_a_model_tells_what_is_where(make, shown):
    model = make()
    assert str(model.layout) == shown
    assert Layout.from_json(model.layout.to_json()) == model.layout


def test_a_strategy_tells_it_too():
    strategy = tfparallel.MirroredStrategy(TWO)
    assert strategy.layout == tfparallel.data_parallel(build, strategy).layout
