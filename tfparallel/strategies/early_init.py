"""Finds the value of the main program that started TensorFlow's runtime too early."""

import ast
import sys

import keras
import tensorflow as tf

_KINDS = (
    (tf.data.Dataset, "a data set"),
    (keras.Model, "a model"),
    (keras.layers.Layer, "a layer"),
    (keras.Variable, "a variable"),
    (tf.Variable, "a variable"),
    (keras.optimizers.Optimizer, "an optimizer"),
    (tf.Tensor, "a tensor"),
)


def early_start() -> str | None:
    """Names a value of the main program that needed the runtime, and its line; None if unknown."""
    main = sys.modules.get("__main__")
    for name, value in list(vars(main).items()) if main else ():
        kind = next((text for cls, text in _KINDS if isinstance(value, cls)), None)
        if kind is not None and not name.startswith("_"):
            return f"`{name}`, {kind}{_line_of(getattr(main, '__file__', None), name)}"
    return None


def _line_of(path, name) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, TypeError, ValueError):  # For example, a notebook cell.
        return ""
    for node in tree.body:
        names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        if any(each.id == name and isinstance(each.ctx, ast.Store) for each in names):
            return f", created in {path}, line {node.lineno}"
    return ""
