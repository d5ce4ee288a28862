"""Models of every make, with several inputs and outputs in every nesting."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from .. import data, refusals
from ..case import fit_arguments, observe
from ..programs import case, compiled

GROUP = "Models"


@keras.saving.register_keras_serializable(package="parity")
class Subclassed(keras.Model):
    """A user's own model class, with a `call` that looks at `training`."""

    def __init__(self, units=12, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = layers.Dense(units, activation="tanh")
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(10)

    def call(self, inputs, training=False):
        x = self.hidden(inputs)
        x = self.norm(x)
        return self.head(x * 1.5 if training else x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def functional():
    inputs = keras.Input((64,))
    a = layers.Dense(8, activation="tanh")(inputs)
    b = layers.Dense(8, activation="sigmoid")(inputs)
    return keras.Model(inputs, layers.Dense(10)(layers.concatenate([a, b, a * b])))


def nested():
    encoder = keras.Sequential(
        [keras.Input((64,)), layers.Dense(12, activation="tanh"), layers.BatchNormalization()],
        name="encoder",
    )
    inputs = keras.Input((64,))
    head = Subclassed(6, name="inner")
    return keras.Model(inputs, head(encoder(inputs)))


def shared_layer():
    """One layer called three times: its gradients are summed."""
    shared = layers.Dense(64, activation="tanh")
    inputs = keras.Input((64,))
    return keras.Model(inputs, layers.Dense(10)(shared(shared(shared(inputs)))))


def unbuilt_sequential():
    return keras.Sequential([layers.Dense(12, activation="tanh"), layers.Dense(10)])


CASES = [
    case(GROUP, feature, f"model {name}", build=build, refused=refused)
    for feature, name, build, refused in [
        (
            "`Sequential`",
            "Sequential without an input shape",
            unbuilt_sequential,
            refusals.NOT_BUILT,
        ),
        ("functional", "functional", functional, {}),
        ("functional", "shared layer", shared_layer, {}),
        ("subclassed", "subclassed", Subclassed, refusals.SUBCLASSED),
        ("nested", "nested", nested, refusals.MOMENTS_OF_A_BATCH),
    ]
]


def several():
    """Two inputs in a dict, outputs in a dict."""
    top = keras.Input((32,), name="top")
    bottom = keras.Input((32,), name="bottom")
    x = layers.concatenate(
        [layers.Dense(6, activation="tanh")(top), layers.Dense(6, activation="tanh")(bottom)]
    )
    return keras.Model(
        {"top": top, "bottom": bottom},
        {"digit": layers.Dense(10, name="digit")(x), "even": layers.Dense(1, name="even")(x)},
    )


def halves():
    x, y = data.flat()
    return {"top": x[:, :32], "bottom": x[:, 32:]}, {
        "digit": y,
        "even": (y % 2).astype("float64")[:, None],
    }


def several_data():
    x, y = halves()
    return {
        "x": x,
        "y": y,
        "validation_data": ({k: v[:20] for k, v in x.items()}, {k: v[:20] for k, v in y.items()}),
    }


def digit_and_even():
    return {
        "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "even": keras.losses.BinaryCrossentropy(from_logits=True),
    }


def listed():
    top, bottom = keras.Input((32,)), keras.Input((32,))
    x = layers.add([layers.Dense(6, activation="tanh")(top), layers.Dense(6)(bottom)])
    return keras.Model([top, bottom], [layers.Dense(10)(x), layers.Dense(1)(x)])


def listed_data():
    x, y = halves()
    return {"x": [x["top"], x["bottom"]], "y": [y["digit"], y["even"]]}


class Nest(keras.Model):
    """Takes and gives nested structures: a dict with a tuple inside."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers.Dense(6, activation="tanh"), layers.Dense(6, activation="tanh")
        self.digit, self.even = layers.Dense(10), layers.Dense(1)

    def call(self, inputs):
        top, (bottom, scale) = inputs["top"], inputs["rest"]
        x = self.a(top) + self.b(bottom) * scale
        return {"digit": self.digit(x), "pair": (self.even(x), self.even(-x))}


def nest_data():
    x, y = halves()
    scale = np.linspace(0.5, 1.5, len(y["digit"]))[:, None]
    return {
        "x": {"top": x["top"], "rest": (x["bottom"], scale)},
        "y": {"digit": y["digit"], "pair": (y["even"], 1 - y["even"])},
    }


def nest_losses():
    return {
        "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "pair": (
            keras.losses.BinaryCrossentropy(from_logits=True),
            keras.losses.BinaryCrossentropy(from_logits=True),
        ),
    }


def fit_evaluate_predict(form, case):
    model = form.model(case)
    arguments = fit_arguments(case)
    history = model.fit(**arguments)
    scores = model.evaluate(
        arguments["x"], arguments["y"], batch_size=17, verbose=0, return_dict=True
    )
    return observe(
        model,
        history.history,
        scores=scores,
        predictions=model.predict(arguments["x"], batch_size=17, verbose=0),
    )


def mean_losses():
    return [
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.BinaryCrossentropy(from_logits=True),
    ]


CASES += [
    case(
        GROUP,
        "several inputs and outputs, dicts and nested structures",
        f"structure {name}",
        build=build,
        compile=compiled(loss=loss, **extra),
        data=load,
        train=fit_evaluate_predict,
        refused=refusals.SUBCLASSED if build is Nest else {},
    )
    for name, build, loss, load, extra in [
        (
            "dict",
            several,
            digit_and_even,
            several_data,
            {"metrics": lambda: {"digit": ["accuracy"], "even": ["binary_accuracy", "AUC"]}},
        ),
        ("list", listed, mean_losses, listed_data, {"loss_weights": lambda: [1.0, 0.3]}),
        ("nested", Nest, nest_losses, nest_data, {}),
    ]
]


def mobile_net():
    return keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=10
    )


def color_images():
    x, y = data.images(22)
    return {"x": np.repeat(np.kron(x, np.ones((1, 4, 4, 1))), 3, axis=3), "y": y}


CASES += [
    case(
        GROUP,
        "a model of `keras.applications`",
        "MobileNetV2",
        build=mobile_net,
        compile=compiled(
            lambda: keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy
        ),
        data=color_images,
        # Two steps: 52 batch normalizations one after another on 17 examples of
        # 1x1 pixels each multiply a difference in the last digit.
        fit={"epochs": 1},
        refused=refusals.MOMENTS_OF_A_BATCH,
    )
]
