"""Finds the layer and the source line that made an operation."""

import os
import pathlib
import re

import keras
import tensorflow as tf

from tfparallel.seams.keras import layers_in

# By path: a program may be in a folder of the same name.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(os.path.dirname(os.path.abspath(library.__file__)) for library in (keras, tf)),
        pathlib.Path(__file__).parents[1].resolve(),
    )
)
_MACHINERY = re.compile(r"^<|importlib|contextlib\.py$")


def line_of(operation: tf.Operation) -> str:
    """Returns ` (line 12 of model.py)`; empty if no line of the program made it."""
    frames = [frame for frame in operation.traceback or () if _is_of_program(frame.filename)]
    if not frames:
        return ""
    path = frames[-1].filename.replace("\\", "/")
    return f" (line {frames[-1].lineno} of {path.rpartition('/')[2]})"


def _is_of_program(filename: str) -> bool:
    return not (filename.startswith(_LIBRARIES) or _MACHINERY.search(filename))


def place_in(
    layer: keras.Layer, operation: tf.Operation, *, of_models: bool = False
) -> tuple[keras.Layer, str]:
    """Returns the innermost layer that made an operation, by its name scopes, and its path.

    Args:
        layer: The layer or model whose call made it.
        operation: The operation.
        of_models: Whether to stop at the layer of a model, and not look inside that layer.
    """
    innermost, path = layer, []
    for scope in operation.name.split("/")[:-1]:
        if of_models and innermost is not layer and not isinstance(innermost, keras.Model):
            break
        inner = [
            part
            for part in layers_in(innermost, include_self=False)
            if re.fullmatch(re.escape(part.name) + r"(_\d+)?", scope)
        ]
        if inner:
            innermost = min(inner, key=lambda part: len(scope) - len(part.name))
            path.append(innermost.name)
    return innermost, "/".join(path)
