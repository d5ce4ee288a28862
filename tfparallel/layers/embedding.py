"""Embeddings split by the vocabulary."""

import keras
import tensorflow as tf

from tfparallel.judge.propagation import is_judged
from tfparallel.layers.layer import SplitLayer, local_layer, sizes_of
from tfparallel.layers.parallel_hints import ParallelHint
from tfparallel.layers.parts import Parts, on_each, whole
from tfparallel.piece import where_it_is
from tfparallel.seams.keras import set_mask


class VocabParallelEmbedding(ParallelHint, SplitLayer):
    """An embedding whose rows are split: each device holds a part of the vocabulary.

        table (vocabulary, width)          ids        2   9   0   9
            ┌───────────┐                  owner      0   1   0   1
        0…4 │    E_0    │ CPU:0   ── E_0[2], E_0[0] ──┐
            ├───────────┤                             ├── stitched in the order of the ids
        5…9 │    E_1    │ CPU:1   ── E_1[4], E_1[4] ──┘
            └───────────┘

    Each id is sent to its owner, and its row is returned: there is no sum, and no other row is
    sent. The gradient of a part stays sparse, in the order of the ids.

    Input: ids `(batch, …)`, whole, also ragged. Output: `(batch, …, width)`, whole.

    Written in a model with the arguments of `keras.layers.Embedding`, it is that plain layer until
    `tensor_parallel` splits it.

    Example:
        >>> ids = keras.Input((64,), dtype="int32")
        >>> embedded = tfparallel.layers.VocabParallelEmbedding(50_000, 512)(ids)
        >>> embedded.shape
        (None, 64, 512)

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, arXiv 1909.08053, 2019. (There, each device looks up zeros for the other
        devices' ids, and an all-reduce sums the results.)
    """

    plain, kind = keras.layers.Embedding, "vocabulary"

    def split(self) -> None:
        sizes = sizes_of(self.input_dim, self._devices)
        object.__setattr__(self, "_starts", [sum(sizes[:k]) for k in range(len(sizes))])

        def smaller(device, size):
            return local_layer(self, device, input_dim=size)

        self._split(sizes, smaller, {"embeddings": 0, "reverse_embeddings": 1})

    def call(self, inputs):
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self.call(inputs.flat_values))
        ids = tf.convert_to_tensor(whole(inputs))
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        if is_judged(ids):  # The judge would see many tables and no row apart in what follows.
            table = tf.concat([local.embeddings for local in self._small.layers], 0)
            return tf.cast(tf.gather(table, ids), self.compute_dtype)
        with where_it_is(ids):  # Usually the host; a device would have to wait for it.
            flat = tf.reshape(ids, [-1])
            flat = tf.where(flat < 0, flat + self.input_dim, flat)
            # The last part gets all ids outside of the table, and treats them like the whole table.
            flat = tf.where(flat < 0, tf.constant(self.input_dim, flat.dtype), flat)
            starts = tf.constant(self._starts, flat.dtype)
            owners = tf.searchsorted(starts, flat, side="right") - 1
            number = len(self._devices)
            local_ids = tf.dynamic_partition(flat - tf.gather(starts, owners), owners, number)
            places = tf.dynamic_partition(tf.range(tf.size(flat)), owners, number)
        rows = self._on_devices(local_ids)
        shape = tf.concat([tf.shape(ids), [self.output_dim]], 0)
        outputs = tf.reshape(tf.dynamic_stitch(places, rows), shape)
        outputs.set_shape([*ids.shape, self.output_dim])
        return outputs


class ReversibleVocabParallelEmbedding(VocabParallelEmbedding):
    """An embedding whose table is also a language model's last layer, split by the vocabulary.

    In reverse, each device computes the logits of its part, x·E_kᵀ; they are joined.
    """

    def call(self, inputs, reverse=False):
        if not reverse:
            outputs = super().call(inputs)
            mask = keras.layers.Embedding.compute_mask(self, inputs)
            if mask is not None:
                set_mask(outputs, mask)
            return outputs
        copies = on_each(whole(inputs), self._devices)
        return Parts(self._on_devices(copies, reverse=True), -1, self._devices).whole()
