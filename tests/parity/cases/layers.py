"""Layers that keep state, look across the batch, or shape it."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from .. import data, refusals
from ..programs import case, compiled, cross_entropy, digits
from .metrics import conv_norm_net
from .optimizers import image_digits
from .structures import fit_evaluate_predict

GROUP = "Layers"


def stack(shape, *middle, pool=True):
    """A model of fresh layers: `middle` holds functions that make them."""

    def build():
        built = [make() for make in middle]
        tail = [layers.Flatten()] if pool and len(shape) > 1 else []
        return keras.Sequential([keras.Input(shape), *built, *tail, layers.Dense(10)])

    return build


def row_digits():
    x, y = data.rows()
    return {"x": x, "y": y}


def dense():
    return layers.Dense(12)


NORMALIZATIONS = {
    "BatchNormalization": stack((64,), dense, layers.BatchNormalization, layers.ReLU),
    "BatchNormalization with momentum 0.7 and without scale": stack(
        (64,), dense, lambda: layers.BatchNormalization(momentum=0.7, scale=False)
    ),
    "BatchNormalization of rows after a convolution": stack(
        (8, 8, 1), lambda: layers.Conv2D(4, 3), lambda: layers.BatchNormalization(axis=1)
    ),
    "BatchNormalization after a convolution": conv_norm_net,
    "BatchNormalization of a large mean": stack(
        # E[x^2] - E[x]^2 loses 8 digits here; centred moments lose none.
        (64,),
        lambda: layers.Rescaling(1.0, offset=1e4),
        layers.BatchNormalization,
        dense,
    ),
    "LayerNormalization": stack((64,), dense, layers.LayerNormalization),
    "GroupNormalization": stack(
        (8, 8, 1), lambda: layers.Conv2D(6, 3), lambda: layers.GroupNormalization(3)
    ),
    "RMSNormalization": stack((64,), dense, layers.RMSNormalization),
    "UnitNormalization": stack((64,), dense, layers.UnitNormalization),
    "SpectralNormalization": stack((64,), lambda: layers.SpectralNormalization(layers.Dense(12))),
}


def feature_of(name: str) -> str:
    return f"`{name.split(' ')[0]}`"


def refused_norm(name: str) -> dict[str, str]:
    """What a pipeline says of a normalization that looks at other rows, or keeps a state."""
    if name.startswith("SpectralNormalization"):
        return refusals.STATE_OF_A_CALL
    return refusals.MOMENTS_OF_A_BATCH if name.startswith("BatchNormalization") else {}


def norm_case(name, build, load=digits, **fields):
    return case(
        GROUP,
        feature_of(name),
        f"layer {name}",
        build=build,
        data=load,
        train=fit_evaluate_predict,
        **fields,
    )


CASES = [
    norm_case(
        name,
        build,
        image_digits if "conv" in name or "Group" in name else digits,
        **(
            # 1e4 against a spread of 0.3 leaves 11 of 16 digits to the centred
            # pixels themselves, before any layer reduces them.
            {"tolerance": 1e-6, "compile": compiled(lambda: keras.optimizers.SGD(0.01))}
            if "large mean" in name
            else {}
        ),
        refused=refused_norm(name),
    )
    for name, build in NORMALIZATIONS.items()
]


def masked_norm():
    """The mask of padding reaches the batch normalization: it counts valid tokens."""
    inputs = keras.Input((12,), dtype="int64")
    x = layers.Embedding(20, 6, mask_zero=True)(inputs)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GRU(6)(x)))


def masked_norm_of_steps():
    """Along the steps each has valid tokens of its own. Story: they were counted together."""
    inputs = keras.Input((12,), dtype="int64")
    x = layers.Embedding(20, 6, mask_zero=True)(inputs)
    x = layers.BatchNormalization(axis=1)(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GRU(6)(x)))


def text_digits():
    x, y = data.tokens()
    return {"x": x, "y": y}


def frozen_norm():
    """A frozen batch normalization runs in inference mode."""
    model = conv_norm_net()
    model.layers[1].trainable = False
    return model


CASES += [
    norm_case(
        "BatchNormalization of masked input",
        masked_norm,
        text_digits,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    norm_case(
        "BatchNormalization of masked input along the steps",
        masked_norm_of_steps,
        text_digits,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    norm_case("BatchNormalization that is frozen", frozen_norm, image_digits),
    norm_case(
        "BatchNormalization twice, one layer called on two inputs",
        lambda: twice_normalized(),
        digits,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    case(
        GROUP,
        "`BatchNormalization`",
        "layer BatchNormalization in float32",
        dtype="float32",
        build=conv_norm_net,
        data=image_digits,
        compile=compiled(lambda: keras.optimizers.SGD(0.05)),
        # The convolution's bias has no true gradient: what it holds is noise.
        tolerance=1e-3,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
]


def twice_normalized():
    norm = layers.BatchNormalization()
    inputs = keras.Input((64,))
    x = norm(layers.Dense(12)(inputs))
    x = norm(ops.tanh(x) + 1.0)
    return keras.Model(inputs, layers.Dense(10)(x))


RECURRENT = {
    "LSTM": stack((8, 8), lambda: layers.LSTM(6)),
    "GRU": stack((8, 8), lambda: layers.GRU(6, return_sequences=True)),
    "SimpleRNN": stack((8, 8), lambda: layers.SimpleRNN(6, go_backwards=True)),
    "Bidirectional": stack((8, 8), lambda: layers.Bidirectional(layers.LSTM(5))),
    "TimeDistributed": stack(
        (8, 8), lambda: layers.TimeDistributed(layers.Dense(4, activation="tanh"))
    ),
    "Conv1D": stack((8, 8), lambda: layers.Conv1D(5, 3, activation="relu", padding="causal")),
    "SeparableConv1D": stack((8, 8), lambda: layers.SeparableConv1D(5, 3)),
    "Conv1DTranspose": stack((8, 8), lambda: layers.Conv1DTranspose(3, 3, strides=2)),
    "MultiHeadAttention": lambda: attention_net(),
    "GroupQueryAttention": lambda: grouped_attention_net(),
    "ConvLSTM1D": stack((4, 4, 4), lambda: layers.ConvLSTM1D(3, 2)),
}
SPATIAL = {
    "Conv2D": stack((8, 8, 1), lambda: layers.Conv2D(5, 3, strides=2, activation="relu")),
    "Conv2DTranspose": stack((8, 8, 1), lambda: layers.Conv2DTranspose(2, 3, strides=2)),
    "DepthwiseConv2D": stack((8, 8, 1), lambda: layers.DepthwiseConv2D(3, depth_multiplier=3)),
    "SeparableConv2D": stack((8, 8, 1), lambda: layers.SeparableConv2D(5, 3, depth_multiplier=2)),
    "MaxPooling2D": stack((8, 8, 1), lambda: layers.Conv2D(4, 3), layers.MaxPooling2D),
}


def attention_net():
    inputs = keras.Input((8, 8))
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
    x = layers.LayerNormalization()(x + inputs)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def grouped_attention_net():
    inputs = keras.Input((8, 8))
    x = layers.GroupQueryAttention(4, 4, 2)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalMaxPooling1D()(x)))


def masked_attention():
    inputs = keras.Input((12,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def masked_attention_with_skips():
    """The attention takes the mask off what it reads: the first sum has none, the second has one.

    Story: a tensor that was copied to other devices kept it, and the loss was masked there.
    """
    inputs = keras.Input((12,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    dropped = layers.Dropout(0.1)(x)
    attended = layers.MultiHeadAttention(2, 4)(dropped, dropped)
    sums = [layers.Add()([dropped, attended]), layers.Add()([x, attended])]
    return keras.Model(inputs, [layers.Dense(20)(each) for each in sums])


def text_twice():
    x, _ = data.tokens()
    return {"x": x, "y": [x, x]}


def cube_digits():
    x, y = data.flat()
    return {"x": x.reshape(-1, 4, 4, 4), "y": y}


CASES += [
    case(
        GROUP,
        f"`{name}`",
        f"layer {name}",
        build=build,
        data=cube_digits if name == "ConvLSTM1D" else row_digits,
    )
    for name, build in RECURRENT.items()
]
CASES += [
    case(
        GROUP,
        "`MultiHeadAttention`",
        "layer MultiHeadAttention of masked input",
        build=masked_attention,
        data=text_digits,
    ),
    case(
        GROUP,
        "`MultiHeadAttention`",
        "layer MultiHeadAttention of masked input, with skips",
        build=masked_attention_with_skips,
        compile=compiled(loss=lambda: [cross_entropy(), cross_entropy()]),
        data=text_twice,
    ),
]
CASES += [
    case(
        GROUP,
        f"`{name}`",
        f"layer {name}",
        build=build,
        data=image_digits,
    )
    for name, build in SPATIAL.items()
]


def stateful():
    """The state of a row is carried to the same row of the next batch."""
    inputs = keras.Input(batch_shape=(12, 8, 8))
    return keras.Model(inputs, layers.Dense(10)(layers.LSTM(6, stateful=True)(inputs)))


def even_rows():
    x, y = data.rows(84)
    return {"x": x, "y": y}


CASES += [
    case(
        GROUP,
        "a stateful recurrent layer",
        "stateful LSTM",
        build=stateful,
        data=even_rows,
        fit={"batch_size": 12},
        refused=refusals.STATE_OF_A_ROW,
    )
]


class BatchSized(layers.Layer):
    """Reads the size of the batch, as layers with an initial state do."""

    def call(self, x):
        start = ops.zeros((ops.shape(x)[0], 3), dtype=x.dtype)
        return ops.concatenate([start + 1, x], axis=-1)


class Unrolled(layers.Layer):
    """Folds rows into the batch and back: an inner leading axis that is 8 times longer."""

    def build(self, shape):
        self.inner = layers.Dense(5, activation="tanh")
        self.inner.build((None, shape[-1]))

    def call(self, x):
        folded = ops.reshape(x, (-1, x.shape[-1]))
        return ops.reshape(self.inner(folded), (-1, x.shape[1], 5))


class Counter(layers.Layer):
    """Counts its calls, and keeps a moving mean of what it saw, in its own variables."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x


CASES += [
    case(
        GROUP,
        "a user's layer that reads the batch size",
        "layer that reads the batch size",
        build=stack((64,), dense, BatchSized),
    ),
    case(
        GROUP,
        "a user's layer that folds an axis into the batch",
        "layer that folds an axis",
        build=stack((8, 8), Unrolled),
        data=row_digits,
    ),
    case(
        GROUP,
        "a user's layer that counts its calls",
        "layer that counts its calls",
        build=stack((64,), dense, Counter),
        refused=refusals.STATE_OF_A_CALL,
    ),
]


class Python(layers.Layer):
    """Python computes it, and its gradient."""

    def call(self, x):
        y = tf.py_function(tf.sin, [x], x.dtype)
        y.set_shape(x.shape)
        return y

    def compute_output_shape(self, shape):
        return shape


class DroppingCell(layers.Layer):
    """Draws anew at each time step, in a loop of TensorFlow's."""

    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = units
        self.inner = layers.Dense(units, activation="tanh")
        self.drop = layers.Dropout(0.4, seed=3)

    def build(self, shape):
        self.inner.build((None, shape[-1] + self.state_size))

    def call(self, x, states, training=False):
        output = self.inner(ops.concatenate([x, states[0]], -1))
        return self.drop(output, training=training), [output]


def read_in_a_closure():
    """A decoder with the weights of its encoder, as a `Lambda` gets at them."""
    encoder = layers.Dense(12, activation="tanh")
    inputs = keras.Input((64,))
    x = layers.Dense(12, activation="tanh")(encoder(inputs))
    x = layers.Lambda(lambda h: ops.matmul(h, ops.transpose(encoder.kernel)))(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def scaled():
    """Scales by the largest values of the last calls."""
    model = stack((64,), dense, dense)()
    model.quantize("float8")
    return model


CASES += [
    case(
        GROUP,
        "a weight that a `Lambda` reads in its closure",
        "weight read in a closure",
        build=read_in_a_closure,
    ),
    case(
        GROUP,
        "a user's layer that Python computes (`tf.py_function`)",
        "layer that Python computes",
        build=stack((64,), dense, Python),
    ),
    case(
        GROUP,
        "a user's `RNN` cell with `Dropout`",
        "cell with dropout",
        build=stack((8, 8), lambda: layers.RNN(DroppingCell())),
        data=row_digits,
        refused={"pipeline_parallel": "A layer draws new random values each time a loop"},
    ),
    case(
        GROUP,
        "`quantize(\"float8\")`",
        "float8",
        build=scaled,
        dtype="float32",
        refused=refusals.SCALES_BY_CALLS,
    ),
]
