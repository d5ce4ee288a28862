"""Measures the time of one part of a split layer relative to the whole layer.

    seconds of one of T parts = whole · (w + (1 − w)/T)

w is the fraction of the work that every part repeats. A column reads the whole input, a row writes
a whole output, and few channels at a time are less efficient than many. One measurement of a
narrower layer determines w, at the largest possible number of parts.
"""

from collections.abc import Mapping

import keras
import tensorflow as tf

from tfparallel.extend import original_class
from tfparallel.placement.layer_timing import LayerCall, layer_calls, marginal_seconds, program_of

# The entries of a layer's config that are divided over the parts.
_COUNTS = ("units", "filters", "num_heads", "num_query_heads", "num_key_value_heads", "input_dim")
_BY_COUNT = ("column", "column, gathered", "heads", "vocabulary")


def measured_whole_shares(
    model: keras.Model,
    splits: Mapping[str, str],
    num_parts: int,
    batch_size: int,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Measures w of each kind of split layer.

    Args:
        model: A functional or Sequential model.
        splits: How each split layer is split, by name.
        num_parts: T.
        batch_size: Number of rows.
        seconds: Time of each whole layer, by name.

    Returns:
        w by layer name, from 0 to 1, for the layers that have a narrower version.
    """
    share_of_kind: dict[tuple[str, str], float | None] = {}
    shares = {}
    for call in layer_calls(model):
        kind = splits.get(call.layer.name)
        if kind not in (*_BY_COUNT, "row"):
            continue
        key = (call.kind, kind)
        if key not in share_of_kind:
            whole_seconds = seconds[call.layer.name]
            share_of_kind[key] = _whole_share(call, kind, num_parts, batch_size, whole_seconds)
        if share_of_kind[key] is not None:
            shares[call.layer.name] = share_of_kind[key]
    return shares


def _whole_share(
    call: LayerCall, kind: str, num_parts: int, batch_size: int, whole_seconds: float
) -> float | None:
    try:
        part = _part_of(call, kind, num_parts)
        program = program_of(part, batch_size, True, not call.is_first)
        part_seconds = marginal_seconds(program)
    except (ValueError, TypeError, tf.errors.OpError):
        return None
    return min(max((part_seconds / whole_seconds - 1 / num_parts) / (1 - 1 / num_parts), 0.0), 1.0)


def _part_of(call: LayerCall, kind: str, num_parts: int) -> keras.Model:
    """Returns a model of a single layer with 1/T of the units or inputs."""
    config = {**call.layer.get_config(), "name": None}
    shapes = [list(tensor.shape) for tensor in call.inputs]
    if kind in _BY_COUNT:
        for name in _COUNTS:
            if isinstance(config.get(name), int):
                config[name] = -(-config[name] // num_parts)
    else:
        shapes[0][-1] = -(-shapes[0][-1] // num_parts)
    new = {
        id(tensor): keras.Input(batch_shape=shape, dtype=tensor.dtype)
        for tensor, shape in zip(call.inputs, shapes, strict=True)
    }
    args, kwargs = call.node.arguments.fill_in(new)
    part = original_class(call.layer).from_config(config)
    return keras.Model(list(new.values()), part(*args, **kwargs))
