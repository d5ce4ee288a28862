"""Selects the tensors of a batch that a functional model reads, such as some keys of a dict."""

from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.seams.functional import Functional, inputs_of


def read_inputs(model: keras.Model, x: Any) -> Any:
    """Drops the inputs that the model does not read, which may have other rows.

    Args:
        model: Any model; if it overrides `call`, nothing is dropped.
        x: The inputs of a batch.
    """
    inputs = inputs_of(model)
    is_graph = original_class(model).call in (Functional.call, keras.Sequential.call)
    if not isinstance(x, dict) or inputs is None or not is_graph or "call" in vars(model):
        return x
    names = inputs if isinstance(inputs, dict) else [t.name for t in keras.tree.flatten(inputs)]
    if not {*names} < x.keys():
        return x
    if isinstance(inputs, dict) and sorted(x)[: len(names)] != sorted(names):
        return x  # Keras takes the first ones, in the order of the keys.
    return {name: x[name] for name in names}
