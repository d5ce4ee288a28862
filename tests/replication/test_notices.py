"""`data_parallel` says which devices it took, and what sums the gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel import user_log as notices
from tfparallel.layout.layout import Layout, replicas_in_words
from tfparallel.layout.mesh import Mesh

TWO, THREE = ["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]


@pytest.fixture(autouse=True)
def nothing_shown_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(notices, "_shown", set())
    monkeypatch.setenv("TFPARALLEL_PROFILES", str(tmp_path))


def build():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"devices": THREE}, "3 replicas on CPU:0, CPU:1, CPU:2; gradients: summed on CPU:0."),
        ({"strategy": tfparallel.MirroredStrategy, "devices": TWO},
         "2 replicas on CPU:0, CPU:1; gradients: summed on CPU:0."),
        ({"devices": TWO, "all_reduce": "ring"},
         "2 replicas on CPU:0, CPU:1; gradients: all-reduce by ring (tfparallel schedule ring, in "
         "TensorFlow)."),
        ({"devices": TWO, "all_reduce": "auto"},
         "2 replicas on CPU:0, CPU:1; gradients: all-reduce, chosen by a measurement when training "
         "begins."),
        ({"devices": ["CPU:0"]}, "1 replica on CPU:0."),
        ({"devices": ["CPU:1"]}, "1 replica on CPU:1."),
    ],
    ids=["default", "strategy", "ring", "auto", "one", "another one"],
)  # fmt: skip
def test_one_line_for_all_models_of_a_kind(options, line, capsys):
    if "strategy" in options:
        options = {"strategy": options["strategy"](options["devices"])}
    for _ in range(2):
        tfparallel.data_parallel(build, **options)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"data_parallel: {line}\n")


@pytest.mark.slow
def test_the_choice_is_told_when_it_is_made(capsys):
    model = tfparallel.data_parallel(build, devices=TWO, all_reduce="auto")
    model.compile("sgd", "mse")
    capsys.readouterr()
    model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0)
    (line,) = capsys.readouterr().err.splitlines()
    choice = model.strategy.all_reduce_ops.choice
    assert line == f"all-reduce: {choice.algorithm} ({choice.what_runs}); {choice.why}"
    assert "2 tensors on 2 devices" in line


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["CPU:0"], "2 workers x 1 device (CPU:0)"),
        (["GPU:0", "GPU:1"], "2 workers x 2 devices (GPU:0, GPU:1)"),
        ([f"GPU:{n}" for n in range(9)], "2 workers x 9 devices (GPU:0 … GPU:8)"),
    ],
    ids=["one", "two", "many"],
)
def test_of_workers_the_number_of_their_devices(names, line):
    devices = [f"/job:worker/task:{task}/device:{name}" for task in (0, 1) for name in names]
    layout = Layout(Mesh(data=len(devices)), devices, reduction="all-reduce by mpi (MPI)")
    assert replicas_in_words(layout) == f"{line}; gradients: all-reduce by mpi (MPI)"


def build_drawing():
    return keras.Sequential(
        [
            keras.Input((4, 3)),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1, name="noise"),
            layers.GaussianNoise(0.0),
            keras.Sequential([keras.Input((4, 3)), layers.LSTM(2, dropout=0.2, name="inner")]),
            layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)), name="raw"),
            layers.Dense(1),
        ]
    )


def build_dropping():
    return keras.Sequential([keras.Input((4, 3)), layers.Flatten(), layers.Dropout(0.3)])


@pytest.mark.parametrize(
    "form",
    [
        lambda build: tfparallel.data_parallel(build, devices=TWO),
        pytest.param(
            lambda build: tfparallel.pipeline_parallel(build, devices=TWO, num_micro_batches=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "pipeline"],
)
def test_layers_that_draw_otherwise_are_named_once(form, capsys):
    x = np.ones((4, 4, 3))
    model = form(build_drawing)
    model.compile("sgd", "mse")
    capsys.readouterr()
    for _ in range(2):
        model.fit(x, np.ones((4, 1)), verbose=0)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "random values" in line]
    assert line == (
        "These layers produce different random values than on one device: raw (Lambda). The same "
        "seed gives the same run. All other layers produce the same values as on one device."
    )
    assert model.layout.proof.endswith("other random values are drawn by raw")


def test_dropout_layers_are_not_named(capsys):
    model = tfparallel.data_parallel(build_dropping, devices=TWO)
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4, 3)), np.ones((4, 12)), verbose=0)
    assert "random values" not in capsys.readouterr().err
