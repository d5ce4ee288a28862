"""Layers: Keras's own, what draws, what keeps or counts; inputs that are no dense numbers."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.judge.program import (
    DRAWN,
    EITHER,
    EXACT,
    REFUSED,
    Make,
    Of,
    TwoDense,
    centred,
    integers,
    net,
    numbers,
    positive,
    program,
    targets,
)


def of_series(*middle):
    """Rows of 5 places of 4 features, and a mean over the places at the end."""
    return net(*middle, layers.Flatten, inputs=(5, 4), first=False)


def of_images(*middle):
    return net(*middle, layers.Flatten, inputs=(6, 6, 2), first=False)


def of_ids(*middle, end=layers.GlobalAveragePooling1D):
    """Rows of 5 ids, 0 for padding."""
    table = Make(layers.Embedding, 9, 4, mask_zero=True)
    return net(table, *middle, end, inputs=(5,), first=False, dtype="int64")


# Keras's own layers.
OF_FEATURES = {
    "LayerNormalization": Make(layers.LayerNormalization),
    "LayerNormalization, rms": Make(layers.RMSNormalization),
    "GroupNormalization": Make(layers.GroupNormalization, groups=2),
    "UnitNormalization": Make(layers.UnitNormalization),
    "BatchNormalization": Make(layers.BatchNormalization),
    "Rescaling": Make(layers.Rescaling, 0.5, offset=1),
    "Discretization": Make(
        layers.Discretization, bin_boundaries=[-1.0, 0.0, 1.0], output_mode="one_hot"
    ),
    "RepeatVector": [Make(layers.RepeatVector, 3), layers.Flatten],
    "Permute": [Make(layers.Reshape, (2, 2)), Make(layers.Permute, (2, 1)), layers.Flatten],
    "PReLU": Make(layers.PReLU),
    "Softmax": Make(layers.Softmax),
    "EinsumDense": Make(layers.EinsumDense, "ab,bc->ac", output_shape=3),
    "Lambda": Make(layers.Lambda, lambda x: x - ops.mean(x, axis=-1, keepdims=True)),
    "activity regularizer": Make(layers.Dense, 4, activity_regularizer=keras.regularizers.L2(0.1)),
    "ActivityRegularization": Make(layers.ActivityRegularization, l1=0.1, l2=0.1),
    "kernel regularizer": Make(layers.Dense, 4, kernel_regularizer="l2", bias_regularizer="l1"),
    "kernel constraint": Make(layers.Dense, 4, kernel_constraint=keras.constraints.MaxNorm(0.5)),
    "frozen": Make(layers.Dense, 4, trainable=False),
    "Identity": Make(layers.Identity),
}
OF_SERIES = {
    "LSTM": Make(layers.LSTM, 3),
    "LSTM, sequences": Make(layers.LSTM, 3, return_sequences=True, go_backwards=True),
    "GRU": Make(layers.GRU, 3),
    "SimpleRNN": Make(layers.SimpleRNN, 3, unroll=True),
    "Bidirectional": Make(layers.Bidirectional, Make(layers.LSTM, 2)),
    "stacked RNN": Make(layers.RNN, [Make(layers.GRUCell, 2), Make(layers.LSTMCell, 3)]),
    "Conv1D": Make(layers.Conv1D, 3, 2, padding="causal", dilation_rate=2),
    "MaxPooling1D": Make(layers.MaxPooling1D, 2),
    "TimeDistributed": Make(layers.TimeDistributed, Make(layers.Dense, 3)),
    "EinsumDense of series": Make(layers.EinsumDense, "abc,cd->abd", output_shape=(5, 3)),
    "BatchNormalization of series": Make(layers.BatchNormalization),
    "Masking and LSTM": [Make(layers.Masking, 0.0), Make(layers.LSTM, 3)],
    "GlobalMaxPooling1D": Make(layers.GlobalMaxPooling1D),
    "UpSampling1D": Make(layers.UpSampling1D, 2),
    "ZeroPadding1D": Make(layers.ZeroPadding1D, 1),
    "Cropping1D": Make(layers.Cropping1D, 1),
}
OF_IMAGES = {
    "Conv2D": Make(layers.Conv2D, 3, 3, strides=2, padding="same"),
    "DepthwiseConv2D": Make(layers.DepthwiseConv2D, 3),
    "SeparableConv2D": Make(layers.SeparableConv2D, 3, 3),
    "Conv2DTranspose": Make(layers.Conv2DTranspose, 2, 3, strides=2),
    "AveragePooling2D": Make(layers.AveragePooling2D, 2),
    "MaxPooling2D": Make(layers.MaxPooling2D, 2),
    "Resizing": Make(layers.Resizing, 4, 4),
    "CenterCrop": Make(layers.CenterCrop, 4, 4),
    "BatchNormalization of images": Make(layers.BatchNormalization),
    "GroupNormalization of images": Make(layers.GroupNormalization, 2),
    "ConvLSTM1D": Make(layers.ConvLSTM1D, 2, 2),
    "UpSampling2D": Make(layers.UpSampling2D, 2, interpolation="bilinear"),
    "groups of channels": Make(layers.Conv2D, 4, 3, groups=2),
    "GlobalAveragePooling2D": [Make(layers.GlobalAveragePooling2D)],
}
OF_IDS = {
    "masked mean": [],
    "masked LSTM": [Make(layers.LSTM, 3, return_sequences=True)],
    "masked BatchNormalization": [layers.BatchNormalization],
}
for name, makes in OF_FEATURES.items():
    program(f"layer: {name}", EXACT, net(*(makes if isinstance(makes, list) else [makes])))
for name, makes in OF_SERIES.items():
    makes = makes if isinstance(makes, list) else [makes]
    program(f"layer: {name}", EXACT, of_series(*makes), x=numbers(7, 5, 4))
for name, makes in OF_IMAGES.items():
    makes = makes if isinstance(makes, list) else [makes]
    program(f"layer: {name}", EXACT, of_images(*makes), x=numbers(7, 6, 6, 2))
for name, makes in OF_IDS.items():
    program(f"layer: {name}", EXACT, of_ids(*makes), x=integers())
program(
    "layer: SpectralNormalization",
    EITHER,
    lambda: keras.Sequential(
        [keras.Input((4,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1)]
    ),
)
program("layer: Softmax of axis 0", REFUSED, net(Make(layers.Softmax, axis=0)))
program(
    "layer: LayerNormalization of axis 0",
    REFUSED,
    net(Make(layers.LayerNormalization, axis=0, scale=False, center=False)),
)
program("layer: UnitNormalization of axis 0", REFUSED, net(Make(layers.UnitNormalization, axis=0)))
program("layer: Lambda that mixes", REFUSED, net(Make(layers.Lambda, centred)))
program("layer: activation that mixes", REFUSED, net(Make(layers.Dense, 3, activation=centred)))
program(
    "layer: recurrent activation that mixes",
    REFUSED,
    of_series(Make(layers.LSTM, 3, activation=centred)),
    x=numbers(7, 5, 4),
)
program(
    "layer: activity regularizer that mixes",
    EITHER,
    net(Make(layers.Dense, 3, activity_regularizer=lambda x: ops.sum(ops.mean(x, 0) ** 2))),
)
program(
    "layer: einsum behind a batch normalization",
    REFUSED,
    lambda: keras.Sequential(
        [
            keras.Input((4,)),
            layers.BatchNormalization(),
            Of(lambda x: tf.einsum("bc,bd->cd", x, x)[:1] + x),
            layers.Dense(1),
        ]
    ),
)


def adapted():
    inputs = keras.Input((4,))
    layer = layers.Normalization()
    layer.adapt(numbers(20))
    return keras.Model(inputs, layers.Dense(1)(layer(inputs)))


program("layer: Normalization", EXACT, adapted)


class Transformed(layers.Layer):
    """A block of a transformer over the places of a row, with positions."""

    def __init__(self, **attention):
        super().__init__()
        self.attention = attention
        self.attend = layers.MultiHeadAttention(2, 2)
        self.places = layers.Embedding(5, 4)
        self.norm = layers.LayerNormalization()
        self.supports_masking = True

    def build(self, shape):
        self.attend.build(shape, shape)
        self.places.build(None)
        self.norm.build(shape)

    def call(self, x):
        x = x + self.places(ops.arange(ops.shape(x)[1]))
        return self.norm(x + self.attend(x, x, **self.attention))


class AttendsAllRows(layers.Layer):
    """Attention whose sequence is the batch."""

    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 2)

    def build(self, shape):
        self.attend.build((1, *shape), (1, *shape))

    def call(self, x):
        return self.attend(x[None], x[None])[0]


class TiedPositions(layers.Layer):
    """An embedding that is read once a batch, and with the number of each row."""

    def __init__(self, of_rows):
        super().__init__()
        self.of_rows = of_rows
        self.table = layers.Embedding(200, 4)

    def build(self, shape):
        self.table.build(None)

    def call(self, x):
        if self.of_rows:
            return x + self.table(ops.arange(ops.shape(x)[0]))
        return x + ops.sum(self.table(ops.arange(3)), axis=0)


program("layer: attention", EXACT, of_series(Transformed), x=numbers(7, 5, 4))
program(
    "layer: causal attention",
    EXACT,
    of_series(Make(Transformed, use_causal_mask=True)),
    x=numbers(7, 5, 4),
)
program("layer: masked attention", EXACT, of_ids(Transformed), x=integers())
program("layer: attention of all rows", REFUSED, net(AttendsAllRows))
program("layer: positions", EXACT, net(Make(TiedPositions, False)))
program("layer: positions of the rows", REFUSED, net(Make(TiedPositions, True)))


def two_towers(join, width=1):
    def build():
        inputs = keras.Input((4,))
        left, right = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
        return keras.Model(inputs, layers.Dense(width)(join()([left, right])))

    return build


program("layer: Dot", EXACT, two_towers(Make(layers.Dot, 1, normalize=True)))
for cls in (layers.Add, layers.Concatenate, layers.Average, layers.Maximum, layers.Multiply):
    program(f"layer: {cls.__name__}", EXACT, two_towers(cls))
program(
    "layer: Concatenate of axis 0",
    EITHER,
    lambda: (
        lambda x: keras.Model(
            x,
            layers.Dense(1)(
                Of(lambda y: tf.split(y, 2, axis=0)[0])(
                    layers.Concatenate(axis=0)([layers.Dense(3)(x), layers.Dense(3)(x)])
                )
            ),
        )
    )(keras.Input((4,))),
)
program(
    "layer: attention of two series",
    EXACT,
    lambda: (
        lambda x: keras.Model(
            x,
            layers.Dense(1)(layers.Flatten()(layers.AdditiveAttention()([x, layers.Dense(4)(x)]))),
        )
    )(keras.Input((5, 4))),
    x=numbers(7, 5, 4),
)


def known_batch(middle, size=6):
    return lambda: keras.Sequential(
        [keras.Input(batch_shape=(size, 5, 4)), middle(), layers.Dense(1)]
    )


program(
    "layer: stateful LSTM",
    EITHER,
    known_batch(Make(layers.LSTM, 3, stateful=True)),
    x=numbers(6, 5, 4),
)
program(
    "layer: known batch size",
    EITHER,
    known_batch(layers.Flatten),
    x=numbers(6, 5, 4),
)
program(
    "layer: mean over a known batch size",
    REFUSED,
    lambda: keras.Sequential(
        [
            keras.Input(batch_shape=(6, 4)),
            Of(lambda x: x - tf.add_n(tf.unstack(x)) / 6),
            layers.Dense(1),
        ]
    ),
    x=numbers(6),
)
program(
    "layer: constant of a row each",
    REFUSED,
    lambda: keras.Sequential(
        [
            keras.Input(batch_shape=(6, 4)),
            layers.Dense(4),
            Of(lambda x: x * tf.constant(numbers(6, 1, seed=3))),
            layers.Dense(1),
        ]
    ),
    x=numbers(6),
)


# One layer, called twice. A functional model would pass its own mode to both calls.
class TwoModes(keras.Model):
    """Calls a layer as in inference, and in the mode of the step if it is told so."""

    def __init__(self, middle, mixes=False, twice=True):
        super().__init__()
        self.hidden, self.middle, self.head = layers.Dense(4), middle(), layers.Dense(1)
        self.mixes, self.twice = mixes, twice

    def call(self, x, training=False):
        hidden = self.hidden(x)
        x = self.middle(hidden, training=False)
        if self.twice:
            x = x + self.middle(hidden, training=training)
        return self.head(centred(x) if self.mixes else x)


def in_two_modes(*how):
    return functools.partial(TwoModes, *how)


class MixesInTraining(layers.Layer):
    def __init__(self, in_training=True):
        super().__init__()
        self.in_training = in_training

    def call(self, x, training=False):
        return centred(x) if bool(training) == self.in_training else x


program("modes: mixes in training", REFUSED, in_two_modes(MixesInTraining, False))
program("modes: mixes in inference", REFUSED, in_two_modes(Make(MixesInTraining, False), False))
program("modes: dropout, and a mean", REFUSED, in_two_modes(Make(layers.Dropout, 0.5), True))
program("modes: dropout", DRAWN, in_two_modes(Make(layers.Dropout, 0.5), False))
program("modes: batch normalization", EXACT, in_two_modes(layers.BatchNormalization, False))
program(
    "modes: mixes in training alone, and is never trained so",
    EITHER,
    in_two_modes(MixesInTraining, False, False),
)
program(
    "modes: mixes in inference alone, and always is there",
    REFUSED,
    in_two_modes(Make(MixesInTraining, False), False, False),
)


# What draws, alone and beside what mixes.
class Draws(layers.Layer):
    """Adds noise, in inference too.

    Args:
        how: Takes the layer and a shape.
    """

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0.1 * ops.cast(self.how(self, ops.shape(x)), x.dtype)


class DrawsOfStep(layers.Layer):
    """Draws from a counter of its own."""

    def build(self, shape):
        self.step = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        seed = tf.stack([tf.convert_to_tensor(self.step), 3])
        self.step.assign(self.step + 1)
        return x + 0.1 * tf.random.stateless_normal(tf.shape(x), seed, dtype=x.dtype)


DRAWING = {
    "GaussianNoise": Make(layers.GaussianNoise, 0.3),
    "GaussianDropout": Make(layers.GaussianDropout, 0.3),
    "AlphaDropout": Make(layers.AlphaDropout, 0.3),
    "Dropout": Make(layers.Dropout, 0.4),
    "Dropout of columns": Make(layers.Dropout, 0.4, noise_shape=(1, 4)),
    "ActivityRegularization and Dropout": [
        Make(layers.ActivityRegularization, 0.1),
        Make(layers.Dropout, 0.3),
    ],
    "keras.random": Make(
        Draws, lambda layer, size: keras.random.normal(size, seed=layer.seed_generator)
    ),
    "keras.random without a seed": Make(Draws, lambda layer, size: keras.random.uniform(size)),
    "stateless_uniform": Make(
        Draws, lambda layer, size: tf.random.stateless_uniform(size, layer.seed_generator.next())
    ),
    "stateless_uniform, one seed": Make(
        Draws, lambda layer, size: tf.random.stateless_uniform(size, (1, 2))
    ),
    "tf.random": Make(Draws, lambda layer, size: tf.random.uniform(size)),
    "tf.random with a seed": Make(Draws, lambda layer, size: tf.random.normal(size, seed=4)),
    "tf.random.Generator": Make(
        Draws, lambda layer, size: tf.random.get_global_generator().uniform(size)
    ),
    "own step": DrawsOfStep,
    "noise of a weight": Make(
        Draws, lambda layer, size: keras.random.normal((4,), seed=layer.seed_generator)
    ),
    "shuffle of columns": Make(
        Draws, lambda layer, size: keras.random.shuffle(ops.arange(4), seed=layer.seed_generator)
    ),
    "categorical": Make(
        Draws,
        lambda layer, size: keras.random.categorical(
            ops.ones((size[0], 4)), 4, seed=layer.seed_generator
        ),
    ),
}
for name, makes in DRAWING.items():
    makes = makes if isinstance(makes, list) else [makes]
    program(f"draws: {name}", DRAWN, net(*makes))
    program(f"behind a draw: {name}", REFUSED, net(*makes, centred))
program("beside a draw: mean, then noise", REFUSED, net(centred, Make(layers.GaussianNoise, 0.3)))
program(
    "draws: shuffled rows",
    REFUSED,
    net(lambda x: tf.random.shuffle(x)),
)
program(
    "draws: shuffled rows of keras",
    REFUSED,
    net(lambda x: keras.random.shuffle(x, seed=3)),
)
DRAWING_SERIES = {
    "LSTM of dropout": Make(layers.LSTM, 3, dropout=0.4),
    "GRU of recurrent dropout": Make(layers.GRU, 3, recurrent_dropout=0.4),
    "SpatialDropout1D": Make(layers.SpatialDropout1D, 0.4),
}
for name, makes in DRAWING_SERIES.items():
    program(f"draws: {name}", DRAWN, of_series(makes), x=numbers(7, 5, 4))
    program(f"behind a draw: {name}", REFUSED, of_series(makes, centred), x=numbers(7, 5, 4))
AUGMENTING = {
    "RandomFlip": Make(layers.RandomFlip, dtype="float32"),
    "RandomContrast": Make(layers.RandomContrast, 0.2, dtype="float32"),
    "RandomTranslation": Make(layers.RandomTranslation, 0.2, 0.2, dtype="float32"),
}
for name, makes in AUGMENTING.items():
    program(f"draws: {name}", DRAWN, of_images(makes), x=numbers(7, 6, 6, 2))
    program(f"behind a draw: {name}", REFUSED, of_images(makes, centred), x=numbers(7, 6, 6, 2))


# Inputs that are not dense numbers.
def words(num_rows=7, length=3):
    vocabulary = np.array(["a", "b", "c", "d", "e"])
    return vocabulary[np.random.default_rng(2).integers(0, 5, (num_rows, length))]


WORDS = ["a", "b", "c", "d"]


def of_words(layer, mixes, width=9, shape=(3,)):
    def build():
        inputs = keras.Input(shape, dtype="string")
        x = layers.Embedding(width, 4)(layer()(inputs))
        x = layers.GlobalAveragePooling1D()(x)
        return keras.Model(inputs, layers.Dense(1)(Of(centred)(x) if mixes else x))

    return build


def vectorized(length):
    def make():
        layer = layers.TextVectorization(output_sequence_length=length)
        layer.set_vocabulary(WORDS)
        return layer

    return make


OF_WORDS = {
    "StringLookup": (Make(layers.StringLookup, vocabulary=WORDS), (3,), words()),
    "Hashing": (Make(layers.Hashing, 9), (3,), words()),
    "TextVectorization": (
        vectorized(4),
        (),
        np.array(["a b", "c", "d a c e", "b", "a", "c c", ""]),
    ),
}
for name, (layer, shape, x) in OF_WORDS.items():
    x = tf.constant(x)
    for mixes in (False, True):
        end = ", and a mean" if mixes else ""
        verdict = REFUSED if mixes else EXACT
        program(
            f"input: {name}{end}",
            verdict,
            of_words(layer, mixes, shape=shape),
            x=x,
            as_dataset=True,
        )
program(
    "input: TextVectorization to the longest",
    REFUSED,
    of_words(vectorized(None), False, shape=()),
    x=tf.constant(OF_WORDS["TextVectorization"][2]),
    as_dataset=True,
)
program(
    "input: IntegerLookup, and a mean",
    REFUSED,
    net(
        Make(layers.IntegerLookup, vocabulary=[3, 50, 700], output_mode="multi_hot"),
        lambda x: tf.cast(x, keras.config.floatx()),
        centred,
        first=False,
        dtype="int64",
    ),
    x=np.array([3, 50, 700, 8])[integers(7, 4, 4)],
)
program(
    "input: CategoryEncoding",
    EXACT,
    net(Make(layers.CategoryEncoding, 9, "multi_hot"), first=False, dtype="int64"),
    x=integers(7, 4),
)
program(
    "input: CategoryEncoding, and a mean",
    REFUSED,
    net(Make(layers.CategoryEncoding, 9, "count"), centred, first=False, dtype="int64"),
    x=integers(7, 4),
)


SPARSE = tf.sparse.from_dense(np.where(numbers() > 0, numbers(), 0.0))
for mixes in (False, True):
    end, verdict = (", and a mean", REFUSED) if mixes else ("", EXACT)
    more = [centred] if mixes else []
    program(
        f"input: sparse{end}",
        verdict,
        net(*more, sparse=True),
        x=SPARSE,
        as_dataset=True,
    )


class OfRagged(keras.Model):
    """Embeds words, and takes the mean of each row."""

    def __init__(self, function, mixes):
        super().__init__()
        self.function, self.mixes = function, mixes
        self.embed, self.head = layers.Embedding(9, 4), layers.Dense(1)

    def call(self, ids):
        x = self.function(self, ids)
        return self.head(centred(x) if self.mixes else x)


def mean_of_ragged(model, ids):
    padded = ids.to_tensor()
    mask = ops.cast(padded > 0, model.compute_dtype)[..., None]
    return ops.sum(model.embed(padded) * mask, 1) / ops.maximum(ops.sum(mask, 1), 1)


def mean_of_values(model, ids):
    return tf.reduce_mean(ids.with_values(model.embed(ids.values)), axis=1)


def mean_of_padded(model, ids):
    return ops.mean(model.embed(ids.to_tensor()), 1)


RAGGED = tf.ragged.constant([[1], [2, 3], [4, 5, 6, 7], [8], [1, 2], [3, 4, 5], [6]], dtype="int64")
OF_RAGGED = {
    "padded and masked": (mean_of_ragged, False, EXACT),
    "padded and masked, and a mean": (mean_of_ragged, True, REFUSED),
    "values": (mean_of_values, False, EXACT),
    "values, and a mean": (mean_of_values, True, REFUSED),
    "padded to the longest": (mean_of_padded, False, REFUSED),
}
for name, (function, mixes, verdict) in OF_RAGGED.items():
    program(
        f"input: ragged, {name}", verdict, functools.partial(OfRagged, function, mixes), x=RAGGED
    )


def of_names(mixes):
    def build():
        inputs = {name: keras.Input((2,), name=name) for name in ("left", "right")}
        x = layers.Concatenate()([layers.Dense(2)(each) for each in inputs.values()])
        return keras.Model(inputs, layers.Dense(1)(Of(centred)(x) if mixes else x))

    return build


NAMED = {"left": numbers(7, 2), "right": numbers(7, 2, seed=4)}
program("input: a dictionary", EXACT, of_names(False), x=NAMED)
program("input: a dictionary, and a mean", REFUSED, of_names(True), x=NAMED)
program(
    "input: bools, and a mean",
    REFUSED,
    net(lambda x: tf.cast(x, keras.config.floatx()), centred, first=False, dtype="bool"),
    x=numbers() > 0,
)
program(
    "input: uint8 images, and a mean",
    REFUSED,
    of_images(Make(layers.Rescaling, 1 / 255), centred),
    x=(positive(7, 6, 6, 2) * 80).astype("uint8"),
)


# What changes between two calls of `fit`.
class Switched(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mixes = False

    def call(self, x):
        return centred(x) if self.mixes else x


def turn_on(model):
    for layer in model.layers:
        if hasattr(layer, "mixes"):
            layer.mixes = True


def another_function(model):
    for layer in model.layers:
        if hasattr(layer, "function"):
            layer.function = centred


def another_activation(model):
    model.get_layer("first").activation = centred


program("changed: an attribute", REFUSED, net(Switched), between=turn_on)
program("changed: a function", REFUSED, net(lambda x: x * 2), between=another_function)
program("changed: an activation", REFUSED, net(lambda x: x * 2), between=another_activation)
program("changed: nothing", EXACT, net(Switched), between=lambda model: None)
program(
    "changed: what is frozen",
    EXACT,
    net(layers.BatchNormalization),
    between=lambda model: setattr(model.layers[0], "trainable", False),
)


class MixesLater(layers.Layer):
    """Mixes once a variable says so, in one graph."""

    def build(self, shape):
        self.step = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.step.assign_add(1.0)
        return x - tf.cast(self.step > 1.5, x.dtype) * tf.reduce_mean(x, axis=0)


class HiddenByZeros(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return x + self.scale * ops.mean(x, axis=0)


program("changed: by a variable", REFUSED, net(MixesLater))
program("changed: a weight that is zero", REFUSED, net(HiddenByZeros))


# Variables that a call writes.
class Writes(layers.Layer):
    """Keeps something in a variable, and adds it to the rows if it is told so."""

    def __init__(self, how, shape=(), reads=False, initial="zeros"):
        super().__init__()
        self.how, self.state_shape, self.reads, self.initial = how, shape, reads, initial

    def build(self, shape):
        self.state = self.add_weight(
            shape=self.state_shape, initializer=self.initial, trainable=False
        )

    def call(self, x):
        self.how(self.state, x)
        return x + 0.1 * self.state if self.reads else x


def moving(average, x):
    average.assign(0.9 * average + 0.1 * ops.mean(x, axis=0))


WRITING = {
    "a counter": (lambda state, x: state.assign_add(1.0), (), EXACT),
    "a counter that decays": (lambda state, x: state.assign(state * 0.5 + 1.0), (), EXACT),
    "a moving mean": (moving, (4,), EITHER),
    "a sum": (lambda state, x: state.assign_add(ops.sum(x, axis=0)), (4,), EITHER),
    "a count of rows": (
        lambda state, x: state.assign_add(ops.cast(ops.shape(x)[0], state.dtype)),
        (),
        EITHER,
    ),
    "a maximum": (
        lambda state, x: state.assign(ops.maximum(state, ops.max(x, axis=0))),
        (4,),
        EITHER,
    ),
    "the last mean": (lambda state, x: state.assign(ops.mean(x, axis=0)), (4,), EITHER),
    "the last row": (lambda state, x: state.assign(x[-1]), (4,), EITHER),
    "a norm": (lambda state, x: state.assign(ops.sqrt(ops.sum(x**2))), (), EITHER),
}
for name, (how, shape, verdict) in WRITING.items():
    program(f"writes: {name}", verdict, net(Make(Writes, how, shape)))
    verdict = verdict if verdict == EXACT else EITHER
    program(f"writes: {name}, and reads it", verdict, net(Make(Writes, how, shape, reads=True)))


class Helper:
    """An object that is no layer holds the variable, so Keras does not find it."""

    def __init__(self, layer, shape):
        self.state = keras.Variable(np.zeros(shape), dtype=layer.dtype, trainable=False)


class WritesInHelper(Writes):
    def build(self, shape):
        self.helper = Helper(self, self.state_shape)

    def call(self, x):
        y = x + 0.1 * self.helper.state
        self.how(self.helper.state, x)
        return y


for name, (how, shape, verdict) in WRITING.items():
    program(f"writes: {name}, in a helper", verdict, net(Make(WritesInHelper, how, shape)))


class HoldsVariable(layers.Layer):
    """Writes a variable that Keras does not know."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.state = tf.Variable(tf.zeros((4,), "float64"), trainable=False)

    def call(self, x):
        self.how(self.state, x)
        return x + 0.1 * tf.cast(self.state, x.dtype)


program(
    "writes: a tf.Variable, a counter",
    EITHER,
    net(Make(HoldsVariable, lambda state, x: state.assign_add(tf.ones((4,), state.dtype)))),
)
program(
    "writes: a tf.Variable, a mean",
    EITHER,
    net(Make(HoldsVariable, lambda state, x: state.assign(tf.reduce_mean(x, 0)))),
)


class HoldsMetric(layers.Layer):
    def __init__(self, what, metric=keras.metrics.Mean):
        super().__init__()
        self.what, self.metric = what, metric(name="held")

    def call(self, x):
        self.metric.update_state(self.what(x))
        return x


class ReadsMetric(HoldsMetric):
    """Divides by the mean of the steps before."""

    def call(self, x):
        return super().call(x) / (1.0 + self.metric.result())


class ReadsMetricBefore(HoldsMetric):
    def call(self, x):
        mean = self.metric.result()
        return super().call(x) / (1.0 + mean)


for cls in (ReadsMetric, ReadsMetricBefore):
    program(
        f"writes: a metric, {cls.__name__}", EITHER, net(Make(cls, lambda x: ops.sum(x**2, 1)))
    )
program("writes: a metric of rows", EXACT, net(Make(HoldsMetric, lambda x: ops.sum(x, 1))))
program("writes: a metric of a mean", EITHER, net(Make(HoldsMetric, lambda x: ops.mean(x))))
program(
    "writes: a metric of a norm", EITHER, net(Make(HoldsMetric, lambda x: ops.sqrt(ops.sum(x**2))))
)
program(
    "writes: a sum of rows",
    EXACT,
    net(Make(HoldsMetric, lambda x: ops.abs(x), keras.metrics.Sum)),
)


# Losses that layers add.
class Adds(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


ADDED = {
    "a mean": (lambda x: ops.mean(x**2), EXACT),
    "a mean of each row": (lambda x: 0.1 * ops.mean(ops.sum(x**2, axis=1)), EXACT),
    "a sum": (lambda x: 0.01 * ops.sum(x**2), EITHER),
    "a sum over the number of rows": (
        lambda x: ops.sum(x**2) / ops.cast(ops.shape(x)[0], x.dtype),
        EITHER,
    ),
    "a square of a mean": (lambda x: ops.sum(ops.mean(x, axis=0) ** 2), EITHER),
    "a max": (lambda x: ops.max(x), EITHER),
    "a variance": (lambda x: ops.mean(ops.var(x, axis=0)), EITHER),
    "a vector": (lambda x: ops.sum(x**2, axis=1), EITHER),
    "a masked mean": (
        lambda x: ops.sum(ops.where(x > 0, x**2, 0.0)) / ops.sum(ops.cast(x > 0, x.dtype)),
        EITHER,
    ),
    "a constant": (lambda x: ops.cast(0.5, x.dtype), EITHER),
    "a mean, and a constant": (lambda x: ops.mean(x**2) + 0.5, EITHER),
    "a square of a mean of squares": (lambda x: ops.mean(x**2) ** 2, EITHER),
    "a difference of means": (lambda x: ops.mean(x[:, 0]) - 2 * ops.mean(x[:, 1]), EXACT),
}
for name, (loss, verdict) in ADDED.items():
    program(f"adds: {name}", verdict, net(Make(Adds, loss)))


class Encodes(layers.Layer):
    """The middle of a VAE; without sampling it gives the mean."""

    def __init__(self, reduce, samples):
        super().__init__()
        self.reduce, self.samples = reduce, samples
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)
        self.seed_generator = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.mean.build(shape)
        self.log_var.build(shape)

    def call(self, x):
        mean, log_var = self.mean(x), self.log_var(x)
        kl = -0.5 * ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=1)
        self.add_loss(0.1 * self.reduce(kl))
        if not self.samples:
            return mean + ops.exp(log_var / 2)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator, dtype=x.dtype)
        return mean + ops.exp(log_var / 2) * noise


program("vae: KL averaged", EXACT, net(Make(Encodes, ops.mean, False)))
program("vae: KL summed", EITHER, net(Make(Encodes, ops.sum, False)))
program("vae: KL averaged, with draws", DRAWN, net(Make(Encodes, ops.mean, True)))
program("vae: draws, and a mean", REFUSED, net(Make(Encodes, ops.mean, True), centred))


# A draw whose numbers count for nothing, so that all others can be held against one device's.
def nothing(layer, size):
    return 0.0 * keras.random.normal(size, seed=layer.seed_generator)


BESIDE_NOTHING = {
    "mean": (centred, REFUSED),
    "rows": (ops.tanh, EXACT),
    "batch normalization": (layers.BatchNormalization, EXACT),
    "adds a sum": (Make(Adds, lambda x: 0.1 * ops.sum(x**2)), EITHER),
    "adds a mean": (Make(Adds, lambda x: ops.mean(x**2)), EXACT),
    "adds a square of a mean": (Make(Adds, lambda x: ops.sum(ops.mean(x, axis=0) ** 2)), EITHER),
    "adds a maximum": (Make(Adds, ops.max), EITHER),
    "writes a moving mean": (Make(Writes, moving, (4,)), EITHER),
    "writes the last mean": (
        Make(Writes, lambda state, x: state.assign(ops.mean(x, axis=0)), (4,)),
        EITHER,
    ),
    "writes a counter": (Make(Writes, lambda state, x: state.assign_add(1.0)), EXACT),
    "a metric of a norm": (Make(HoldsMetric, lambda x: ops.sqrt(ops.sum(x**2))), EITHER),
}
for name, (middle, verdict) in BESIDE_NOTHING.items():
    program(f"nothing drawn: {name}", verdict, net(Make(Draws, nothing), middle))


def two_branches(draws):
    """A layer that draws in one branch, one that mixes in the other."""

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(4)(inputs)
        x = layers.Add()([draws()(x), Of(centred)(x)])
        return keras.Model(inputs, layers.Dense(1)(x))

    return build


for name in ("GaussianNoise", "Dropout", "keras.random", "tf.random"):
    program(f"beside a draw: {name}", REFUSED, two_branches(DRAWING[name]))
program("beside a draw: mean, then keras.random", REFUSED, net(centred, DRAWING["keras.random"]))
program("beside a draw: mean, then tf.random", REFUSED, net(centred, DRAWING["tf.random"]))


# What a call keeps in an attribute.
class Keeps(keras.Model):
    """Keeps its hidden rows, and reads them behind a batch normalization.

    Args:
        read: Takes the model and what comes out of the normalization.
    """

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.hidden, self.norm = layers.Dense(4), layers.BatchNormalization()
        self.head = layers.Dense(1)
        self.stored = None

    def build(self, shape):
        self.hidden.build(shape)
        self.norm.build((None, 4))
        self.head.build((None, 4))

    def call(self, x, training=False):
        self.stored = self.hidden(x)
        return self.head(self.read(self, self.norm(self.stored, training=training)))


class KeepsInLayer(layers.Layer):
    def __init__(self):
        super().__init__()
        self.stored = None

    def call(self, x):
        self.stored = x
        return ops.tanh(x)


def two_layers():
    inputs = keras.Input((4,))
    keeps = KeepsInLayer()
    x = layers.BatchNormalization()(keeps(layers.Dense(4)(inputs)))
    return keras.Model(inputs, layers.Dense(1)(Of(lambda y: y + keeps.stored)(x)))


class TrainsWithKept(Keeps):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2) + 0.1 * ops.mean(self.stored**2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class LossOfKept(Keeps):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(self.stored**2)


class MetricsOfKept(Keeps):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        metrics = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, "kept": ops.mean(self.stored)}


class PredictsKept(Keeps):
    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return self(x, training=False) + ops.sum(self.stored, axis=1, keepdims=True)


def plainly(model, x):
    return x


def with_kept(model, x):
    return x + model.stored


program("kept: read behind a batch normalization", EXACT, functools.partial(Keeps, with_kept))
program(
    "kept: read behind a batch normalization, pieces of one size",
    EXACT,
    functools.partial(Keeps, with_kept),
    x=numbers(6),
)
program("kept: in a layer, read in another", EXACT, two_layers)
program("kept: and never read", EXACT, functools.partial(Keeps, plainly))
program("kept: read in train_step", EITHER, functools.partial(TrainsWithKept, plainly))
program("kept: read in compute_loss", EITHER, functools.partial(LossOfKept, plainly))
program("kept: read in compute_metrics", EITHER, functools.partial(MetricsOfKept, plainly))
program(
    "kept: read in predict_step",
    EITHER,
    functools.partial(PredictsKept, plainly),
    then=lambda model, x: model.predict(x, batch_size=7, verbose=0),
)
program(
    "kept: read in predict_step, pieces of one size",
    EITHER,
    functools.partial(PredictsKept, plainly),
    x=numbers(6),
    then=lambda model, x: model.predict(x, batch_size=6, verbose=0),
)
program(
    "predicts: mixes in inference",
    REFUSED,
    net(Make(MixesInTraining, False)),
    then=lambda model, x: model.predict(x, batch_size=7, verbose=0),
)
program(
    "predicts: draws",
    DRAWN,
    net(DRAWING["keras.random"]),
    then=lambda model, x: model.predict(x, batch_size=7, verbose=0),
)


class Normed(keras.Model):
    """Keeps hidden rows in a list that grows."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(4) for _ in range(2)]
        self.norm, self.head = layers.BatchNormalization(), layers.Dense(1)

    def build(self, shape):
        for each in (*self.hidden, self.norm, self.head):
            each.build((None, 4))

    def call(self, x, training=False):
        outputs = []
        for layer in self.hidden:
            x = self.norm(layer(x), training=training)
            outputs.append(x)
        return self.head(outputs[0] + outputs[1])


program("kept: in a local list", EXACT, Normed)


# Whole models with a step of their own.
class OwnStep(TwoDense):
    """A head over Dense, with the loss of a function of its own.

    Args:
        loss: Takes hidden rows, outputs and targets.
    """

    def __init__(self, loss):
        super().__init__()
        self.own_loss = loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            hidden = self.hidden(x)
            loss = self.own_loss(hidden, self.head(hidden), y)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def in_batch_negatives(hidden, outputs, y):
    near = hidden @ ops.transpose(hidden)
    return -ops.mean(ops.diagonal(ops.log_softmax(near)))


OWN_STEPS = {
    "mean": lambda hidden, outputs, y: ops.mean((outputs - y) ** 2),
    "sum": lambda hidden, outputs, y: 0.1 * ops.sum((outputs - y) ** 2),
    "negatives in the batch": in_batch_negatives,
    "norm": lambda hidden, outputs, y: ops.sqrt(ops.sum((outputs - y) ** 2)),
    "centred rows": lambda hidden, outputs, y: ops.mean((outputs - y - ops.mean(outputs)) ** 2),
}
for name, loss in OWN_STEPS.items():
    program(f"own step: {name}", EITHER, functools.partial(OwnStep, loss))


class Mixes(OwnStep):
    def call(self, x):
        return self.head(centred(self.hidden(x)))

    def train_step(self, data):
        return keras.Model.train_step(self, data)


program("own call: mean", REFUSED, functools.partial(Mixes, None))
program(
    "own call: targets of rows",
    EXACT,
    functools.partial(OwnStep, OWN_STEPS["mean"]),
    y=targets(7, 1),
)
