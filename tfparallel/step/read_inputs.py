"""Which tensors of a batch a functional model reads: of a dictionary not every key, perhaps."""

from typing import Any

import keras

from tfparallel.extend import original_class
from tfparallel.seams.functional import Functional, inputs_of

__all__ = ["read_inputs"]


def read_inputs(model: keras.Model, x: Any) -> Any:
    """Returns a batch's inputs without what the model does not read, which may have other rows.

    Args:
        model: Any model; of one with a `call` of its own nothing is left out.
        x: The inputs of a batch.
    """
    wanted = inputs_of(model)
    is_graph = original_class(model).call in (Functional.call, keras.Sequential.call)
    if not isinstance(x, dict) or wanted is None or not is_graph or "call" in vars(model):
        return x
    names = wanted if isinstance(wanted, dict) else [t.name for t in keras.tree.flatten(wanted)]
    if not {*names} < x.keys():
        return x
    if isinstance(wanted, dict) and sorted(x)[: len(names)] != sorted(names):
        return x  # Keras takes the first ones, in the order of their keys.
    return {name: x[name] for name in names}
