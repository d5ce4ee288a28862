"""Every loss, every reduction, masks, weights, and losses that compare examples."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from .. import data, refusals
from ..programs import case, compiled, sgd

GROUP = "Losses"


def net(units: int = 10, activation: str | None = None):
    def build():
        return keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(12, activation="tanh"),
                layers.Dense(units, activation=activation),
            ]
        )

    return build


def labelled(target):
    """Data whose targets are `target(labels)`."""

    def load():
        x, y = data.flat()
        return {"x": x, "y": target(y)}

    return load


def even(y):
    return (y % 2).astype("float64")[:, None]


def level(y):
    """A regression target of three values an example, none of them zero."""
    return np.stack([1.0 + y, 0.5 + y % 3, 2.0 + (y * 7) % 5], axis=1)


# name -> (loss, units and activation of the last layer, target)
DECOMPOSING = {
    "SparseCategoricalCrossentropy": (
        lambda **k: losses.SparseCategoricalCrossentropy(from_logits=True, **k),
        (10, None),
        lambda y: y,
    ),
    "CategoricalCrossentropy": (
        lambda **k: losses.CategoricalCrossentropy(label_smoothing=0.1, **k),
        (10, "softmax"),
        data.one_hot,
    ),
    "CategoricalFocalCrossentropy": (
        losses.CategoricalFocalCrossentropy,
        (10, "softmax"),
        data.one_hot,
    ),
    "CategoricalGeneralizedCrossEntropy": (
        losses.CategoricalGeneralizedCrossEntropy,
        (10, "softmax"),
        lambda y: y,
    ),
    "CategoricalHinge": (losses.CategoricalHinge, (10, "softmax"), data.one_hot),
    "KLDivergence": (losses.KLDivergence, (10, "softmax"), data.one_hot),
    "Poisson": (losses.Poisson, (10, "softmax"), data.one_hot),
    "CosineSimilarity": (losses.CosineSimilarity, (10, None), data.one_hot),
    "BinaryCrossentropy": (
        lambda **k: losses.BinaryCrossentropy(from_logits=True, **k),
        (1, None),
        even,
    ),
    "BinaryFocalCrossentropy": (
        lambda **k: losses.BinaryFocalCrossentropy(apply_class_balancing=True, **k),
        (1, "sigmoid"),
        even,
    ),
    "Hinge": (losses.Hinge, (1, "tanh"), even),
    "SquaredHinge": (losses.SquaredHinge, (1, "tanh"), even),
    "MeanSquaredError": (losses.MeanSquaredError, (3, None), level),
    "MeanAbsoluteError": (losses.MeanAbsoluteError, (3, None), level),
    "MeanAbsolutePercentageError": (losses.MeanAbsolutePercentageError, (3, None), level),
    "MeanSquaredLogarithmicError": (losses.MeanSquaredLogarithmicError, (3, "softplus"), level),
    "Huber": (losses.Huber, (3, None), level),
    "LogCosh": (losses.LogCosh, (3, None), level),
}

# These reduce over the whole batch, or compare its examples.
COMPARING = {
    "Dice": (losses.Dice, (10, "softmax"), data.one_hot),
    "Tversky": (lambda: losses.Tversky(alpha=0.3, beta=0.7), (10, "softmax"), data.one_hot),
}


def gentle():
    return keras.optimizers.SGD(0.01, momentum=0.9)


CASES = [
    case(
        GROUP,
        f"`{name}`",
        f"loss {name}",
        build=net(*head),
        compile=compiled(gentle, make),
        data=labelled(target),
        refused=refusals.ONE_NUMBER_A_BATCH if name in COMPARING else {},
    )
    for name, (make, head, target) in (DECOMPOSING | COMPARING).items()
]


def embedder():
    inputs = keras.Input((64,))
    x = layers.Dense(12, activation="tanh")(inputs)
    return keras.Model(inputs, layers.UnitNormalization()(layers.Dense(6)(x)))


CASES += [
    case(
        GROUP,
        "`Circle`",
        "loss Circle",
        build=embedder,
        compile=compiled(gentle, lambda: losses.Circle(gamma=4.0)),
        refused=refusals.COMPARES_EXAMPLES,
    )
]


def spelling_net():
    """Eight steps of six logits each, for connectionist temporal classification."""
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.GRU(6, return_sequences=True),
            layers.Dense(6),
        ]
    )


def spelling():
    x, y = data.rows()
    target = np.stack([1 + y % 5, 1 + (y // 2) % 5, np.where(y % 3, 0, 1 + y % 4)], axis=1)
    return {"x": x, "y": target.astype("int32")}


CASES += [
    case(
        GROUP,
        "`CTC`",
        "loss CTC",
        # TensorFlow's connectionist loss computes in float32.
        dtype="float32",
        build=spelling_net,
        compile=compiled(gentle, losses.CTC),
        data=spelling,
        refused={"pipeline_parallel": "CTC loss fails on an empty micro-batch"},
    )
]


class InBatchContrast(keras.losses.Loss):
    """A user's loss that compares every example with every other of its batch."""

    def call(self, y_true, y_pred):
        y_pred = ops.normalize(y_pred, axis=-1)
        similarity = ops.matmul(y_pred, ops.transpose(y_pred)) / 0.3
        y_true = ops.reshape(y_true, (-1,))
        same = ops.cast(y_true[:, None] == y_true[None, :], y_pred.dtype)
        log_probability = similarity - ops.logsumexp(similarity, axis=1, keepdims=True)
        return -ops.sum(same * log_probability, axis=1) / ops.sum(same, axis=1)


def correlation(y_true, y_pred):
    """A user's loss function with one value a batch: 1 minus the correlation."""
    a = y_true - ops.mean(y_true, axis=0)
    b = y_pred - ops.mean(y_pred, axis=0)
    return 1.0 - ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-9)


CASES += [
    case(
        GROUP,
        "a contrastive loss of the user's",
        "loss that compares examples",
        build=net(6),
        compile=compiled(gentle, InBatchContrast),
        refused=refusals.COMPARES_EXAMPLES,
    ),
    case(
        GROUP,
        "a contrastive loss of the user's",
        "loss over the whole batch",
        build=net(3),
        compile=compiled(gentle, lambda: correlation),
        data=labelled(level),
        refused=refusals.ONE_NUMBER_A_BATCH,
    ),
]

REDUCTIONS = ("sum", "mean", "sum_over_batch_size", "mean_with_sample_weight", "none")


def weighted():
    x, y = data.flat()
    return {"x": x, "y": y, "sample_weight": data.weights()}


def tiny_steps():
    """For losses that are sums: 17 times the gradient of a mean."""
    return keras.optimizers.SGD(0.003, momentum=0.9)


CASES += [
    case(
        GROUP,
        f"reduction `{reduction}`",
        f"reduction {reduction} of {name}",
        build=net(*head),
        compile=compiled(tiny_steps, lambda m=make, r=reduction: m(reduction=r)),
        data=lambda t=target: labelled(t)() | {"sample_weight": data.weights()},
        refused=refusals.NO_SUM_OF_PARTS if reduction == "none" else {},
    )
    for reduction in REDUCTIONS
    for name in ("SparseCategoricalCrossentropy", "MeanSquaredError")
    for make, head, target in [DECOMPOSING[name]]
]


def far_off(head, depth: int = 1):
    """Logits of tens, most of them wrong: Keras clips probabilities that are below 1e-7."""

    def build():
        inputs = keras.Input((64,))
        x = layers.Dense(12, activation="tanh")(inputs)
        outputs = []
        for _ in range(depth):
            large = keras.initializers.RandomNormal(stddev=20.0)
            outputs.append(head()(layers.Dense(10, kernel_initializer=large)(x)))
            x = layers.Dense(12, activation="tanh")(x)
        return keras.Model(inputs, outputs if depth > 1 else outputs[0])

    return build


class TensorFlowSoftmax(layers.Layer):
    """Notes no logits: Keras's losses find them behind the operation."""

    def call(self, x):
        return tf.nn.softmax(x)


def handed_on():
    """The softmax of one stage is what a layer of the next puts out."""
    model = far_off(layers.Softmax)()
    hand_on = layers.ActivityRegularization(l2=0.01)
    return keras.Model(model.inputs, hand_on(layers.Activation("linear")(model.output)))


FAR_OFF = "probabilities below 1e-7, of `softmax` and `sigmoid`"
CASES += [
    case(
        GROUP,
        FAR_OFF,
        "softmax far off",
        build=far_off(layers.Softmax),
        compile=compiled(
            tiny_steps, losses.SparseCategoricalCrossentropy, metrics=lambda: ["accuracy"]
        ),
    ),
    case(
        GROUP,
        FAR_OFF,
        "softmax far off, run_eagerly",
        build=far_off(layers.Softmax),
        compile=compiled(tiny_steps, losses.SparseCategoricalCrossentropy, run_eagerly=True),
    ),
    *(
        case(
            GROUP,
            FAR_OFF,
            f"{name} far off",
            build=far_off(head),
            compile=compiled(tiny_steps, loss),
            data=labelled(data.one_hot),
        )
        for name, head, loss in [
            ("TensorFlow's softmax", TensorFlowSoftmax, losses.CategoricalCrossentropy),
            ("sigmoid", lambda: layers.Activation("sigmoid"), losses.BinaryCrossentropy),
        ]
    ),
    case(
        GROUP,
        FAR_OFF,
        "softmax far off, handed on",
        build=handed_on,
        compile=compiled(tiny_steps, losses.SparseCategoricalCrossentropy),
    ),
    case(
        GROUP,
        FAR_OFF,
        "two outputs far off",
        build=far_off(layers.Softmax, depth=2),
        compile=compiled(
            tiny_steps, lambda: [losses.SparseCategoricalCrossentropy() for _ in range(2)]
        ),
        data=labelled(lambda y: [y, y]),
    ),
]


def masked_text(return_sequences: bool):
    def build():
        inputs = keras.Input((12,), dtype="int64")
        x = layers.Embedding(20, 6, mask_zero=True)(inputs)
        x = layers.LSTM(6, return_sequences=return_sequences)(x)
        return keras.Model(inputs, layers.Dense(10 if not return_sequences else 20)(x))

    return build


def next_token():
    x, _ = data.tokens()
    return {"x": x, "y": np.roll(x, -1, axis=1)}


def text_labels():
    x, y = data.tokens()
    return {"x": x, "y": y}


def tagged_rows():
    """Every row of an image is a class, or -1, which the loss must ignore."""
    x, y = data.rows()
    target = np.repeat(y[:, None], 8, axis=1)
    target[:, 4:][np.arange(len(y)) % 3 > 0] = -1
    return {"x": x, "y": target}


def row_tagger():
    return keras.Sequential(
        [keras.Input((8, 8)), layers.Dense(8, activation="tanh"), layers.Dense(10)]
    )


CASES += [
    case(
        GROUP,
        "masks: `Embedding(mask_zero=True)`, rows sorted by length",
        "mask of a label a row",
        build=masked_text(False),
        data=text_labels,
    ),
    case(
        GROUP,
        "masks: `Embedding(mask_zero=True)`, rows sorted by length",
        "mask of a label a token",
        build=masked_text(True),
        compile=compiled(metrics=lambda: ["accuracy"]),
        data=next_token,
    ),
    case(
        GROUP,
        "masks: `Embedding(mask_zero=True)`, rows sorted by length",
        "mask and sample weights a token",
        build=masked_text(True),
        compile=compiled(weighted_metrics=lambda: ["accuracy"]),
        data=lambda: next_token() | {"sample_weight": np.tile(data.weights()[:, None], (1, 12))},
    ),
    case(
        GROUP,
        "masks: `Embedding(mask_zero=True)`, rows sorted by length",
        "mask of a label a row under mean_with_sample_weight",
        build=masked_text(True),
        compile=compiled(
            loss=lambda: losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
        ),
        data=next_token,
    ),
    case(
        GROUP,
        "masks: `ignore_class`",
        "ignore_class",
        build=row_tagger,
        compile=compiled(
            loss=lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        ),
        data=tagged_rows,
    ),
]


def two_masks():
    """Two texts of other lengths, each with its own mask, and an output without one."""
    first = keras.Input((12,), dtype="int64", name="first")
    second = keras.Input((12,), dtype="int64", name="second")
    embed = layers.Embedding(20, 5, mask_zero=True, name="embed")
    a = layers.Dense(20, name="a")(layers.GRU(5, return_sequences=True, name="gru_a")(embed(first)))
    b = layers.Dense(20, name="b")(
        layers.GRU(5, return_sequences=True, name="gru_b")(embed(second))
    )
    c = layers.Dense(10, name="c")(layers.GRU(5, name="gru_c")(embed(first)))
    return keras.Model([first, second], [a, b, c])


def two_texts():
    first, y = data.tokens()
    second, _ = data.tokens(by_length=False)
    return {
        "x": [first, second],
        "y": [np.roll(first, -1, axis=1), np.roll(second, -1, axis=1), y],
    }


CASES += [
    case(
        GROUP,
        "masks: another mask for each output",
        "other masks per output",
        build=two_masks,
        compile=compiled(
            loss=lambda: [losses.SparseCategoricalCrossentropy(from_logits=True) for _ in range(3)],
            loss_weights=lambda: [1.0, 0.5, 2.0],
        ),
        data=two_texts,
    )
]

CASES += [
    case(
        GROUP,
        "`sample_weight`",
        "sample_weight",
        compile=compiled(weighted_metrics=lambda: ["accuracy"], metrics=lambda: ["accuracy"]),
        data=weighted,
    ),
    case(
        GROUP,
        "`class_weight`",
        "class_weight",
        compile=compiled(weighted_metrics=lambda: ["accuracy"]),
        fit={"class_weight": {label: 0.2 * label for label in range(10)}},
    ),
]


def two_heads():
    inputs = keras.Input((64,))
    x = layers.Dense(12, activation="tanh")(inputs)
    return keras.Model(
        inputs,
        {"digit": layers.Dense(10, name="digit")(x), "level": layers.Dense(3, name="level")(x)},
    )


def two_targets():
    x, y = data.flat()
    return {"x": x, "y": {"digit": y, "level": level(y)}}


def two_losses():
    return {
        "digit": losses.SparseCategoricalCrossentropy(from_logits=True),
        "level": losses.MeanSquaredError(reduction="sum"),
    }


CASES += [
    case(
        GROUP,
        "`loss_weights`, and outputs with divisors of their own",
        "loss_weights",
        build=two_heads,
        compile=compiled(
            tiny_steps,
            two_losses,
            loss_weights=lambda: {"digit": 1.5, "level": 0.02},
            metrics=lambda: {"digit": ["accuracy"], "level": ["mae"]},
        ),
        data=two_targets,
    ),
    case(
        GROUP,
        "`loss_weights`, and outputs with divisors of their own",
        "sample weights for each output",
        build=two_heads,
        compile=compiled(
            tiny_steps,
            lambda: {
                "digit": losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction="mean_with_sample_weight"
                ),
                "level": losses.MeanSquaredError(),
            },
        ),
        data=lambda: (
            two_targets()
            | {"sample_weight": {"digit": data.weights(), "level": data.weights()[::-1].copy()}}
        ),
    ),
]


CASES += [
    case(
        GROUP,
        "`loss_weights`, and outputs with divisors of their own",
        "a loss for one of two outputs, and no targets for the other",
        build=two_heads,
        compile=compiled(
            loss=lambda: {
                "digit": losses.SparseCategoricalCrossentropy(from_logits=True),
                "level": None,
            },
        ),
        data=lambda: two_targets() | {"y": {"digit": data.flat()[1]}},
    )
]


def penalized(**regularizers):
    def build():
        return keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(12, activation="tanh", **regularizers),
                layers.Dense(10),
            ]
        )

    return build


class Sparsity(layers.Layer):
    """Adds a per-example mean to the loss, as `add_loss` is mostly used."""

    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.sum(ops.abs(inputs), axis=-1)))
        return inputs


def add_loss_net():
    inputs = keras.Input((64,))
    x = Sparsity()(layers.Dense(12, activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dense(10)(x))


CASES += [
    case(
        GROUP,
        "L1 and L2 kernel regularizers",
        f"regularizer {name}",
        build=penalized(**fields),
        # OrthogonalRegularizer mixes in a float32 mask whatever the dtype.
        dtype="float32" if name == "orthogonal" else "float64",
    )
    for name, fields in {
        "L1": {"kernel_regularizer": "l1"},
        "L2": {"kernel_regularizer": "l2", "bias_regularizer": "l2"},
        "L1L2": {"kernel_regularizer": keras.regularizers.L1L2(0.01, 0.02)},
        "orthogonal": {"kernel_regularizer": keras.regularizers.OrthogonalRegularizer(0.01)},
    }.items()
]
CASES += [
    case(
        GROUP,
        "activity regularizers",
        "activity regularizer of a layer",
        build=penalized(activity_regularizer="l2"),
    ),
    case(
        GROUP,
        "activity regularizers",
        "ActivityRegularization",
        build=lambda: keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(12, activation="tanh"),
                layers.ActivityRegularization(l1=0.01, l2=0.02),
                layers.Dense(10),
            ]
        ),
    ),
    case(GROUP, "`add_loss` of a mean over examples", "add_loss", build=add_loss_net),
    case(
        GROUP,
        "`add_loss` of a mean over examples",
        "add_loss and regularizers without a compiled loss",
        build=lambda: keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(12, activation="tanh", kernel_regularizer="l2"),
                Sparsity(),
            ]
        ),
        compile=compiled(loss=None),
        data=lambda: {"x": data.flat()[0]},
    ),
]


def factors():
    """A product of two vectors: outputs of shape (batch,)."""
    inputs = keras.Input((64,))
    rows = layers.Dense(4)(inputs) * layers.Dense(4)(inputs)
    return keras.Model(inputs, layers.Lambda(lambda t: ops.sum(t, axis=-1), output_shape=())(rows))


def two_columns():
    inputs = keras.Input((64,))
    x = layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(1, name=name)(x) for name in "ab"])


def opposite_targets():
    x, y = data.flat()
    return {"x": x, "y": [even(y), 1 - even(y)]}


def one_metric_twice():
    metric = keras.metrics.TruePositives(thresholds=0.3)
    return [[metric], [metric]]


def other_shapes(name, feature="targets and outputs of different ranks", **fields):
    return case(GROUP, feature, name, **fields)


class Largest(keras.metrics.Metric):
    """The largest output so far: a state that is no sum over the examples."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, outputs, sample_weight=None):
        largest = keras.ops.cast(keras.ops.max(outputs), self.largest.dtype)
        self.largest.assign(keras.ops.maximum(self.largest, largest))

    def result(self):
        return self.largest


def reads_weights(model):
    """Weight decay that is written into the loss."""
    of_examples = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def loss(y, outputs):
        decay = tf.add_n([tf.nn.l2_loss(tf.convert_to_tensor(w)) for w in model.trainable_weights])
        return of_examples(y, outputs) + 0.05 * decay

    model.compile(optimizer=sgd(), loss=loss)


def flattened(y, outputs):
    return ops.reshape(0.1 * (y - outputs) ** 2, (-1,))


CASES += [
    other_shapes(
        "a metric of one's own, of one of two outputs",
        "a metric of one's own, of one of two outputs",
        build=two_heads,
        compile=compiled(
            tiny_steps,
            two_losses,
            metrics=lambda: {"digit": ["accuracy"], "level": ["mae", Largest()]},
            weighted_metrics=lambda: {"digit": [Largest(name="weighted")]},
        ),
        data=two_targets,
    ),
    other_shapes(
        "targets without an axis",
        build=net(1, "softplus"),
        compile=compiled(
            loss=losses.MeanSquaredError,
            metrics=lambda: ["mae", "poisson", "kl_divergence", "categorical_hinge"],
        ),
        data=labelled(lambda y: y / 10),
    ),
    other_shapes(
        "labels with an axis",
        build=net(10, "softmax"),
        compile=compiled(loss=losses.SparseCategoricalCrossentropy, metrics=lambda: ["accuracy"]),
        data=labelled(lambda y: y[:, None]),
    ),
    other_shapes(
        "labels with an axis that a loss broadcasts",
        "a loss that broadcasts its labels over the batch",
        build=net(10, "softmax"),
        compile=compiled(loss=losses.CategoricalGeneralizedCrossEntropy),
        data=labelled(lambda y: y[:, None]),
        refused=refusals.COMPARES_EXAMPLES,
    ),
    other_shapes(
        "outputs without an axis",
        "outputs of shape (batch,)",
        build=factors,
        compile=compiled(
            loss=losses.MeanSquaredError, metrics=lambda: ["mae", "cosine_similarity"]
        ),
        data=labelled(lambda y: y / 10),
        refused=refusals.ONE_NUMBER_A_BATCH,
    ),
    other_shapes(
        "a metric of two outputs",
        "a metric of two outputs",
        build=two_columns,
        compile=compiled(
            loss=lambda: ["mse", "mse"],
            metrics=one_metric_twice,
            optimizer=lambda: keras.optimizers.SGD(0.01),
        ),
        data=opposite_targets,
    ),
    other_shapes(
        "a loss that reads the weights",
        "a loss that reads the model's weights",
        compile=reads_weights,
    ),
    other_shapes(
        "a value for each element",
        "a loss that flattens its values",
        build=net(3),
        compile=compiled(loss=lambda: flattened),
        data=labelled(level),
    ),
]
