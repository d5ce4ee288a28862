"""Ring attention: blocks of keys and values go round devices that hold parts of a sequence.

        device 0   q₀ · k₀   q₀ · k₁   q₀ · k₂          out₀ = Σ_j exp(q₀·k_j − m) v_j / Σ_j exp(…)
        device 1   q₁ · k₁   q₁ · k₂   q₁ · k₀
        device 2   q₂ · k₂   q₂ · k₀   q₂ · k₁          one step at a time, from the next device

A device keeps its queries and sees one block of keys and values at a time. Of the softmax over all
positions, it keeps the running maximum and sum of the scores. The backward pass recomputes the
scores of each block. So a device holds (T/S)² scores at a time, never T².

References:
    Liu, Zaharia, Abbeel. Ring Attention with Blockwise Transformers for Near-Infinite Context,
    arXiv 2310.01889, 2023.
    Milakov, Gimelshein. Online normalizer calculation for softmax, arXiv 1805.02867, 2018.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Block(NamedTuple):
    """The queries of one device against the keys of another.

    Attributes:
        mask: Returns which keys a query attends to, in a shape that broadcasts to `(batch, heads,
            T, S)`; or None for all.
        factors: Returns the dropout factors of the weights, in such a shape; or None.
        masked: How scores of masked keys change: "least", so a query without keys attends to all
            equally; "zero", so it attends to none; "less", so it attends to all.
    """

    mask: Callable[[], tf.Tensor | None]
    factors: Callable[[], tf.Tensor | None]
    masked: str = "least"


def attend(
    query: tf.Tensor,
    keys: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    blocks: Sequence[Block | None],
    device: str,
) -> tf.Tensor:
    """Computes attention of one device's queries, block by block.

    Args:
        query: `(batch, T, heads, key_dim)`, scaled.
        keys: The keys of each block, `(batch, S_j, key_heads, key_dim)`, in order of arrival;
            `key_heads` divides `heads`.
        values: The values of each block, `(batch, S_j, key_heads, value_dim)`.
        blocks: The mask and dropout of each block; None for one that no query attends to.
        device: The device of the queries.

    Returns:
        `(batch, T, heads, value_dim)`.
    """
    seen = [j for j, block in enumerate(blocks) if block is not None]
    dtype = tf.as_dtype(keras.backend.result_type(query.dtype.name, "float32"))
    groups = query.shape[2] // keys[0].shape[2]
    sharing = np.repeat(np.eye(keys[0].shape[2], dtype=dtype.as_numpy_dtype), groups, 0)

    def of_heads(block):
        """Copies keys or values to this device; repeats those that several heads share."""
        block = tf.cast(tf.identity(block), dtype)
        return tf.gather(block, sharing.argmax(1), axis=2) if groups > 1 else block

    def of_shared(gradient):
        return tf.einsum("bsnh,nk->bskh", gradient, sharing) if groups > 1 else gradient

    def scores_of(queries, key, block):
        """Returns scores, and where they depend on queries and keys; None for everywhere."""
        scores = tf.einsum("btnh,bsnh->bnts", queries, key)
        mask = block.mask()
        if mask is None:
            return scores, None
        if block.masked == "less":
            return tf.where(mask, scores, scores - tf.constant(1e9, dtype)), None
        return tf.where(mask, scores, tf.constant(0.5 * dtype.min, dtype)), mask

    def effective_weights(weights, mask, block):
        """Applies the mask and dropout to the weights after the softmax."""
        if mask is not None and block.masked == "zero":
            weights = tf.where(mask, weights, tf.zeros_like(weights))
        factors = block.factors()
        return weights if factors is None else weights * tf.cast(factors, dtype)

    @tf.custom_gradient
    def attention(query, *tensors):
        keys, values = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        queries = tf.cast(query, dtype)
        shape = tf.shape(queries)
        rows = tf.stack([shape[0], shape[2], shape[1], 1])
        largest, total, out = tf.fill(rows, tf.constant(dtype.min, dtype)), None, None
        after = []
        for j in seen:
            with tf.control_dependencies(after):
                key, value = of_heads(keys[j]), of_heads(values[j])
            scores, mask = scores_of(queries, key, blocks[j])
            before, largest = largest, tf.maximum(largest, tf.reduce_max(scores, -1, keepdims=True))
            weights = tf.exp(scores - largest)
            sums = tf.reduce_sum(weights, -1, keepdims=True)
            weights = effective_weights(weights, mask, blocks[j])
            sum_of_values = tf.einsum("bnts,bsnh->bnth", weights, value)
            if out is None:
                total, out = sums, sum_of_values
            else:
                rescale = tf.exp(before - largest)
                total, out = total * rescale + sums, out * rescale + sum_of_values
            after = _after(out)
        out /= total

        def gradient(upstream):
            with tf.device(device):
                upstream = tf.einsum("btnh->bnth", tf.cast(upstream, dtype))
                mean = tf.reduce_sum(upstream * out, -1, keepdims=True)
                of_query, after = tf.zeros_like(queries), _after(mean)
                of_keys = [tf.zeros_like(key) for key in keys]
                of_values = [tf.zeros_like(value) for value in values]
                for j in seen:
                    with tf.control_dependencies(after):
                        key, value = of_heads(keys[j]), of_heads(values[j])
                    scores, mask = scores_of(queries, key, blocks[j])
                    # Divide: subtracting log(total) would lose it next to the least score.
                    weights = tf.exp(scores - largest) / total
                    effective = effective_weights(weights, mask, blocks[j])
                    of_value = tf.einsum("bnts,bnth->bsnh", effective, upstream)
                    of_weights = tf.einsum("bnth,bsnh->bnts", upstream, value)
                    of_scores = effective * of_weights - weights * mean
                    if mask is not None:
                        of_scores = tf.where(mask, of_scores, tf.zeros_like(of_scores))
                    of_key = tf.einsum("bnts,btnh->bsnh", of_scores, queries)
                    of_query += tf.einsum("bnts,bsnh->btnh", of_scores, key)
                    of_keys[j] = tf.cast(of_shared(of_key), keys[j].dtype)
                    of_values[j] = tf.cast(of_shared(of_value), values[j].dtype)
                    after = _after(of_query)
                return tf.cast(of_query, query.dtype), *of_keys, *of_values

        return tf.cast(tf.einsum("bnth->btnh", out), query.dtype), gradient

    with tf.device(device):
        return attention(query, *keys, *values)


def _after(tensor) -> list[tf.Operation]:
    return [tensor.op] if tf.is_symbolic_tensor(tensor) else []
