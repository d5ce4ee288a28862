"""Task files: a user's model, its compilation and its data in one Python file.

```python
def build_model():          # -> keras.Model, not compiled
def compile_model(model):   # calls model.compile(...)
def load_data():            # -> (train, validation)
```

`train` and `validation` are each `(x, y)` or `(x, y, sample_weight)`, in
arrays or nested structures of them; files, by `tfparallel.data.TFRecords` or
`NPZShards`; `tfparallel.data.Examples`; a `keras.utils.PyDataset`, whose batches stay as they are;
or a `tf.data.Dataset` of single examples. `validation` may be None.

Optionally, `EPOCHS = 12` sets how often `train` passes over the data, and a function `callbacks()`
returns a list of Keras callbacks for `train`.

The file itself imports Keras; this module imports neither Keras nor
TensorFlow before a function of the task is called.
"""

import dataclasses
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_SIGNATURES = ("build_model()", "compile_model(model)", "load_data()")
_CALLBACKS = "callbacks"
_DATA_FORM = (
    "each of train and validation must be (x, y), (x, y, sample_weight), a source of "
    "tfparallel.data (TFRecords, NPZShards, Examples), a PyDataset, or a tf.data.Dataset of single "
    "examples; validation may be None"
)

_NO_VALIDATION = "Return `(x, y), None` if there is no validation data."


class TaskError(ValueError):
    """Raised for a task file that breaks the contract; the text lists every problem."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A loaded task file; its methods check the results of the user's functions.

    Attributes:
        path: The path of the file.
        name: The file's name without its extension.
        functions: The user's functions by name.
        epochs: The number of passes over the data, if the file sets it.
    """

    path: str
    name: str
    functions: dict[str, Callable[..., Any]] = dataclasses.field(repr=False)
    epochs: int | None = None

    @property
    def has_callbacks(self) -> bool:
        """Whether the file has a function `callbacks()`."""
        return _CALLBACKS in self.functions

    def callbacks(self) -> list[Any]:
        """Returns the file's Keras callbacks for `train`; an empty list if it defines none.

        Raises:
            TaskError: If the function returns anything but a list of callbacks.
        """
        if not self.has_callbacks:
            return []
        import keras

        value = self.functions[_CALLBACKS]()
        is_list = isinstance(value, tuple | list)
        wrong = [c for c in value if not isinstance(c, keras.callbacks.Callback)] if is_list else []
        if not is_list or wrong:
            received = _describe(wrong[0] if wrong else value)
            if wrong and isinstance(wrong[0], type):
                received += f"; create an instance of it: {wrong[0].__name__}(...)"
            raise TaskError(
                f"callbacks() in {self.path} must return a list of Keras callbacks. "
                f"Received: {received}."
            )
        return list(value)

    def build_model(self) -> Any:
        """Returns the user's model.

        Raises:
            TaskError: If `build_model` returns anything but a `keras.Model`.
        """
        import keras

        model = self.functions["build_model"]()
        if not isinstance(model, keras.Model):
            raise TaskError(
                f"build_model() in {self.path} must return a keras.Model. "
                f"Received: {_describe(model)}. Does it end in `return model`?"
            )
        return model

    def compile_model(self, model: Any) -> None:
        """Compiles `model` in place.

        Raises:
            TaskError: If the model is not compiled afterwards.
        """
        self.functions["compile_model"](model)
        if not getattr(model, "compiled", False):
            raise TaskError(
                f"compile_model(model) in {self.path} must compile the model that it receives. "
                "Received: a model that is not compiled afterwards. Call "
                "model.compile(optimizer=..., loss=...) in it."
            )

    def load_data(self) -> tuple[Any, Any]:
        """Returns `(train, validation)`.

        Raises:
            TaskError: If the value has another form, if arrays have unequal
                lengths, or if there is no example.
        """
        data = self.functions["load_data"]()
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise TaskError(
                f"load_data() in {self.path} must return a pair (train, validation); {_DATA_FORM}. "
                f"Received: {_describe(data)}. {_NO_VALIDATION}"
            )
        if all(hasattr(part, "shape") for part in data):
            raise TaskError(
                f"load_data() in {self.path} must return a pair (train, validation), each of them "
                f"(x, y). Received: {_describe(data)}, which is only one of the two. "
                f"{_NO_VALIDATION}"
            )
        problems = []
        for name, part in zip(("train", "validation"), data, strict=True):
            if part is None and name == "validation":
                continue
            problems += [f"{name}: {problem}" for problem in _data_problems(part)]
        if problems:
            raise TaskError(
                _listed(f"load_data() in {self.path} returned data that cannot be used", problems)
            )
        train, validation = data
        return train, validation


def load_task(path: str) -> Task:
    """Imports a task file and checks that it has its three functions.

    The file's folder is on `sys.path` during the import, so it may import
    its neighbours.

    Args:
        path: The path of the Python file.

    Returns:
        The task.

    Raises:
        TaskError: If the file is missing, is not Python, fails to import, or
            lacks functions; the error names all missing ones.
    """
    if problems := path_problems(path):
        raise TaskError(problems[0])
    _check_is_no_script(path)
    name = os.path.splitext(os.path.basename(path))[0]
    module = _import(path, name)
    problems, functions = [], {}
    for signature in _SIGNATURES:
        function = signature.partition("(")[0]
        if not hasattr(module, function):
            problems.append(f"{signature} is missing")
        elif not callable(getattr(module, function)):
            received = _describe(getattr(module, function))
            problems.append(f"{signature} must be a function. Received: {function} = {received}")
        else:
            functions[function] = getattr(module, function)
            problems += _signature_problems(signature, functions[function])
    if hasattr(module, _CALLBACKS):
        functions[_CALLBACKS] = getattr(module, _CALLBACKS)
        if not callable(functions[_CALLBACKS]):
            received = _describe(functions[_CALLBACKS])
            problems.append(
                f"callbacks() must be a function if it is defined. Received: callbacks = {received}"
            )
    epochs = getattr(module, "EPOCHS", None)
    if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
        problems.append(f"EPOCHS must be a whole number of at least 1. Received: EPOCHS={epochs!r}")
    if problems:
        raise TaskError(
            _listed(f"The task file {path} must define {', '.join(_SIGNATURES)}", problems)
        )
    return Task(path=path, name=name, functions=functions, epochs=epochs)


def path_problems(path: str) -> list[str]:
    """Returns why a path names no task file, as at most one sentence."""
    if os.path.isdir(path):
        files = sorted(each for each in os.listdir(path) if each.endswith(".py"))
        fix = f"Choose a file in it, such as {os.path.join(path, files[0])}." if files else ""
        return [f"A task file is required. Received: a folder, {path!r}. {fix}".rstrip()]
    if not os.path.exists(path):
        is_short = os.path.exists(f"{path}.py")
        fix = f"Did you mean {path}.py?" if is_short else "Check the path."
        return [f"The task file does not exist. Received: {path!r} (in {os.getcwd()}). {fix}"]
    if not path.endswith(".py"):
        return [
            f"A task file must be a Python file that ends in .py. Received: {path!r}. `tfparallel "
            "init task.py` writes an example."
        ]
    return []


def _check_is_no_script(path: str) -> None:
    """Raises if a file cannot define any of the functions; to import a script would run it."""
    with open(path, "rb") as file:
        text = file.read()
    names = [signature.partition("(")[0].encode() for signature in _SIGNATURES]
    if not any(name in text for name in (*names, b"import *")):
        raise TaskError(
            f"The task file {path} must define {', '.join(_SIGNATURES)}. Received: a file without "
            f"any of them. If it is a script, run it: tfparallel launch -- python {path}"
        )


def _signature_problems(signature: str, function: Callable[..., Any]) -> list[str]:
    try:
        received = inspect.signature(function)
    except ValueError:  # Written in C.
        return []
    try:
        received.bind(*["model"] * ("model)" in signature))
    except TypeError:
        name = signature.partition("(")[0]
        return [f"{signature} must take these arguments. Received: {name}{received}"]
    return []


def _import(path: str, name: str) -> Any:
    folder = os.path.dirname(os.path.abspath(path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Registered so that pickle and Keras find the classes of the file; an
    # existing module of the same name stays.
    sys.modules.setdefault(name, module)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # A script may read its own flags, and exit.
        if sys.modules.get(name) is module:
            del sys.modules[name]
        fix = " Move what ends the program, or reads flags, out of the file."
        raise TaskError(
            f"The task file cannot be imported: {type(error).__name__}: {error}. "
            f"Received: {path!r}.{fix * isinstance(error, SystemExit)}"
        ) from error.with_traceback(_from_file_on(spec.origin, error.__traceback__))
    finally:
        sys.path.remove(folder)
    return module


def _from_file_on(path: str, trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames that import the file; None if the file did not run."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _data_problems(part: Any) -> list[str]:
    if hasattr(part, "element_spec") and hasattr(part, "cardinality"):
        return _dataset_problems(part)
    if hasattr(part, "num_indices") or hasattr(part, "num_batches"):
        return []  # A source, or a PyDataset, is checked where it is created and read.
    if not isinstance(part, tuple | list) or len(part) not in (2, 3):
        is_iterator = hasattr(part, "__next__")
        fix = ". Wrap it: tf.data.Dataset.from_generator(...)" if is_iterator else ""
        return [f"{_DATA_FORM}. Received: {_describe(part)}{fix}"]
    lengths = {}
    for name, structure in zip(("x", "y", "sample_weight"), part, strict=False):
        if structure is None and name == "sample_weight":
            continue
        for path, array in _leaves(structure, name):
            if not getattr(array, "shape", ()):
                fix = ". Convert lists: numpy.asarray(...)" if path.endswith("]") else ""
                received = f"Received: {_describe(array)}"
                return [f"{path} must be an array of examples. {received}{fix}"]
            lengths[path] = int(array.shape[0])
    if not lengths:
        return [f"it contains no array. Received: {_describe(part)}"]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        return [f"all arrays must have the same number of examples. Received: {listed}"]
    if not any(lengths.values()):
        return [f"it is empty; at least one example is required. Received: {_describe(part)}"]
    return []


def _dataset_problems(dataset: Any) -> list[str]:
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        return [
            "the data set must yield (x, y) or (x, y, sample_weight), one example at a time. "
            f"Received: elements of {spec}"
        ]
    if int(dataset.cardinality()) == 0:
        return ["the data set is empty; at least one example is required. Received: cardinality 0"]
    return []


def _leaves(structure: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(structure, tuple | list):
        for index, value in enumerate(structure):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, structure


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        inside = ", ".join(_describe(item) for item in value[:4])
        more = ", ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)}: ({inside}{more})"
    shape = getattr(value, "shape", None)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{kind} of shape {tuple(shape)}" if isinstance(shape, tuple) else kind


def _listed(head: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{head}: {problems[0]}."
    return f"{head}:\n" + "\n".join(f"  - {problem}." for problem in problems)
