"""Stateful metrics in fit and evaluate, validation, and the order of predict."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from .. import data, refusals
from ..case import observe
from ..programs import case, compiled, digits, mlp
from .losses import even, labelled, net
from .structures import fit_evaluate_predict

GROUP = "Metrics, validation and prediction"

BINARY = {
    "AUC": lambda: keras.metrics.AUC(num_thresholds=50),
    "Precision": keras.metrics.Precision,
    "Recall": keras.metrics.Recall,
    "PrecisionAtRecall": lambda: keras.metrics.PrecisionAtRecall(0.5, num_thresholds=50),
    "F1Score": lambda: keras.metrics.F1Score(threshold=0.5),
}


def binary_metrics():
    return [make() for make in BINARY.values()]


def softmax_net():
    return net(10, "softmax")()


def one_hot_digits():
    x, y = data.flat()
    return {"x": x, "y": data.one_hot(y)}


CASES = [
    case(
        GROUP,
        "`AUC`, `Precision`, `Recall`, `PrecisionAtRecall`, `F1Score`",
        "metrics of binary labels",
        build=net(1, "sigmoid"),
        compile=compiled(
            loss=keras.losses.BinaryCrossentropy,
            metrics=binary_metrics,
            weighted_metrics=lambda: [keras.metrics.AUC(name="weighted_auc", num_thresholds=50)],
        ),
        data=lambda: labelled(even)() | {"sample_weight": data.weights()},
        train=fit_evaluate_predict,
    ),
    case(
        GROUP,
        "accuracy, `F1Score`, `MeanIoU` and other metrics of classes",
        "metrics of classes",
        build=softmax_net,
        compile=compiled(
            loss=keras.losses.CategoricalCrossentropy,
            metrics=lambda: [
                "accuracy",
                keras.metrics.F1Score(average="macro"),
                keras.metrics.OneHotMeanIoU(num_classes=10),
                keras.metrics.CategoricalCrossentropy(),
                keras.metrics.KLDivergence(),
                keras.metrics.CosineSimilarity(),
            ],
        ),
        data=one_hot_digits,
        train=fit_evaluate_predict,
    ),
    case(
        GROUP,
        "accuracy, `F1Score`, `MeanIoU` and other metrics of classes",
        "MeanIoU of sparse labels",
        build=softmax_net,
        compile=compiled(
            loss=keras.losses.SparseCategoricalCrossentropy,
            metrics=lambda: [
                keras.metrics.MeanIoU(num_classes=10, sparse_y_pred=False),
                "sparse_categorical_accuracy",
            ],
        ),
        train=fit_evaluate_predict,
    ),
    case(
        GROUP,
        "top-k accuracy",
        "top-k accuracy",
        # Keras's top-k metrics compute in float32 alone.
        dtype="float32",
        compile=compiled(metrics=lambda: [keras.metrics.SparseTopKCategoricalAccuracy(3)]),
    ),
    case(
        GROUP,
        "metrics of regression",
        "metrics of regression",
        build=net(3),
        compile=compiled(
            lambda: keras.optimizers.SGD(0.01),
            keras.losses.MeanSquaredError,
            metrics=lambda: [
                "mae",
                keras.metrics.RootMeanSquaredError(),
                keras.metrics.R2Score(),
                keras.metrics.PearsonCorrelation(),
                keras.metrics.MeanAbsolutePercentageError(),
            ],
        ),
        data=labelled(lambda y: np.stack([1.0 + y, 0.5 + y % 3, 2.0 + (y * 7) % 5], axis=1)),
        train=fit_evaluate_predict,
    ),
]


class AddMetric(keras.Model):
    """A metric that the model itself updates in its train and test steps' metrics."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.size = keras.metrics.Mean(name="logit_size")

    def call(self, x):
        return self.net(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.size.update_state(keras.ops.abs(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


CASES += [
    case(
        GROUP,
        "an overridden `compute_metrics`",
        "compute_metrics",
        build=AddMetric,
        compile=compiled(metrics=lambda: ["accuracy"]),
        train=fit_evaluate_predict,
        refused=refusals.SUBCLASSED,
    ),
]

CASES += [
    case(
        GROUP,
        "`validation_data`",
        "validation_data",
        compile=compiled(metrics=lambda: ["accuracy"]),
        # 25 in batches of 4 leave one: a replica or more without an example.
        data=lambda: digits() | {"validation_data": data.flat(25, 87)},
        fit={"validation_batch_size": 4},
    ),
    case(
        GROUP,
        "`validation_data`",
        "validation_data with weights, every second epoch",
        compile=compiled(metrics=lambda: ["accuracy"], weighted_metrics=lambda: ["accuracy"]),
        data=lambda: digits() | {"validation_data": (*data.flat(25, 87), data.weights(25))},
        fit={"validation_freq": 2},
    ),
    case(
        GROUP,
        "`validation_split`",
        "validation_split",
        compile=compiled(metrics=lambda: ["accuracy"]),
        fit={"validation_split": 0.23},
    ),
]


def predict_sizes(form, case):
    """Predicts 7, 1, 2, 87 rows, in batches that no replica count divides."""
    model = form.model(case)
    x, y = data.images()
    outputs = {}
    for rows, size in [(7, 32), (7, 3), (1, 32), (2, 32), (87, 17)]:
        outputs[f"{rows} rows in batches of {size}"] = model.predict(
            x[:rows], batch_size=size, verbose=0
        )
        outputs[f"score of {rows} in batches of {size}"] = model.evaluate(
            x[:rows], y[:rows], batch_size=size, verbose=0
        )
    return observe(model, **outputs)


def conv_norm_net():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


CASES += [
    case(
        GROUP,
        "`predict` and `evaluate` on uneven input, in order",
        "predict sizes",
        build=conv_norm_net,
        compile=compiled(metrics=lambda: ["accuracy"]),
        train=predict_sizes,
        refused=refusals.MOMENTS_OF_A_BATCH,
    )
]


def with_metric_in_use(model):
    """Compiles with a metric that has counted before; Keras goes on from there, for an epoch."""
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    metric.update_state(np.zeros((40,)), np.ones((40, 10)))
    compiled(metrics=[metric])(model)


CASES += [
    case(
        GROUP,
        "a metric that has counted before `fit`",
        "metric in use",
        compile=with_metric_in_use,
        fit={"epochs": 2},
    )
]
