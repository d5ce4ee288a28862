"""What a functional model's layers are, in order, and what passes between them."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

__all__ = ["edges", "layers_in_order", "row_bytes"]


def layers_in_order(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers that compute something, producers before consumers.

    A nested model is one of them; a layer that is called twice stands where it is called first.
    """
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def edges(model: keras.Model) -> dict[int, tuple[int, list[int]]]:
    """Returns what passes between the layers, by their index in `layers_in_order`.

    Returns:
        For each layer that others read: the bytes of its outputs for one example, and who reads
        them. An axis of unknown length counts as 1.
    """
    index = {layer.name: i for i, layer in enumerate(layers_in_order(model))}
    if isinstance(model, keras.Sequential):
        outputs = [row_bytes(layer.output) for layer in layers_in_order(model)]
        return {i: (size, [i + 1]) for i, size in enumerate(outputs[:-1])}
    found: dict[int, tuple[int, list[int]]] = {}
    for layer in model.get_config()["layers"]:
        for tensor in _tensors(layer["inbound_nodes"]):
            producer = index.get(tensor["keras_history"][0])
            if producer is not None and layer["name"] in index:
                size, readers = found.get(producer, (0, []))
                shape, dtype = tensor["shape"], tensor["dtype"]
                found[producer] = (
                    max(size, _size(shape, dtype)),
                    sorted({*readers, index[layer["name"]]}),
                )
    return found


def _tensors(config: Any) -> Iterator[dict]:
    if isinstance(config, dict):
        if config.get("class_name") == "__keras_tensor__":
            yield config["config"]
        else:
            for part in config.values():
                yield from _tensors(part)
    elif isinstance(config, list | tuple):
        for part in config:
            yield from _tensors(part)


def row_bytes(tensors: Any) -> int:
    """Returns the bytes of symbolic tensors for one example."""
    return sum(_size(tensor.shape, tensor.dtype) for tensor in keras.tree.flatten(tensors))


def _size(shape, dtype) -> int:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return int(np.prod([n or 1 for n in shape[1:]], dtype=np.int64)) * itemsize
