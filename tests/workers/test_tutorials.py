"""TensorFlow's multi-worker tutorials, with `tf.distribute.` replaced by `tfparallel.` in one line.

The programs in `tutorials/` are written for TensorFlow's strategy. On one device they run with its
default strategy, and the workers must end at the same weights.
"""

import pathlib

import keras
import numpy as np
import pytest

from .jobs import run_workers

TUTORIALS = pathlib.Path(__file__).with_name("tutorials")
THEIRS = "strategy = tf.distribute.MultiWorkerMirroredStrategy()"
OURS = "import tfparallel; strategy = tfparallel.MultiWorkerMirroredStrategy()"
ONE_DEVICE = "strategy = tf.distribute.get_strategy()"

pytestmark = pytest.mark.slow


def program(name, strategy):
    text = (TUTORIALS / name).read_text()
    assert text.count(THEIRS) == 1
    return text.replace(THEIRS, strategy)


def on_one_device(name, *arguments):
    namespace = {"__name__": name}
    try:
        exec(compile(program(name, ONE_DEVICE), name, "exec"), namespace)
        return namespace["main"](*arguments)
    finally:
        keras.config.set_floatx("float32")


def assert_equal(results, expected):
    """float64, sums in another order, 20 steps at most."""
    for result in results:
        for name in ("losses", "accuracies"):
            np.testing.assert_allclose(result[name], expected[name], rtol=1e-9, err_msg=name)
        for weight, expected_weight in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, expected_weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_workers, num_devices", [(3, 1)])
def test_training_with_keras(tmp_path, num_workers, num_devices):
    (tmp_path / "job").mkdir()
    arguments = [str(tmp_path / "job"), num_workers]
    results = run_workers(
        program("keras_fit.py", OURS), num_workers, num_devices, arguments, timeout_seconds=600
    )
    assert_equal(results, on_one_device("keras_fit.py", str(tmp_path), num_workers))
    assert [result["task"] for result in results] == [["worker", w] for w in range(num_workers)]
    # What the others saved is gone, and what the chief saved is plain Keras.
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["model.keras"]
    saved = keras.models.load_model(tmp_path / "job" / "model.keras")
    for weight, expected in zip(saved.weights, results[0]["weights"], strict=True):
        np.testing.assert_array_equal(weight.numpy(), expected)


@pytest.mark.parametrize(("num_devices", "from_function"), [(1, False), (2, True)])
def test_a_custom_training_loop(tmp_path, num_devices, from_function):
    text = program("custom_loop.py", OURS)
    if num_devices > 1:
        # TensorFlow's collectives lose their keys in a first step that makes variables (those of
        # an optimizer) on several devices; so does its own MirroredStrategy on two CPUs.
        line = "        optimizer = keras.optimizers.RMSprop(learning_rate=0.005)\n"
        assert text.count(line) == 1
        text = text.replace(line, f"{line}        optimizer.build(model.trainable_variables)\n")
    results = run_workers(
        text,
        num_devices=num_devices,
        arguments=[str(tmp_path), from_function],
        timeout_seconds=600,
    )
    assert_equal(results, on_one_device("custom_loop.py", str(tmp_path), from_function))
    for result in results:
        assert result["restored"] == result["weights"]
