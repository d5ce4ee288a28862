"""Multi-head attention split by heads."""

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.layers.dropout import share_draws
from tfparallel.layers.layer import (
    FixedLayer,
    SplitLayer,
    local_layer,
    sizes_of,
    split_variables,
)
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import on_devices, on_each, pieces, whole
from tfparallel.seams.keras import attention_axes, dropout_of, mask_of, output_projection, set_mask


class ParallelMultiHeadAttention(ParallelHint, SplitLayer):
    """Attention whose heads are split: each device computes some of them from end to end.

               query, key, value kernels                    output kernel
                (width, heads, key_dim)                (heads, value_dim, width)
               ┌───────────┬───────────┐                     ┌───────────┐
               │ heads 0…1 │ heads 2…3 │                     │ heads 0…1 │ CPU:0
               └───────────┴───────────┘                     ├───────────┤
                   CPU:0       CPU:1                         │ heads 2…3 │ CPU:1
                                                             └───────────┘

        y = Σ_k attention(x·Q_k, x·K_k, x·V_k)·O_k + b

    A column-parallel projection, softmax head by head, and a row-parallel projection: one reduction
    forward, one backward. For grouped-query attention, a device gets whole groups: key and value
    heads with the query heads that read them.

    Input: query `(batch, T, width)`, value and key `(batch, S, width)`, masks, all whole. Output:
    `(batch, T, width)`, whole, on the first device.

    Written in a model with the arguments of `keras.layers.MultiHeadAttention`, it is that plain
    layer until `tensor_parallel` splits it. `keras.layers.GroupQueryAttention` is split as it is.

    Example:
        >>> inputs = keras.Input((16, 64))
        >>> attend = tfparallel.layers.ParallelMultiHeadAttention(num_heads=8, key_dim=64)
        >>> outputs = attend(inputs, inputs, use_causal_mask=True)

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, arXiv 1909.08053, 2019.
        Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
        Checkpoints, arXiv 2305.13245, 2023.
    """

    plain, kind = keras.layers.MultiHeadAttention, "heads"

    def split(self) -> None:
        heads = _head_counts(self)
        groups = sizes_of(min(heads.values()), self._devices)
        locals_ = []
        for device, size in zip(self._devices, groups, strict=True):
            counts = {name: size * number // min(heads.values()) for name, number in heads.items()}
            locals_.append(local_layer(self, device, **counts))
        # The query heads; there may be more of them than key and value heads.
        most = max(heads, key=heads.get)
        numbers = [local.get_config()[most] for local in locals_]
        object.__setattr__(self, "_num_heads_of_parts", numbers)
        object.__setattr__(self, "_output_bias", output_projection(self).bias)
        for projection in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense"):
            if getattr(self, projection, None) is not None:
                _take_projection(self, locals_, projection, {"kernel": 1, "bias": 0})
        _take_projection(self, locals_, "_output_dense", {"kernel": 0})
        for local in locals_:
            # The whole layer adds the bias once, to the sum.
            object.__setattr__(output_projection(local), "bias", None)
        if self.dropout > 0:
            share_draws(
                dropout_of(self), [dropout_of(local) for local in locals_],
                self._num_heads_of_parts,
                axis=self._heads_axis,
            )  # fmt: skip
        self._hold(locals_)

    @property
    def _heads_axis(self) -> int:
        """The axis of the heads in scores, and in masks of scores: (batch, …, heads, T, S)."""
        return -1 - 2 * len(attention_axes(self))

    def call(self, query, value, key=None, **kwargs):
        scores_too = kwargs.get("return_attention_scores", False)
        names = [name for name in kwargs if tf.is_tensor(kwargs[name])]
        copies: dict[int, list] = {}
        mask = kwargs.get("attention_mask")
        if mask is not None and self._has_heads(mask):
            sizes, axis = self._num_heads_of_parts, self._heads_axis
            copies[id(mask)] = pieces(mask, sizes, axis, self._devices)
        inputs = list(map(whole, [query, value] if key is None else [query, value, key]))
        for tensor in [*inputs, *(kwargs[name] for name in names)]:
            if id(tensor) not in copies:  # Self-attention reads one tensor three times.
                copies[id(tensor)] = on_each(tensor, self._devices)

        def attend(k, local):
            local_kwargs = {**kwargs, **{name: copies[id(kwargs[name])][k] for name in names}}
            return local(*(copies[id(tensor)][k] for tensor in inputs), **local_kwargs)

        locals_ = self._small.layers
        outputs = on_devices(self._devices, attend, range(len(locals_)), locals_)
        for tensor in inputs:
            # Keras's attention removes the mask from its inputs, so that later layers ignore it.
            if mask_of(copies[id(tensor)][0]) is None:
                set_mask(tensor, None)
        scores = None
        if scores_too:
            outputs, scores = zip(*outputs, strict=True)
        total = tf.add_n(outputs, name="sum_of_parts")
        if self._output_bias is not None:
            total = total + keras.ops.cast(self._output_bias, total.dtype)
        if mask_of(outputs[0]) is not None:
            set_mask(total, mask_of(outputs[0]))
        if not scores_too:
            return total
        return total, tf.concat(scores, self._heads_axis)

    def _has_heads(self, mask) -> bool:
        """Returns whether each head has its own mask."""
        if len(mask.shape) <= -self._heads_axis:
            return False
        return mask.shape[self._heads_axis] == sum(self._num_heads_of_parts) > 1


def _head_counts(layer) -> dict[str, int]:
    """Returns the numbers of heads in a layer's config, by key."""
    config = layer.get_config()
    names = ("num_heads", "num_query_heads", "num_key_value_heads")
    return {name: config[name] for name in names if name in config}


def _take_projection(layer, locals_, name, axes) -> None:
    from_whole = extend(getattr(layer, name), FixedLayer)
    from_whole.fix()
    split_variables(from_whole, [getattr(local, name) for local in locals_], axes)
