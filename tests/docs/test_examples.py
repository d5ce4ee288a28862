"""The examples of the public names, as their docstrings show them, run and print what they say.

Where there is no GPU, the logical CPU devices stand for GPUs. What an example does not show is not
compared.
"""

import ast
import doctest
import inspect
import linecache
import os
import pathlib
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.forked import run_python

# What needs a process of its own.
APART = {
    "MultiWorkerMirroredStrategy": "it must be made before TensorFlow's runtime starts",
    "spawn": "it starts processes",
}
# What this machine cannot run.
NOT_RUN = {
    "devices.connect": "it needs other processes",
    "devices.hide_other_gpus": "it needs two GPUs",
    "devices.set_memory_growth": "it needs a GPU",
    "devices.split_gpu": "it needs a GPU",
    "ray.fit": "it needs Ray",
    "recv": "it needs another process",
    "send": "it needs another process",
}
# What trains in forms that fast tests train in, too.
SLOWLY = {"check", "hybrid_parallel", "pipeline_parallel"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "reference"


def public_names():
    """Every name of `__all__`, and those of the public modules in it."""
    for name in tfparallel.__all__:
        value = getattr(tfparallel, name)
        if isinstance(value, types.ModuleType):
            yield from ((f"{name}.{inner}", getattr(value, inner)) for inner in value.__all__)
        elif name != "__version__":
            yield name, value


NAMES = dict(public_names())


class ShownAlone(doctest.OutputChecker):
    """Compares where something is shown."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


class WithoutSource(doctest.DocTestRunner):
    """Lets nobody find the source of an example: AutoGraph would, and fail at its missing file."""

    _DocTestRunner__patched_linecache_getlines = staticmethod(linecache.getlines)


def build_model():
    hidden = [keras.layers.Dense(16, activation="tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])


def compile_model(model):
    model.compile(optimizer="sgd", loss="mse")


def files_of(folder, x, y):
    """What the examples of `tfparallel.data` read."""
    np.savez(folder / "train-0.npz", x=x, y=y)
    with tf.io.TFRecordWriter(str(folder / "train-0.tfrecord")) as records:
        for _ in range(8):
            fields = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5] * 64)),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[3])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=fields))
            records.write(example.SerializeToString())


PRELUDE = """
import keras, numpy as np, tfparallel
def load_data():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)
def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
x, y = load_data()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APART))
def test_the_example_runs_as_a_script(name, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(PRELUDE + doctest.script_from_examples(inspect.getdoc(NAMES[name])))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = run_python([script], cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOWLY else name
        for name in sorted(set(NAMES) - set(NOT_RUN) - set(APART))
    ],
)
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    files_of(tmp_path, x, y)
    model = build_model()
    compile_model(model)
    keras.backend.clear_session()  # Names that an example shows begin anew.
    names = {
        "tfparallel": tfparallel, "keras": keras, "np": np, "tf": tf, "build_model": build_model,
        "compile_model": compile_model, "model": model, "x": x, "y": y,
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(16),
    }  # fmt: skip
    text = inspect.getdoc(NAMES[name])
    if not tfparallel.devices.list_devices("GPU"):
        text = text.replace("GPU:", "CPU:")
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    assert test.examples, f"{name} has no example"
    said = []
    runner = WithoutSource(ShownAlone(), verbose=False, optionflags=FLAGS)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_docstring_is_whole(name):
    text = inspect.getdoc(NAMES[name])
    assert ">>> " in text
    value = NAMES[name]
    parameters = [
        parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    described = set(re.findall(r"^ {4}(\w+): ", text, re.MULTILINE))
    assert set(parameters) <= described | {"self"}
    if not inspect.isclass(value) and inspect.signature(value).return_annotation is not None:
        assert "\nReturns:\n" in text


def test_the_reference_has_every_name():
    shown = set()
    for page in DOCS.glob("*.md"):
        page = page.read_text(encoding="utf-8")
        for path, options in re.findall(r"^::: tfparallel\.([\w.]+)\n((?: .*\n)*)", page, re.M):
            shown.add(path)
            value = getattr(tfparallel, path, None)
            if isinstance(value, types.ModuleType) and "members: false" not in options:
                shown |= {f"{path}.{inner}" for inner in value.__all__}
    assert not set(NAMES) - shown


def test_what_is_not_run_has_a_name():
    assert set(NOT_RUN) <= set(NAMES)
    for name in NOT_RUN:  # It can be read as Python, at least.
        for example in doctest.DocTestParser().get_examples(inspect.getdoc(NAMES[name])):
            ast.parse(example.source)
