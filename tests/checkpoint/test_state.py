"""What a checkpoint and a model must have in common."""

import keras
import pytest

from tfparallel.checkpoint import state

KERNEL = ["net/dense/kernel", [2, 3], "float32"]
BIAS = ["net/dense/bias", [3], "float32"]


def test_numbers_that_keras_gives_do_not_count():
    later = [["net_1/dense_12/kernel", [2, 3], "float32"], BIAS]
    assert state.differences([KERNEL, BIAS], later) == []


@pytest.mark.parametrize(
    "specs, lines",
    [
        ([KERNEL], ["only the model has net/dense/bias (3,) float32"]),
        (
            [KERNEL, ["net/dense/bias", [4], "float32"]],
            [
                "only the checkpoint has net/dense/bias (4,) float32",
                "only the model has net/dense/bias (3,) float32",
            ],
        ),
        ([BIAS, KERNEL], ["the same variables, in another order"]),
    ],
)
def test_differences_are_named(specs, lines):
    assert state.differences([KERNEL, BIAS], specs) == lines


def test_many_differences_are_cut_short():
    many = [[f"layer{chr(97 + i)}/kernel", [1], "float32"] for i in range(20)]
    (line,) = state.differences([], many)
    assert "layerh/kernel (1,) float32, 12 more" in line and "layeri" not in line


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.parts = {"other": keras.optimizers.Adam(name="other")}

    def call(self, x):
        return self.dense(x)


def test_all_variables_must_exist():
    model = TwoOptimizers()
    model.compile(optimizer="sgd")
    with pytest.raises(ValueError, match="Call it on one batch before `fit`"):
        state.build(model)
    model(keras.ops.ones((1, 2)))
    with pytest.raises(ValueError, match=r"Received: \['other'\]"):
        state.build(model)
    model.parts["other"].build(model.trainable_variables)
    state.build(model)
    names = [name for name, _, _ in state.describe(model)["training"]]
    assert any(name.startswith("other/") for name in names)
    assert any(name.lower().startswith("sgd/") for name in names)
