"""Where in a program an operation of a graph was made: the layer, and the line."""

import os
import pathlib
import re

import keras
import tensorflow as tf

from tfparallel.seams.keras import layers_in

__all__ = ["line_of", "place_in"]

# By where they are: a program may stand in a folder of the same name.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(os.path.dirname(os.path.abspath(library.__file__)) for library in (keras, tf)),
        pathlib.Path(__file__).parents[1].resolve(),
    )
)
_MACHINERY = re.compile(r"^<|importlib|contextlib\.py$")


def line_of(operation: tf.Operation) -> str:
    """`" of line 12 of model.py"`; empty where no line of the program's own made it."""
    own = [frame for frame in operation.traceback or () if _is_of_program(frame.filename)]
    if not own:
        return ""
    path = own[-1].filename.replace("\\", "/")
    return f" (line {own[-1].lineno} of {path.rpartition('/')[2]})"


def _is_of_program(filename: str) -> bool:
    return not (filename.startswith(_LIBRARIES) or _MACHINERY.search(filename))


def place_in(
    layer: keras.Layer, operation: tf.Operation, *, of_models: bool = False
) -> tuple[keras.Layer, str]:
    """The innermost layer that made an operation, by the scopes in its name, and its path.

    Args:
        layer: The layer, or model, in whose call it was made.
        operation: The operation.
        of_models: Whether to name the layer of a model, and none that such a layer holds.
    """
    found, path = layer, []
    for scope in operation.name.split("/")[:-1]:
        if of_models and found is not layer and not isinstance(found, keras.Model):
            break
        inner = [
            part
            for part in layers_in(found, include_self=False)
            if re.fullmatch(re.escape(part.name) + r"(_\d+)?", scope)
        ]
        if inner:
            found = min(inner, key=lambda part: len(scope) - len(part.name))
            path.append(found.name)
    return found, "/".join(path)
