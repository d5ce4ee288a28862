"""What a worker's process tells its launcher about the models that it has trained."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfparallel
from tfparallel.cluster import trained_alone
from tfparallel.cluster.trained_alone import watched

X = np.ones((4, 2), "float32")


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def trained(model):
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)
    return model


def evaluated(path):
    trained(build()).save(path)
    model = keras.models.load_model(path)  # With an optimizer that has counted steps.
    model.evaluate(X, X[:, :1], verbose=0)
    return model


def test_only_a_plain_model_that_was_trained_counts(tmp_path):
    is_plain = trained_alone._is_plain
    assert is_plain(trained(build()))
    assert not is_plain(build())
    assert not is_plain(evaluated(tmp_path / "model.keras"))
    assert not is_plain(trained(tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])))
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = build()
        model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)
    assert not is_plain(model)


HIDDEN = "import os; os.environ['SEEN'] = 'yes'"


@pytest.mark.parametrize("earlier", [True, False])
def test_a_watched_process_is_as_it_was(tmp_path, earlier):
    """The user's own `sitecustomize` runs, and PYTHONPATH is what it was."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(HIDDEN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(modules)} if earlier else {}
    folder = str(tmp_path / "watch")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, os, sys; print(os.environ.get('PYTHONPATH'), os.environ.get('SEEN'), "
            f"{folder!r} in sys.path, 'sitecustomize' in sys.modules)",
        ],
        env=watched(folder, environment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "" and done.returncode == 0
    seen = f"{modules} yes" if earlier else "None None"
    assert done.stdout == f"{seen} False True\n"


def test_a_failure_in_the_hidden_file_is_told_as_python_does(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import there_is_none")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", "pass"], env=env, capture_output=True, text=True, timeout=60
        )
        for env in (environment, watched(str(tmp_path / "watch"), environment))
    ]
    assert runs[0].returncode == runs[1].returncode == 0
    assert "No module named 'there_is_none'" in runs[0].stderr
    assert runs[0].stderr == runs[1].stderr
