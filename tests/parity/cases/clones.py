"""Built models, cloned with all that was set on them, and models of a form used as any other."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from .. import data, refusals
from ..case import Plain, fit_arguments, observe
from ..programs import case

GROUP = "Clones of built models"


def handed_over(change=None):
    """Trains a built model, changed since, that the form is given; it is compiled there."""

    def train(form, case):
        model = case.build()
        if change is not None:
            change(model)
        # A form takes the model itself, one device a function that returns it.
        model = form.make(model if type(form) is not Plain else lambda: model, case.compile)
        x = case.data()["x"]
        before = model.predict(x, batch_size=17, verbose=0)
        history = model.fit(**fit_arguments(case))
        return observe(model, history.history, before=before)

    return train


def clone(feature, name, change=None, **fields):
    fields = {"train": handed_over(change), "drop_in": False} | fields
    return case(GROUP, feature, name, **fields)


def values(shape):
    return np.cos(np.arange(np.prod(shape))).reshape(shape) * 0.3


def freeze_a_kernel(model):
    model.layers[0].kernel.trainable = False


def nested_norm():
    inner = keras.Sequential(
        [keras.Input((12,)), layers.BatchNormalization(), layers.Dense(10)], name="inner"
    )
    return keras.Sequential([keras.Input((64,)), layers.Dense(12, use_bias=False), inner])


def freeze_a_gamma(model):
    model.layers[1].layers[0].gamma.trainable = False


def thaw_a_bias(model):
    model.layers[0].trainable = False
    model.layers[0].bias.trainable = True


def regularize_a_kernel(model):
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.05)
    model.layers[1].kernel.constraint = keras.constraints.MaxNorm(0.5)


CASES = [
    clone("a variable frozen by itself", "frozen kernel", freeze_a_kernel),
    clone(
        "a variable frozen by itself",
        "frozen gamma in a nested model",
        freeze_a_gamma,
        build=nested_norm,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    clone("a variable trained in a layer that is not", "thawed bias", thaw_a_bias),
    clone(
        "a variable's regularizer and constraint, set later",
        "regularized kernel",
        regularize_a_kernel,
    ),
]


def lora(model):
    model.layers[0].enable_lora(2, lora_alpha=8)
    model.layers[0].lora_kernel_b.assign(values((2, 12)) / 10)


def attention():
    inputs = keras.Input((8, 8))
    outputs = layers.MultiHeadAttention(2, 4, name="attend")(inputs, inputs)
    outputs = layers.Dense(12, activation="tanh")(layers.Flatten()(outputs))
    return keras.Model(inputs, layers.Dense(10)(outputs))


def lora_in_attention(model):
    projection = model.get_layer("attend")._query_dense
    projection.enable_lora(2, lora_alpha=8)
    projection.lora_kernel_b.assign(values(projection.lora_kernel_b.shape) / 10)


def row_digits():
    x, y = data.rows()
    return {"x": x, "y": y}


# Keras makes the factors in float32, whatever the policy.
LORA = {"feature": "LoRA, with an alpha of its own", "tolerance": 1e-4}

CASES += [
    clone(name="lora_alpha", change=lora, **LORA),
    clone(
        name="lora_alpha in attention",
        change=lora_in_attention,
        build=attention,
        data=row_digits,
        **LORA,
    ),
]


def normalized():
    normalize = layers.Normalization()
    normalize.adapt(data.flat()[0] * 3 + 1)
    inputs = keras.Input((64,))
    outputs = layers.Dense(12, activation="tanh")(normalize(inputs))
    return keras.Model(inputs, layers.Dense(10)(outputs))


def looked_up():
    lookup = layers.IntegerLookup(output_mode="multi_hot")
    lookup.adapt(np.arange(1, 15))
    inputs = keras.Input((12,), dtype="int64")
    outputs = layers.Dense(12, activation="tanh")(lookup(inputs))
    return keras.Model(inputs, layers.Dense(10)(outputs))


def token_digits():
    x, y = data.tokens()
    return {"x": x, "y": y}


class Scale(keras.layers.Layer):
    """Multiplies by a number that its config does not have."""

    factor = 1.0

    def call(self, inputs):
        return inputs * self.factor


def with_dropout():
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(12, activation="tanh"),
            Scale(),
            layers.Dropout(0.5, seed=3),
            layers.Dense(10),
        ]
    )


def change_attributes(model):
    model.layers[0].activation = keras.activations.relu
    model.layers[1].factor = 3.0
    model.layers[2].rate = 0.2


def stop_dropping(model):
    model.layers[2].rate = 0.0


CASES += [
    clone("adapted preprocessing layers", "adapted Normalization", build=normalized),
    clone(
        "adapted preprocessing layers",
        "adapted IntegerLookup",
        build=looked_up,
        data=token_digits,
    ),
    clone(
        "attributes of layers, set later", "attributes set", change_attributes, build=with_dropout
    ),
    clone("attributes of layers, set later", "rate set to 0", stop_dropping, build=with_dropout),
]


def decaying():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def squared(y, outputs):
    return keras.ops.mean((keras.ops.one_hot(y[..., 0], 10) - outputs) ** 2, axis=-1)


def compiled_model(form, case):
    """Hands over a trained model, whose first layer was frozen since; nothing is compiled again."""
    model = case.build()
    model.compile(decaying(), loss=lambda y, outputs: squared(y, outputs), metrics=["accuracy"])
    arguments = fit_arguments(case) | {"y": data.flat()[1][:, None]}
    model.fit(**arguments | {"epochs": 1})
    model.layers[0].trainable = False
    model.train_function = None  # Keras takes note of what was frozen when it traces a step.
    if type(form) is not Plain:
        model = form.make(model)
    return observe(model, model.fit(**arguments).history)


def of_form_inside(form, case):
    """A model of the form is a layer of a plain one, which is trained."""
    inner = form.make(case.build)
    outer = keras.Sequential([inner, layers.Dense(10)])
    case.compile(outer)
    history = outer.fit(**fit_arguments(case))
    return observe(outer, history.history)


def features_of_form(form, case):
    """A head on a layer's output of a trained model of the form."""
    model = form.model(case)
    model.fit(**fit_arguments(case) | {"epochs": 1})
    head = keras.Model(model.inputs, layers.Dense(10)(model.layers[-2].output))
    case.compile(head)
    history = head.fit(**fit_arguments(case))
    return observe(head, history.history)


def cloned_by_keras(form, case):
    """`keras.models.clone_model` of a trained model is a plain one."""
    model = form.model(case)
    model.fit(**fit_arguments(case) | {"epochs": 1})
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    history = copy.fit(**fit_arguments(case))
    return observe(copy, history.history)


def on_batches_compiled_outside(form, case):
    """`train_on_batch` of a model that was compiled outside the form's scope."""
    model = form.make(case.build)
    case.compile(model)
    x, y = data.flat()
    rows = [slice(i, i + 17) for i in range(0, len(x), 17)]
    losses = [model.train_on_batch(x[part], y[part]) for part in rows]
    return observe(model, {"loss": losses})


def wide_and_deep():
    """One layer reads an `Input` and a computed tensor."""
    inputs = keras.Input((64,))
    deep = layers.Dense(12, activation="tanh")(inputs)
    both = layers.Concatenate()([inputs, layers.Dense(6)(deep)])
    return keras.Model(inputs, layers.Dense(10)(both))


CASES += [
    clone("a compiled model: loss, weight decay, slots", "compiled", train=compiled_model),
    case(GROUP, "a parallel model inside of another model", "inside", train=of_form_inside),
    case(GROUP, "a parallel model inside of another model", "features", train=features_of_form),
    case(GROUP, "`keras.models.clone_model` of a parallel model", "clone", train=cloned_by_keras),
    case(
        GROUP,
        "`compile` outside the scope, and `train_on_batch`",
        "on batches, compiled outside",
        train=on_batches_compiled_outside,
    ),
    case(
        GROUP,
        "a layer that reads an `Input` and a computed tensor",
        "wide and deep",
        build=wide_and_deep,
    ),
]
