"""Layers, a metric and a data set as users write them, for the generator's programs.

A program that uses one of them holds its source, so that it runs by itself.
"""

import keras
import tensorflow as tf
from keras import layers, ops


@keras.saving.register_keras_serializable("fuzz")
class PositionEmbedding(layers.Layer):
    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[-1])
        self.table.build(())

    def call(self, x):
        return x + self.table(ops.arange(x.shape[1]))


@keras.saving.register_keras_serializable("fuzz")
class AddedPositions(layers.Layer):
    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], initializer="normal", name="positions")

    def call(self, x):
        return x + self.positions


@keras.saving.register_keras_serializable("fuzz")
class ClassToken(layers.Layer):
    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer="normal", name="token")

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x], axis=1)


@keras.saving.register_keras_serializable("fuzz")
class Counter(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x / (1.0 + 0.1 * self.calls)


@keras.saving.register_keras_serializable("fuzz")
class RunningMean(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x, training=False):
        centred = x - self.mean
        if training:
            mean = ops.mean(x, axis=tuple(range(x.ndim - 1)))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return centred


@keras.saving.register_keras_serializable("fuzz")
class MeanReadAtOnce(RunningMean):
    def call(self, x, training=False):
        super().call(x, training=training)
        return x - self.mean


@keras.saving.register_keras_serializable("fuzz")
class RunningSum(layers.Layer):
    def build(self, shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(ops.cast(ops.shape(x)[0], self.rows.dtype))
        return x / (1.0 + 0.01 * self.rows)


@keras.saving.register_keras_serializable("fuzz")
class RunningMax(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="largest"
        )

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return x / self.largest


@keras.saving.register_keras_serializable("fuzz")
class MeanLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@keras.saving.register_keras_serializable("fuzz")
class SumLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


@keras.saving.register_keras_serializable("fuzz")
class WeightLoss(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.abs(self.scale)))
        return x * self.scale


@keras.saving.register_keras_serializable("fuzz")
class Measured(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(ops.abs(x))
        return x


@keras.saving.register_keras_serializable("fuzz")
class MinusBatchMean(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


@keras.saving.register_keras_serializable("fuzz")
class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=-1, keepdims=True)


@keras.saving.register_keras_serializable("fuzz")
class BothHalves(layers.Layer):
    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        first, second = ops.split(self.inner(ops.concatenate([x, -x], axis=0)), 2, axis=0)
        return first + 0.5 * second  # The sum of an odd function would be rounding alone.


@keras.saving.register_keras_serializable("fuzz")
class TimeMajor(layers.Layer):
    def __init__(self, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.drop = layers.Dropout(rate, seed=3)

    def call(self, x, training=False):
        x = self.drop(ops.swapaxes(x, 0, 1), training=training)
        return ops.swapaxes(ops.tanh(x), 0, 1)

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}


@keras.saving.register_keras_serializable("fuzz")
class DroppedWeight(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = layers.Dropout(0.3, seed=5)

    def build(self, shape):
        self.bias = self.add_weight(shape=shape[1:], initializer="normal", name="bias")

    def call(self, x, training=False):
        return x + self.drop(self.bias[None], training=training)


@keras.saving.register_keras_serializable("fuzz")
class ByBatchSize(layers.Layer):
    def call(self, x):
        return x / ops.cast(ops.shape(x)[0], x.dtype)


@keras.saving.register_keras_serializable("fuzz")
class Folded(layers.Layer):
    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build((None, shape[-1]))

    def call(self, x):
        folded = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(self.inner(folded), (-1, *x.shape[1:]))


@keras.saving.register_keras_serializable("fuzz")
class TwoTables(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(7, shape[-1]), initializer="normal", name="table")

    def call(self, x):
        index = ops.cast(ops.abs(x[..., 0]) * 3, "int32") % 7
        return x + ops.take(self.table, index, axis=0)


@keras.saving.register_keras_serializable("fuzz")
class Unused(layers.Layer):
    def build(self, shape):
        self.used = layers.Dense(shape[-1])
        self.unused = layers.Dense(3)
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, x):
        return self.used(x) + ops.stop_gradient(x)


@keras.saving.register_keras_serializable("fuzz")
class Chosen(layers.Layer):
    def call(self, x, training=False):
        x = ops.cond(ops.sum(ops.abs(x)) >= 0.0, lambda: ops.tanh(x), lambda: x)
        return 0.5 * x if training else x


@keras.saving.register_keras_serializable("fuzz")
class ByRow(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return ops.vectorized_map(lambda row: row * self.scale, x)


@keras.saving.register_keras_serializable("fuzz")
class Largests(layers.Layer):
    def call(self, x):
        return ops.sort(x, axis=-1) + ops.max(x, axis=-1, keepdims=True)


@keras.saving.register_keras_serializable("fuzz")
class Noise(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(4)

    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x), seed=self.seed_generator) if training else x


@keras.saving.register_keras_serializable("fuzz")
class OnesBeside(layers.Layer):
    def call(self, x):
        return x + ops.ones((1, x.shape[-1]), dtype=x.dtype)


@keras.saving.register_keras_serializable("fuzz")
class Bag(layers.Layer):
    def build(self, shape):
        self.table = layers.Embedding(6, shape[-1])
        self.table.build(())

    def call(self, x):
        return x + ops.mean(self.table(ops.convert_to_tensor([0, 2, 2, 5])), axis=0)


@keras.saving.register_keras_serializable("fuzz")
class Scaled(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), axis=-1) * 0.5


@keras.saving.register_keras_serializable("fuzz")
class Largest(keras.metrics.Metric):
    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y_pred))))

    def result(self):
        return self.value


@keras.saving.register_keras_serializable("fuzz")
class RowsSeen(keras.metrics.Metric):
    def __init__(self, name="rows_seen", **kwargs):
        super().__init__(name=name, **kwargs)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], self.rows.dtype))

    def result(self):
        return self.rows


@keras.saving.register_keras_serializable("fuzz")
class ErrorsInFunction(keras.metrics.Metric):
    def __init__(self, name="errors_in_function", **kwargs):
        super().__init__(name=name, **kwargs)
        self.errors = self.add_variable((), "zeros", name="errors")
        self.added = tf.function(self.add)

    def add(self, y_true, y_pred):
        self.errors.assign_add(ops.sum(ops.abs(y_true - y_pred)))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.added(ops.cast(y_true, y_pred.dtype), y_pred)

    def result(self):
        return self.errors


@keras.saving.register_keras_serializable("fuzz")
def absolute_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable("fuzz")
def squared_error(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable("fuzz")
def flattened_error(y_true, y_pred):
    return ops.reshape(ops.square(y_true - y_pred), (-1,))


@keras.saving.register_keras_serializable("fuzz")
class Remembering(keras.losses.Loss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.Variable(1.0, trainable=False, dtype="float64", name="size")

    def call(self, y_true, y_pred):
        loss = ops.mean(ops.square(y_true - y_pred), axis=-1)
        self.size.assign(0.9 * self.size + 0.1 * ops.cast(ops.mean(loss), "float64"))
        return loss / (1.0 + ops.cast(ops.stop_gradient(self.size.value), loss.dtype))


def with_decay(model):
    def loss(y_true, y_pred):
        decay = sum(ops.sum(ops.square(w)) for w in model.trainable_weights)
        return ops.mean(ops.square(y_true - y_pred), axis=-1) + 0.01 * ops.cast(decay, y_pred.dtype)

    return loss


@keras.saving.register_keras_serializable("fuzz")
class Compounding(keras.metrics.Metric):
    def __init__(self, name="compounding", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "ones", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.cast(ops.sum(ops.abs(y_true - y_pred)), self.value.dtype)
        self.value.assign_add(0.001 * error * self.value)

    def result(self):
        return self.value


@keras.saving.register_keras_serializable("fuzz")
class TurnsByRows(layers.Layer):
    def call(self, x):
        def body(i, state):
            number, total = state
            positive = ops.sum(ops.cast(x > 0, "int32"))
            return positive, total + ops.cast(number + 1, x.dtype)

        start = (ops.zeros((), "int32"), ops.zeros((), x.dtype))
        return x * (1.0 + 0.01 * ops.fori_loop(0, 2, body, start)[1])


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays, batch_size):
        super().__init__()
        self.arrays, self.batch_size = arrays, batch_size

    def __len__(self):
        return -(-len(self.arrays[1]) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return keras.tree.map_structure(lambda array: array[rows], self.arrays)


@keras.saving.register_keras_serializable("fuzz")
class WordsAndPositions(layers.Layer):
    def __init__(self, mask_zero=False, **kwargs):
        super().__init__(**kwargs)
        self.mask_zero = mask_zero
        self.words = layers.Embedding(9, 4, mask_zero=mask_zero)
        self.places = layers.Embedding(8, 4)

    def build(self, shape):
        self.words.build(shape)
        self.places.build(shape)

    def call(self, ids):
        return self.words(ids) + self.places(ops.arange(ops.shape(ids)[-1]))

    def compute_mask(self, ids, mask=None):
        return self.words.compute_mask(ids)

    def get_config(self):
        return {**super().get_config(), "mask_zero": self.mask_zero}


@keras.saving.register_keras_serializable("fuzz")
class TiedEmbedding(layers.Layer):
    def __init__(self, mask_zero=False, **kwargs):
        super().__init__(**kwargs)
        self.mask_zero, self.supports_masking = mask_zero, True
        self.table = layers.Embedding(9, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x, reverse=False):
        return ops.matmul(x, ops.transpose(self.table.embeddings)) if reverse else self.table(x)

    def compute_mask(self, x, mask=None):
        return ops.not_equal(x, 0) if self.mask_zero and x.ndim == 2 else mask

    def get_config(self):
        return {**super().get_config(), "mask_zero": self.mask_zero}


@keras.saving.register_keras_serializable("fuzz")
class TiedTable(layers.Layer):
    def build(self, shape):
        self.table = layers.Embedding(7, shape[-1])
        self.table.build(())

    def call(self, x):
        words = self.table(ops.cast(ops.abs(x[..., 0]) * 3, "int32") % 7)
        logits = ops.matmul(x + words, ops.transpose(self.table.embeddings))
        return x + ops.matmul(ops.softmax(logits), self.table.embeddings)


@keras.saving.register_keras_serializable("fuzz")
class Transformer(layers.Layer):
    def __init__(self, causal=False, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        self.causal, self.rate, self.supports_masking = causal, rate, True

    def build(self, shape):
        self.norm = layers.LayerNormalization()
        self.attend = layers.MultiHeadAttention(2, 3, dropout=self.rate, seed=2)
        self.drop = layers.Dropout(self.rate, seed=3)
        self.widen = layers.Dense(2 * shape[-1], activation="gelu")
        self.narrow = layers.Dense(shape[-1])
        self.attend.build(shape, shape)
        for layer in (self.norm, self.widen):
            layer.build(shape)
        self.narrow.build((*shape[:-1], 2 * shape[-1]))

    def call(self, x, training=False):
        normed = self.norm(x)
        x += self.attend(normed, normed, use_causal_mask=self.causal, training=training)
        return x + self.drop(self.narrow(self.widen(x)), training=training)

    def get_config(self):
        return {**super().get_config(), "causal": self.causal, "rate": self.rate}


@keras.saving.register_keras_serializable("fuzz")
class AttentionByHand(layers.Layer):
    def build(self, shape):
        self.project = layers.Dense(3 * shape[-1])
        self.project.build(shape)
        self.bias = self.add_weight(shape=(2 * shape[1],), initializer="normal", name="bias")

    def call(self, x):
        length = x.shape[1]
        query, key, value = ops.split(self.project(x), 3, axis=-1)
        apart = ops.arange(length)[:, None] - ops.arange(length)[None] + length
        scores = ops.einsum("btc,bsc->bts", query, key) + ops.take(self.bias, apart)
        return x + ops.einsum("bts,bsc->btc", ops.softmax(scores), value)


@keras.saving.register_keras_serializable("fuzz")
class MaskedMean(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        if mask is None:
            return x - ops.mean(x, axis=1, keepdims=True)
        weights = ops.cast(mask, x.dtype)[..., None]
        total = ops.sum(x * weights, axis=1, keepdims=True)
        return x - total / ops.sum(weights, axis=1, keepdims=True)


@keras.saving.register_keras_serializable("fuzz")
class Shifted(layers.Layer):
    def call(self, x):
        return x + 0.5 * ops.concatenate([ops.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


@keras.saving.register_keras_serializable("fuzz")
class Sinusoids(layers.Layer):
    def call(self, x):
        angles = ops.cast(ops.arange(x.shape[1]), x.dtype)[:, None]
        return x + ops.sin(angles / (1.0 + ops.cast(ops.arange(x.shape[2]), x.dtype)))


@keras.saving.register_keras_serializable("fuzz")
class SoFar(layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=1) / ops.cast(ops.shape(x)[1], x.dtype)


@keras.saving.register_keras_serializable("fuzz")
class ByFirst(layers.Layer):
    def call(self, x):
        return x * ops.sigmoid(x[:, :1])


@keras.saving.register_keras_serializable("fuzz")
class ClippedStep(keras.Model):
    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {**self.compute_metrics(x, y, y_pred, sample_weight=weights), "loss": loss}


@keras.saving.register_keras_serializable("fuzz")
class DecayingStep(keras.Model):
    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
            decay = sum(ops.sum(ops.square(weight)) for weight in self.trainable_weights)
            total = loss + 0.01 * ops.cast(decay, loss.dtype)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {**self.compute_metrics(x, y, y_pred, sample_weight=weights), "loss": loss}
