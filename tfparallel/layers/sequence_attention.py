"""Attention over a sequence whose positions are divided over devices.

Each device projects its own positions. The exchange between devices is chosen by its volume and by
how evenly it divides the work:

- ring: keys and values go round, and each device keeps its queries (`ring_attention.py`). Device k
  sends 2·(S − 1)·T/S keys and values in all. With a causal mask, the last device has the most work.
- all-to-all: each device gets all positions of some heads, and returns their outputs. It sends
  (S − 1)/S of its queries, keys, values and outputs; all devices have the same work. It needs at
  least one key head per device.

References:
    Liu, Zaharia, Abbeel. Ring Attention with Blockwise Transformers for Near-Infinite Context,
    arXiv 2310.01889, 2023.
    Jacobs et al. DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
    Sequence Transformer Models, arXiv 2309.14509, 2023.
"""

import keras
import tensorflow as tf

from tfparallel.extend import original_class
from tfparallel.layers.attention_masks import AttentionDropout, AttentionMask, is_plain_mask
from tfparallel.layers.layer import sizes_of
from tfparallel.layers.parts import Parts, on_devices
from tfparallel.layers.positions import is_long_enough, positions_of
from tfparallel.layers.positionwise import SequenceLayer
from tfparallel.layers.ring_attention import Block, attend
from tfparallel.layers.split_plan import has_own_methods
from tfparallel.seams.keras import attention_parts, drop_masks

RING, ALL_TO_ALL = "ring", "all-to-all"


def exchange_of(num_heads: int, num_key_heads: int, num_devices: int, is_causal: bool) -> str:
    """Returns the exchange with less traffic, or with even work under a causal mask.

    Args:
        num_heads: The number of query heads.
        num_key_heads: The number of key and value heads.
        num_devices: S.
        is_causal: Whether a query attends only to earlier keys.

    Returns:
        `RING` or `ALL_TO_ALL`.

    Example:
        >>> exchange_of(num_heads=8, num_key_heads=8, num_devices=4, is_causal=False)
        'all-to-all'
        >>> exchange_of(num_heads=8, num_key_heads=2, num_devices=4, is_causal=True)
        'ring'
    """
    if num_key_heads < num_devices:
        return RING
    by_ring = 2 * num_key_heads
    by_heads = (2 * num_heads + 2 * num_key_heads) / num_devices
    return ALL_TO_ALL if is_causal or by_heads < by_ring else RING


class SequenceAttention(SequenceLayer):
    """Extends `MultiHeadAttention` and `GroupedQueryAttention` (see the module docstring).

    Input: query `(batch, T, width)`, value and key `(batch, S, width)`, masks; divided by
    positions, or whole. Output: `(batch, T, width)`, divided. Each device reads the whole weights.
    It reads whole sequences if scores are requested or if there are several axes of positions.

    With dropout, each device draws the whole mask of T·S scores, the same as one device.
    """

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        inputs = (query, value) if key is None else (query, value, key)
        masks = [mask for mask in (query_mask, value_mask, key_mask) if mask is not None]
        if (
            return_attention_scores
            or self._has_penalties
            or not _computes_like_keras(self)
            or any(each.shape.rank != 3 for each in inputs)
            or not all(is_long_enough(each, self._devices) for each in inputs)
            or not is_plain_mask(attention_mask, masks)
        ):
            return super().call(
                *inputs,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        devices, inner = self._devices, attention_parts(self)
        query_mask = drop_masks(self, *inputs, query_mask)
        mask = AttentionMask(
            self, devices, inputs, query_mask, (value_mask, key_mask), attention_mask,
            use_causal_mask,
        )  # fmt: skip
        queries, values, *keys = (positions_of(each, devices) for each in inputs)
        keys = keys[0] if keys else values
        gates = None if inner.gate is None else on_devices(devices, inner.gate, queries)
        queries = on_devices(devices, inner.query, queries)
        scale = keras.ops.cast(inner.scale, queries[0].dtype)
        queries = on_devices(devices, lambda each: each * scale, queries)
        keys = on_devices(devices, inner.key, keys)
        values = on_devices(devices, inner.value, values)
        dropout = AttentionDropout(self, queries, mask, training)
        heads = (queries[0].shape[2], keys[0].shape[2])
        exchange = exchange_of(*heads, len(devices), use_causal_mask)
        compute = _by_ring if exchange == RING else _by_heads
        outputs = compute(queries, keys, values, mask, dropout, devices)
        if gates is not None:
            outputs = on_devices(devices, tf.multiply, outputs, gates)
        outputs = on_devices(devices, inner.output, outputs)
        is_handed_on = isinstance(self, keras.layers.MultiHeadAttention)
        return Parts(outputs, 1, devices, query_mask if is_handed_on else None)


def _computes_like_keras(layer) -> bool:
    """Returns whether it computes as in Keras: no method set on it, no projection replaced."""
    inner = attention_parts(layer)
    gates = [inner.gate] if inner.gate else []
    projections = [inner.query, inner.key, inner.value, inner.output, *gates]
    return not has_own_methods(layer) and all(
        original_class(each) is keras.layers.EinsumDense
        and not has_own_methods(each)
        and each.activation in (None, keras.activations.linear, keras.activations.sigmoid)
        for each in projections
    )


def _by_ring(queries, keys, values, mask, dropout, devices):
    number, outputs = len(devices), []
    for i, device in enumerate(devices):
        order = [(i + step) % number for step in range(number)]
        blocks = [_block(mask, dropout, i, j) for j in order]
        received = ([each[j] for j in order] for each in (keys, values))
        outputs.append(attend(queries[i], *received, blocks, device))
    return outputs


def _by_heads(queries, keys, values, mask, dropout, devices):
    number = len(devices)
    groups = queries[0].shape[2] // keys[0].shape[2]
    of_keys = sizes_of(keys[0].shape[2], devices)
    of_queries = [size * groups for size in of_keys]

    def sent(tensors, sizes):
        """Returns, for each receiving device, its heads of each device's positions."""
        parts = on_devices(devices, lambda each: tf.split(each, sizes, 2), tensors)
        return list(zip(*parts, strict=True))

    queries, keys, values = sent(queries, of_queries), sent(keys, of_keys), sent(values, of_keys)
    outputs = []
    for k, device in enumerate(devices):
        heads = slice(sum(of_queries[:k]), sum(of_queries[: k + 1]))
        outputs.append([
            attend(
                queries[k][i],
                keys[k],
                values[k],
                [_block(mask, dropout, i, j, heads) for j in range(number)],
                device,
            )
            for i in range(number)
        ])  # fmt: skip
    return on_devices(devices, lambda *of_device: tf.concat(of_device, 2), *outputs)


def _block(mask, dropout, i, j, heads=slice(None)) -> Block | None:
    if not mask.is_seen(i, j):
        return None
    return Block(mask.of(i, j, heads), dropout.of(i, j, heads), mask.masked)
