"""What commands on a task file do alike: they look at its data, and say whose fault an error is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.command_line.exits import run_command
from tfparallel.commands.task_setup import compiling
from tfparallel.layout.mesh import Mesh
from tfparallel.task import Task, TaskError


def compile_for(batch, shape=(4,)):
    """Compiles a model of inputs of a shape, as for training on such batches."""
    task = Task("task.py", "task", {"compile_model": lambda model: model.compile(loss="mse")})
    model = keras.Sequential([keras.Input(shape), keras.layers.Dense(1)])
    compiling(task, None, [batch])(model)
    return model.compiled


@pytest.mark.parametrize(
    "batch",
    [np.ones((3, 4)), tf.TensorSpec((None, 4)), tf.TensorSpec((None, 4, 1)), tf.TensorSpec(None),
     {"a": np.ones(3)}],
)  # fmt: skip
def test_data_that_the_model_takes_passes(batch):
    assert compile_for(batch)


def test_data_with_too_many_dimensions_is_told_before_training():
    """Story: a batched data set ended in Keras's words under forty frames."""
    batched = tf.data.Dataset.from_tensor_slices(np.ones((8, 4))).batch(2).batch(16)
    said = r"takes, \(4,\). Received: examples of shape \(None, 4\) from .* drop `.batch\(...\)`"
    with pytest.raises(TaskError, match=said):
        compile_for(batched.element_spec)


def test_data_without_a_channel_is_told():
    with pytest.raises(TaskError, match=r"\(8, 8, 3\). Received: .* \(8, 8\) from .* task.py.$"):
        compile_for(np.ones((2, 8, 8)), shape=(8, 8, 3))


@pytest.mark.parametrize(("fault", "is_shown"), [(Mesh.parse, False), (int, True)])
def test_of_an_error_of_ours_the_text_says_all(capsys, fault, is_shown):
    """Story: the traceback of a refusal of ours stood above the sentence that repeated it."""

    def body():
        try:
            fault("wrong")
        except ValueError as error:
            raise TaskError("the sentence") from error

    assert run_command("train", body, (TaskError,)) == 2
    shown = capsys.readouterr().err
    assert shown.endswith("tfparallel train: the sentence\n")
    assert ("Traceback" in shown) == is_shown
