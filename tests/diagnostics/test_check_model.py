"""`tfparallel.check`: the check for those who have no task file."""

import re

import keras
import numpy as np
import pytest

import tfparallel


def build():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.Dense(2, name="last"),
        ]
    )


def compile_model(model):
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")


def make_same(build_model):
    return build_model()


def some_data(num_examples):
    generator = np.random.default_rng(0)
    return generator.normal(size=(num_examples, 4)), generator.normal(size=(num_examples, 2))


@pytest.mark.slow
def test_one_device_divides_nothing():
    """Story: one replica was compared with itself, and the check said OK."""
    data = some_data(16)
    report = tfparallel.check(build, compile_model, data, devices=["CPU:0"], steps=2)
    assert report.passed and "OK: match: identical" in str(report)
    assert "note: Only one device is used, so nothing runs in parallel: call " in str(report)
    two = tfparallel.check(build, compile_model, data, devices=["CPU:0", "CPU:1"], steps=2)
    assert "Only one device" not in str(two)


@pytest.mark.slow
def test_check_from_python(tmp_path):
    path = tmp_path / "curves.png"
    report = tfparallel.check(
        build, compile_model, some_data(40), devices=["CPU:0", "CPU:1"], global_batch_size=8,
        steps=3, plot=str(path),
    )  # fmt: skip
    assert report.verdict == "match" and report.batch_sizes == (3, 8, 4)
    shown = str(report)
    assert re.search("OK: match: (identical|[56] digits)", shown)  # Of float32.
    assert "the comparison is sharp at all 3 steps" in shown
    assert path.read_bytes().startswith(b"\x89PNG")


class Scale(keras.layers.Layer):
    """Keeps its weight in float32, as Keras's LoRA does, whatever the model computes in."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],), initializer="ones", dtype="float32", name="scale"
        )

    def call(self, x):
        return x * self.scale


@pytest.mark.slow
def test_a_weight_of_float32_in_a_model_of_float64_may_round_as_float32_does(in_float64):
    """A ViT with LoRA in float64: its adapters were said to differ by 1e-7 under every split."""

    def build_scaled():
        return keras.Sequential([keras.Input((4,)), Scale(), keras.layers.Dense(2)])

    report = tfparallel.check(
        build_scaled, compile_model, some_data(38), devices=["CPU:0", "CPU:1"],
        global_batch_size=19, steps=2,
    )  # fmt: skip
    assert report.dtype == "float32" and report.verdict == "match", report
    (of_scale,) = [item for item in report.variables if item.path.endswith("/scale")]
    assert of_scale.floor > 1e-9  # By a unit of float64 it would not have moved at all.


def wrong(build_model):
    model = build_model()
    layer = model.get_layer("last")
    layer.call = lambda x, call=layer.call, **_: call(x) * 1.01
    return model


@pytest.mark.slow
def test_check_from_python_takes_a_form_of_the_users_own():
    report = tfparallel.check(
        build, compile_model, some_data(8), parallel=wrong, global_batch_size=4, steps=1
    )
    assert not report.passed and "FAILED: differs" in str(report)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"parallel": "mixed"}, "Unknown parallelism.*tensor, pipeline, hybrid.*'mixed'"),
        (
            {"parallel": make_same, "devices": ["CPU:0"]},
            r"devices=\['CPU:0'\].*pass a parallelism by name",
        ),
        ({"steps": 0}, "At least one step.*steps=0"),
        ({"devices": ["CPU:99"]}, "CPU:99 does not exist"),
        ({"plot": "curves.pdf"}, "end in .png.*curves.pdf"),
    ],
)
def test_check_from_python_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.check(build, compile_model, some_data(8), **arguments)
