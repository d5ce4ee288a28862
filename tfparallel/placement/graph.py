"""The layers of a functional model in order, and the tensors between them."""

from typing import Any

import keras
import numpy as np

from tfparallel.seams.functional import calls_of, maker_of


def layers_in_order(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that compute something, producers before consumers.

    A nested model is one layer; a layer that is called twice is at the place of its first call.
    """
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def edges(model: keras.Model) -> dict[int, tuple[int, list[int]]]:
    """Returns the edges between layers, by the layers' index in `layers_in_order`.

    Returns:
        For each layer that others read: the bytes of its outputs for one example, and the indices
        of its readers. An axis of unknown length counts as 1.
    """
    index = {layer.name: i for i, layer in enumerate(layers_in_order(model))}
    if isinstance(model, keras.Sequential):
        outputs = [row_bytes(layer.output) for layer in layers_in_order(model)]
        return {i: (size, [i + 1]) for i, size in enumerate(outputs[:-1])}
    sent: dict[int, tuple[int, list[int]]] = {}
    for node in calls_of(model):
        reader = index.get(node.operation.name)
        for tensor in node.input_tensors if reader is not None else ():
            producer = index.get(maker_of(tensor).name)
            if producer is not None:
                size, readers = sent.get(producer, (0, []))
                sent[producer] = (max(size, row_bytes(tensor)), sorted({*readers, reader}))
    return sent


def row_bytes(tensors: Any) -> int:
    """Returns the bytes of symbolic tensors for one example."""
    return sum(_size(tensor.shape, tensor.dtype) for tensor in keras.tree.flatten(tensors))


def _size(shape, dtype) -> int:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return int(np.prod([n or 1 for n in shape[1:]], dtype=np.int64)) * itemsize
