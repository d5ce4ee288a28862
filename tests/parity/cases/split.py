"""What a layer that can be split may hold, stand beside, or be asked for."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from .. import data, refusals
from ..case import Case, fit_arguments, observe
from ..programs import case, digits
from .layers import row_digits

GROUP = "Layers that are split"


def attention(change=None, **options):
    """One layer of attention over the rows of a digit."""

    def build():
        x = inputs = keras.Input((8, 8))
        attend = layers.MultiHeadAttention(4, 3, name="attend", **options)
        x = attend(x, x)
        if change is not None:
            change(attend)
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))

    return build


def with_lora(attend):
    attend._query_dense.enable_lora(2)
    attend._output_dense.enable_lora(2)


def with_frozen_projections(attend):
    attend._key_dense.trainable = False
    attend._query_dense.kernel.trainable = False


def pair(*between, shape=(64,), **options):
    """Two dense layers, and what stands between them: `between` holds functions that make it."""

    def build():
        first = layers.Dense(12, **({"activation": "tanh"} | options))
        middle = [make() for make in between]
        flat = [layers.Flatten()] if len(shape) > 1 else []
        return keras.Sequential(
            [keras.Input(shape), first, *middle, layers.Dense(9), *flat, layers.Dense(10)]
        )

    return build


def slopes(*shared_axes):
    return lambda: layers.PReLU(shared_axes=shared_axes, alpha_initializer="uniform")


def convolutions_with_one_slope():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.PReLU(shared_axes=[3], alpha_initializer="uniform"),
            layers.DepthwiseConv2D(3, depth_multiplier=2),
            layers.Conv2D(4, 1),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def images():
    x, y = data.images()
    return {"x": x, "y": y}


def frozen_variables():
    model = pair(layers.BatchNormalization)()
    model.layers[0].kernel.trainable = False
    model.layers[1].gamma.trainable = False
    model.layers[2].bias.trainable = False
    return model


def a_layer_of_two_models():
    """A dense layer that the outer model calls, and the one nested in it."""
    shared = layers.Dense(8, activation="tanh")
    inner = keras.Sequential([keras.Input((8,)), shared, layers.Dense(8)], name="inner")
    inputs = keras.Input((64,))
    x = layers.Dense(8)(inputs)
    return keras.Model(inputs, layers.Dense(10)(inner(shared(x))))


def heads_with_masks_of_their_own():
    x = inputs = keras.Input((8, 8))
    mask = keras.Input((2, 8, 8), dtype="bool")
    x = layers.MultiHeadAttention(2, 3)(x, x, attention_mask=mask)
    return keras.Model([inputs, mask], layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def masked_rows():
    x, y = data.rows()
    mask = np.random.default_rng(0).random((len(x), 2, 8, 8)) > 0.3
    return {"x": [x, mask], "y": y}


def ragged_text():
    ids, y = data.tokens(by_length=False)
    return {"x": tf.RaggedTensor.from_tensor(ids, padding=0), "y": y}


def mean_of_embeddings():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    x = layers.Embedding(17, 6)(ids)
    x = layers.Lambda(lambda rows: tf.reduce_mean(rows, axis=1), output_shape=(6,))(x)
    return keras.Model(ids, layers.Dense(10)(x))


def submodel(form, case: Case):
    """Trains, then predicts with a model that ends in the middle, and trains a head upon it."""
    model = form.model(case)
    arguments = fit_arguments(case, form)
    model.fit(**arguments)
    features = keras.Model(model.inputs, model.layers[-2].output)
    predicted = features.predict(arguments["x"], verbose=0)
    return observe(model, None, features=predicted)


CASES = [
    case(GROUP, "LoRA inside of attention", "LoRA inside of attention", build=attention(with_lora),
         data=row_digits,
         # The factors are float32, whatever the policy.
         tolerance=1e-4),
    case(GROUP, "attention with an activity regularizer", "attention with an activity regularizer",
         build=attention(activity_regularizer=keras.regularizers.L2(0.1)), data=row_digits),
    case(GROUP, "frozen projections, kernels and biases", "frozen projections of attention",
         build=attention(with_frozen_projections), data=row_digits),
    case(GROUP, "frozen projections, kernels and biases", "frozen kernels and biases",
         build=frozen_variables, refused=refusals.MOMENTS_OF_A_BATCH),
    case(GROUP, "a mask for each head", "a mask for each head",
         build=heads_with_masks_of_their_own, data=masked_rows),
    *(
        case(GROUP, "`PReLU` with shared axes", f"PReLU shared over {axes} of {shape}",
             build=pair(slopes(*axes), shape=shape), data=digits if shape == (64,) else row_digits)
        for axes, shape in [((1,), (64,)), ((1,), (8, 8)), ((2,), (8, 8)), ((1, 2), (8, 8))]
    ),
    case(GROUP, "`PReLU` with shared axes", "PReLU shared over the channels",
         build=convolutions_with_one_slope, data=images),
    case(GROUP, "a layer of another dtype", "Dropout in float32",
         build=pair(lambda: layers.Dropout(0.3, dtype="float32"))),
    case(GROUP, "a layer of another dtype", "Activation in float16",
         # Rounded to 3 digits there; another order of sums rounds a few to the next one.
         build=pair(lambda: layers.Activation("tanh", dtype="float16"), activation=None),
         tolerance=1e-3),
    case(GROUP, "an activation that mixes the features", "Dense with softmax before Dense",
         build=pair(activation="softmax")),
    case(GROUP, "a layer of two models", "a layer of two models", build=a_layer_of_two_models),
    case(GROUP, "a submodel that ends in the middle", "a submodel that ends in the middle",
         build=pair(), train=submodel),
    case(GROUP, "ragged input", "ragged input", build=mean_of_embeddings, data=ragged_text),
]  # fmt: skip
