"""Which layers are known to treat each example by itself, and need no probe (`row_probe.py`).

Keras's own layers do, but for those that are told to work along axis 0, and those that run a user's
function. Everything else is looked at.
"""

import keras

from tfparallel.extend import original_class

__all__ = ["is_known_by_rows", "rows_of_constants"]

_RUN_ANYTHING = ("Lambda", "Dot", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")
_PAD_TO_THE_LONGEST = ("TextVectorization",)
_MAY_NAME_AXES = ("axis", "axes", "attention_axes", "_attention_axes")
_BY_ELEMENT = (
    *("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Negative"),
    *("Absolute", "Square", "Sqrt", "Exp", "Log", "Tanh", "Relu", "Sigmoid", "Gelu", "Silu"),
)
_FUNCTIONS = ("activation", "recurrent_activation")
_SUMS_OVER_ROWS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def is_known_by_rows(layer: keras.Layer) -> bool:
    """Whether a layer, with all that it holds, is known to treat each example by itself."""
    return all(_is_known(part) for part in layer._flatten_layers())


def _is_known(layer) -> bool:
    cls = original_class(layer)
    if isinstance(layer, keras.Model):
        operations = getattr(layer, "operations", ())  # A subclassed model has none.
        is_graph = cls is keras.Sequential or cls.__name__ == "Functional"
        return is_graph and all(map(_is_known_operation, operations))
    if not cls.__module__.startswith("keras.src.layers.") or cls.__name__ in (
        *_RUN_ANYTHING,
        *_PAD_TO_THE_LONGEST,
    ):
        return False
    axes = [axis for name in _MAY_NAME_AXES for axis in _flat(getattr(layer, name, None))]
    functions = [getattr(layer, name, None) for name in _FUNCTIONS]
    regularizer = layer.activity_regularizer
    return (
        all(axis > 0 or axis == -1 for axis in axes)  # Axis -2 of a matrix is axis 0.
        and not layer._metrics
        and all(_is_kerass(each) for each in functions if each is not None)
        and (regularizer is None or type(regularizer) in _SUMS_OVER_ROWS)
    )


def _is_known_operation(operation) -> bool:
    """Layers are looked at by themselves; `x + y` in a functional model is an operation."""
    if isinstance(operation, keras.Layer):
        return True
    is_kerass = type(operation).__module__.startswith("keras.src.ops.")
    nodes = operation._inbound_nodes
    return is_kerass and type(operation).__name__ in _BY_ELEMENT and all(map(_pairs_rows, nodes))


def rows_of_constants(layer: keras.Layer) -> set[int]:
    """Of the constants that a functional model's operations read, beside tensors of rows."""
    operations = getattr(layer, "operations", ())
    nodes = [node for operation in operations for node in operation._inbound_nodes]
    return {rows for node in nodes for rows in _rows_of_constants(node)}


def _pairs_rows(node) -> bool:
    """Whether tensors are of one rank, and no constant has rows of its own."""
    ranks = {len(tensor.shape) for tensor in node.input_tensors}
    return len(ranks) <= 1 and not _rows_of_constants(node)


def _rows_of_constants(node) -> set[int]:
    given = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    arrays = [x for x in given if hasattr(x, "shape") and not isinstance(x, keras.KerasTensor)]
    rank = max((len(tensor.shape) for tensor in node.input_tensors), default=0)
    return {int(x.shape[0]) for x in arrays if len(x.shape) >= rank > 0} - {1}


def _flat(axes):
    return [axis for axis in keras.tree.flatten(axes) if isinstance(axis, int)]


def _is_kerass(function) -> bool:
    return getattr(function, "__module__", type(function).__module__).startswith("keras.")
