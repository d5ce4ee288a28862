"""A task file that breaks the contract is told what is wrong, all of it at once."""

import sys
import textwrap
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.task import Task, TaskError, load_task


def write(folder, text, name="task.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def task(**functions):
    return Task("task.py", "task", functions)


def data_error(train, validation=None):
    with pytest.raises(TaskError) as caught:
        task(load_data=lambda: (train, validation)).load_data()
    return str(caught.value)


def test_a_good_file_loads_and_imports_its_neighbour(tmp_path):
    write(tmp_path, "VALUE = 3", "a_neighbour_module.py")
    path = write(
        tmp_path,
        """
        from a_neighbour_module import VALUE
        def build_model(): return VALUE
        def compile_model(model): pass
        def load_data(): pass
        """,
    )
    before = list(sys.path)
    loaded = load_task(path)
    assert loaded.name == "task" and loaded.functions["build_model"]() == 3
    assert sys.path == before


def test_a_file_may_say_how_often_to_pass_over_the_data(tmp_path):
    functions = "def build_model(): pass\ndef compile_model(model): pass\ndef load_data(): pass\n"
    assert load_task(write(tmp_path, functions)).epochs is None
    assert load_task(write(tmp_path, f"EPOCHS = 12\n{functions}")).epochs == 12
    with pytest.raises(TaskError, match="at least 1. Received: EPOCHS=0"):
        load_task(write(tmp_path, f"EPOCHS = 0\n{functions}"))


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent.py", "does not exist.*absent.py"),
        ("", "A task file is required.*folder"),
        ("notes.txt", "ends in .py.*notes.txt"),
    ],
)
def test_no_task_file(tmp_path, name, message):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(TaskError, match=message):
        load_task(str(tmp_path / name))


def test_all_missing_functions_are_named_together(tmp_path):
    path = write(tmp_path, "build_model = 3\ndef load_data(): pass\n")
    with pytest.raises(TaskError) as caught:
        load_task(path)
    text = str(caught.value)
    assert "build_model() must be a function. Received: build_model = int" in text
    assert "compile_model(model) is missing" in text
    assert "load_data() is missing" not in text


def test_an_import_error_is_told_with_its_cause(tmp_path):
    text = "import a_module_that_is_nowhere\ndef load_data(): pass"
    path = write(tmp_path, text, "broken_task.py")
    with pytest.raises(TaskError, match="ModuleNotFoundError.*a_module_that_is_nowhere") as caught:
        load_task(path)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "broken_task" not in sys.modules


def test_build_model_must_return_a_model():
    with pytest.raises(TaskError, match="keras.Model. Received: NoneType. Does it end in `return"):
        task(build_model=lambda: None).build_model()


def test_compile_model_must_compile():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(TaskError, match="not compiled afterwards. Call model.compile"):
        task(compile_model=lambda model: None).compile_model(model)
    task(compile_model=lambda model: model.compile(loss="mse")).compile_model(model)


@pytest.mark.parametrize("value", [None, 3, (1, 2, 3), {"train": 1}])
def test_load_data_must_return_a_pair(value):
    with pytest.raises(TaskError, match=r"must return a pair \(train, validation\).*Received"):
        task(load_data=lambda: value).load_data()


def test_data_errors_are_each_their_own():
    x = np.zeros((4, 2))
    assert "same number of examples. Received: x: 4, y: 3" in data_error((x, x[:3]))
    assert "it is empty" in data_error((x[:0], x[:0]))
    assert "train: each of train and validation must be (x, y)" in data_error(x)
    assert "x['b'][0]: 3" in data_error(({"a": x, "b": (x[:3],)}, x))
    assert "y must be an array of examples. Received: float" in data_error((x, 1.0))
    assert "x[0] must be an array of examples. Received: float. Convert" in data_error(([1.0], x))
    assert "Received: list_iterator. Wrap it: tf.data." in data_error(iter([x]))
    assert "Received: a tuple of 4: (numpy.ndarray of shape (4, 2), " in data_error((x, x, x, x))
    assert "cardinality 0" in data_error(tf.data.Dataset.from_tensor_slices((x[:0], x[:0])))
    assert "must yield (x, y)" in data_error(tf.data.Dataset.from_tensor_slices(x))


def test_both_parts_are_told_at_once():
    x = np.zeros((4, 2))
    text = data_error((x, x[:1]), (x[:0], x[:0]))
    assert "  - train: all arrays" in text and "  - validation: it is empty" in text


@pytest.mark.parametrize("weight", [(), (None,), (np.ones(4),)])
def test_good_data_passes(weight):
    x = np.zeros((4, 2))
    train = ({"a": x, "b": (x, x)}, x, *weight)
    assert task(load_data=lambda: (train, None)).load_data() == (train, None)
    data = tf.data.Dataset.from_tensor_slices((x, x))
    assert task(load_data=lambda: [data, (x, x)]).load_data()[0] is data


def test_a_file_may_have_callbacks(tmp_path):
    functions = "def build_model(): pass\ndef compile_model(model): pass\ndef load_data(): pass\n"
    plain = load_task(write(tmp_path, functions))
    assert not plain.has_callbacks and plain.callbacks() == []
    with pytest.raises(TaskError, match=r"callbacks\(\) must be a function.*Received.*list of 0"):
        load_task(write(tmp_path, f"callbacks = []\n{functions}"))


def test_callbacks_are_looked_at():
    stopping = keras.callbacks.EarlyStopping()
    assert task(callbacks=lambda: [stopping]).callbacks() == [stopping]
    with pytest.raises(TaskError, match="list of Keras callbacks. Received: .*EarlyStopping"):
        task(callbacks=lambda: stopping).callbacks()
    with pytest.raises(TaskError, match=r"create an instance of it: EarlyStopping\(\.\.\.\)"):
        task(callbacks=lambda: [keras.callbacks.EarlyStopping]).callbacks()
    with pytest.raises(TaskError, match="Received: NoneType"):
        task(callbacks=lambda: None).callbacks()


def test_x_and_y_alone_are_told_what_to_return():
    """Story: two long problems, "train: each of train and validation must be", and no way out."""
    x = np.zeros((4, 2))
    with pytest.raises(TaskError) as caught:
        task(load_data=lambda: (x, x[:, :1])).load_data()
    text = str(caught.value)
    assert "Received: a tuple of 2: (numpy.ndarray of shape (4, 2), " in text
    assert text.endswith("Return `(x, y), None` if there is no validation data.")
    assert "\n" not in text


@pytest.mark.parametrize(
    "content", ["import absent_module  # load_data", "def load_data(:\n    pass"]
)
def test_a_file_that_cannot_be_imported_shows_its_own_frames(tmp_path, content):
    """Story: importlib's frames and ours stood above the line of the user's."""
    path = write(tmp_path, content)
    with pytest.raises(TaskError, match="cannot be imported") as caught:
        load_task(path)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert {frame.filename for frame in frames} <= {path}
    assert bool(frames) == content.startswith("import")


def test_a_script_is_not_run(tmp_path):
    """Story: a script was given; it trained, and only then its functions were missed."""
    path = write(tmp_path, "open('ran', 'w')\nmodel = data = None\n")
    with pytest.raises(TaskError, match="without any of them. If it is a script, run it: tfpar"):
        load_task(path)
    assert not (tmp_path / "ran").exists()


def test_a_file_may_import_its_functions(tmp_path):
    functions = "def build_model(): pass\ndef compile_model(model): pass\ndef load_data(): pass\n"
    write(tmp_path, functions, "functions_of_a_task.py")
    assert load_task(write(tmp_path, "from functions_of_a_task import *\n")).name == "task"


def test_a_file_that_exits_is_told_so(tmp_path):
    path = write(tmp_path, "import sys\ndef load_data(): pass\nsys.exit('usage: me')\n")
    with pytest.raises(TaskError, match="SystemExit: usage: me. .*Move what ends the program"):
        load_task(path)


def test_the_arguments_of_the_functions_are_looked_at(tmp_path):
    text = """
        def build_model(units): pass
        def compile_model(): pass
        def load_data(path="data.npz", *more, **options): pass
        """
    with pytest.raises(TaskError) as caught:
        load_task(write(tmp_path, text))
    text = str(caught.value)
    assert "build_model() must take these arguments. Received: build_model(units)." in text
    assert "compile_model(model) must take these arguments. Received: compile_model()." in text
    assert "Received: load_data" not in text
