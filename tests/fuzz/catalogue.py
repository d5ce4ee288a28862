"""What the generator draws from: layers by the tensor that they take, heads, optimizers, options.

An entry's text has fields in braces, `{units}`, each drawn from `FIELDS`. A layer says which
shapes it takes and which it puts out, without the batch's axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

Shape = tuple[int, ...]

FIELDS = {
    "units": ["4", "3", "6", "2"],
    "act": ["None", "'tanh'", "'relu'", "'sigmoid'", "'gelu'"],
    "rate": ["0.2", "0.5"],
    "axis": ["-1", "1"],
    "pad": ["'same'", "'valid'"],
    "bool": ["False", "True"],
    "dense": [
        "",
        ", use_bias=False",
        ", kernel_regularizer=keras.regularizers.L2(0.01)",
        ", bias_regularizer='l1', kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02)",
        ", activity_regularizer=keras.regularizers.L2(0.01)",
        ", activity_regularizer='l1'",
        ", kernel_constraint=keras.constraints.MaxNorm(0.8)",
        ", kernel_constraint='non_neg'",
        ", kernel_constraint=keras.constraints.UnitNorm(), bias_constraint='non_neg'",
    ],
    "rnn": [
        "",
        ", go_backwards=True",
        ", recurrent_regularizer='l2'",
        ", unroll=True",
        ", recurrent_constraint='max_norm'",
    ],
    "bn": ["", "momentum=0.7", "scale=False, center=False", "epsilon=0.1"],
    "after": [
        "",
        "",
        "{layer}.trainable = False",
        "{layer}.kernel.trainable = False",
        "{layer}.enable_lora(2)",
        "{layer}.enable_lora(2, lora_alpha=8)",
    ],
    "frozen": ["", "", "{layer}.trainable = False"],
    "mha": ["", ", use_bias=False", ", value_dim=2", ", output_shape=3"],
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """An entry: `make` and `call` as in `Block`, the ranks it takes, and its output's shape."""

    make: str
    ranks: tuple[int, ...]
    shape: Callable[[Shape, dict[str, str]], Shape] = lambda shape, drawn: shape
    call: tuple[str, ...] = ("{layer}({x})",)
    after: str = ""
    fits: Callable[[Shape], bool] = lambda shape: True


def last(shape: Shape, drawn: dict[str, str]) -> Shape:
    return (*shape[:-1], int(drawn["units"]))


def flat(shape: Shape, drawn: dict[str, str]) -> Shape:
    size = 1
    for each in shape:
        size *= each
    return (size,)


def pooled(shape: Shape, drawn: dict[str, str]) -> Shape:
    return (*(each // 2 for each in shape[:-1]), shape[-1])


def convolved(shape: Shape, drawn: dict[str, str]) -> Shape:
    by = 0 if drawn.get("pad", "'same'") == "'same'" else 1
    return (*(each - by for each in shape[:-1]), int(drawn.get("units", shape[-1])))


def deep_enough(shape: Shape) -> bool:
    return min(shape[:-1]) >= 2


ANY, VECTOR, SEQUENCE, IMAGE = (1, 2, 3), (1,), (2,), (3,)
HERE = ("{layer}({x})",)
SKIPS = (
    "{layer}({x})",
    "layers.add([{x}, {layer}({x})])",
    "{layer}({layer}({x}))",
    "layers.multiply([{x}, {layer}(ops.tanh({x}))])",
    "layers.add([{layer}({x}), {layer}(-{x})])",
)
ITSELF = (
    "{layer}({x}, {x})",
    "layers.add([{x}, {layer}({x}, {x})])",
    "{layer}({x}, {x}, use_causal_mask=True)",
    "{layer}({x}, {x}[:, :-1])",
    "{layer}({x}, {x}, attention_mask=ops.abs({x}[:, :, None, 0] - {x}[:, None, :, 0]) < 1.0)",
    "{layer}({x}, {x}, attention_mask=ops.sum({x}, axis=-1)[:, None, :] < 0.5)",
    "{layer}({x}, layers.Masking()({x}))",
    "{layer}({x}, {x}, return_attention_scores=True)[0]",
)


def mha_shape(shape: Shape, drawn: dict[str, str]) -> Shape:
    return (*shape[:-1], 3 if "output_shape" in drawn.get("mha", "") else shape[-1])


LAYERS = [
    Layer("layers.Dense({units}, activation={act}{dense})", ANY, last, after="{after}"),
    Layer("layers.Dense({same}, activation={act})", ANY, call=SKIPS),
    Layer("layers.Activation({act})", ANY),
    Layer("layers.BatchNormalization({bn})", ANY),
    Layer("layers.LayerNormalization()", ANY, call=SKIPS[:3]),
    Layer("layers.RMSNormalization()", ANY),
    Layer("layers.UnitNormalization()", ANY),
    Layer("layers.GroupNormalization(1)", SEQUENCE + IMAGE),
    Layer("layers.GroupNormalization(-1)", SEQUENCE + IMAGE),
    Layer("layers.SpectralNormalization(layers.Dense({units}))", VECTOR + SEQUENCE, last),
    Layer("layers.Dropout({rate})", ANY),
    Layer("layers.Dropout({rate}, seed=1)", ANY),
    Layer("layers.GaussianNoise({rate})", ANY),
    Layer("layers.GaussianDropout({rate})", ANY),
    Layer("layers.AlphaDropout({rate})", ANY),
    Layer("layers.PReLU()", ANY),
    Layer("layers.PReLU(shared_axes=[1])", SEQUENCE + IMAGE),
    Layer("layers.LeakyReLU()", ANY),
    Layer("layers.ReLU(max_value=1.0)", ANY),
    Layer("layers.Softmax()", ANY),
    Layer("layers.ActivityRegularization(l1=0.01, l2=0.02)", ANY),
    Layer("layers.Rescaling(0.5, offset=0.1)", ANY),
    Layer("layers.Lambda(lambda t: t * 0.5 + 0.1)", ANY),
    Layer(
        "layers.Identity()",
        ANY,
        call=(
            "ops.tanh({layer}({x}))",
            "{x} * ops.sigmoid({x})",
            "ops.concatenate([{x}, {layer}({x})], axis=1)[:, : {x}.shape[1]]",
        ),
    ),
    Layer("Counter()", ANY),
    Layer("RunningMean()", ANY),
    Layer("MeanReadAtOnce()", ANY),
    Layer("RunningSum()", ANY),
    Layer("RunningMax()", ANY),
    Layer("MeanLoss()", ANY),
    Layer("SumLoss()", ANY),
    Layer("WeightLoss()", ANY),
    Layer("Measured()", ANY),
    Layer("MinusBatchMean()", ANY),
    Layer("Centred()", ANY),
    Layer("BothHalves()", ANY),
    Layer("ByBatchSize()", ANY),
    Layer("DroppedWeight()", ANY),
    Layer("TwoTables()", ANY),
    Layer("Unused()", ANY),
    Layer("Chosen()", ANY),
    Layer("ByRow()", ANY),
    Layer("Largests()", ANY),
    Layer("TurnsByRows()", ANY),
    Layer("Noise()", ANY),
    Layer("OnesBeside()", ANY),
    Layer("Bag()", ANY),
    Layer("layers.BatchNormalization()", ANY, call=("{layer}({x}, training=False)",)),
    Layer("layers.Dropout({rate})", ANY, call=("{layer}({x}, training=True)",)),
    Layer("layers.BatchNormalization(axis=1)", SEQUENCE + IMAGE),
    Layer("layers.LayerNormalization(axis=1)", ANY),
    Layer("layers.LayerNormalization(axis=[1, 2])", SEQUENCE + IMAGE),
    Layer("layers.UnitNormalization(axis=1)", ANY),
    Layer("layers.Softmax(axis=1)", ANY),
    Layer("layers.ConvLSTM1D({units}, 2, padding='same', return_sequences=True)", IMAGE, last),
    Layer("layers.MaxPooling1D(2, padding='same', strides=1)", SEQUENCE),
    Layer("Folded()", SEQUENCE + IMAGE),
    Layer("TimeMajor()", SEQUENCE),
    Layer("TimeMajor(0.3)", SEQUENCE),
    Layer("PositionEmbedding()", SEQUENCE),
    Layer("AddedPositions()", SEQUENCE),
    Layer("ClassToken()", SEQUENCE, lambda s, d: (s[0] + 1, s[1])),
    Layer("TiedTable()", ANY),
    Layer("Transformer({bool})", SEQUENCE, after="{frozen}"),
    Layer("Transformer({bool}, 0.3)", SEQUENCE, call=SKIPS[:3]),
    Layer("AttentionByHand()", SEQUENCE),
    Layer("MaskedMean()", SEQUENCE),
    Layer("Shifted()", SEQUENCE),
    Layer("Sinusoids()", SEQUENCE),
    Layer("SoFar()", SEQUENCE),
    Layer("ByFirst()", SEQUENCE),
    # Vectors
    Layer(
        "layers.EinsumDense('ab,bc->ac', output_shape={units}, bias_axes='c', activation={act})",
        VECTOR,
        last,
    ),
    Layer("layers.RepeatVector(3)", VECTOR, lambda s, d: (3, *s)),
    Layer("layers.Reshape((-1, 1))", VECTOR, lambda s, d: (s[0], 1)),
    # Sequences
    Layer(
        "layers.EinsumDense('abc,cd->abd', output_shape=({first}, {units}), bias_axes='d')",
        SEQUENCE,
        last,
    ),
    Layer(
        "layers.EinsumDense('abc,bd->adc', output_shape=({units}, {same}))",
        SEQUENCE,
        lambda s, d: (int(d["units"]), s[1]),
    ),
    Layer("layers.LSTM({units}{rnn})", SEQUENCE, lambda s, d: (int(d["units"]),)),
    Layer("layers.GRU({units}, return_sequences=True{rnn})", SEQUENCE, last),
    Layer("layers.LSTM({units}, return_sequences=True, dropout=0.2)", SEQUENCE, last),
    Layer(
        "layers.SimpleRNN({units}, recurrent_dropout=0.2)",
        SEQUENCE,
        lambda s, d: (int(d["units"]),),
    ),
    Layer(
        "layers.Bidirectional(layers.LSTM({units}, return_sequences=True))",
        SEQUENCE,
        lambda s, d: (s[0], 2 * int(d["units"])),
    ),
    Layer(
        "layers.Bidirectional(layers.GRU({units}), merge_mode='sum')",
        SEQUENCE,
        lambda s, d: (int(d["units"]),),
    ),
    Layer(
        "layers.RNN([layers.GRUCell({units}), layers.SimpleRNNCell({units})])",
        SEQUENCE,
        lambda s, d: (int(d["units"]),),
    ),
    Layer("layers.TimeDistributed(layers.Dense({units}, activation={act}))", SEQUENCE, last),
    Layer("layers.TimeDistributed(layers.BatchNormalization())", SEQUENCE),
    Layer(
        "layers.Conv1D({units}, 2, padding={pad}, activation={act}{dense})",
        SEQUENCE,
        convolved,
        fits=deep_enough,
        after="{after}",
    ),
    Layer("layers.Conv1D({units}, 2, padding='causal', dilation_rate=2)", SEQUENCE, last),
    Layer("layers.SeparableConv1D({units}, 2, padding='same')", SEQUENCE, last),
    Layer("layers.DepthwiseConv1D(2, padding='same')", SEQUENCE),
    Layer("layers.Conv1DTranspose({units}, 2, padding='same')", SEQUENCE, last),
    Layer("layers.MaxPooling1D(2)", SEQUENCE, pooled, fits=deep_enough),
    Layer("layers.AveragePooling1D(2)", SEQUENCE, pooled, fits=deep_enough),
    Layer("layers.GlobalAveragePooling1D()", SEQUENCE, lambda s, d: s[1:]),
    Layer("layers.GlobalMaxPooling1D()", SEQUENCE, lambda s, d: s[1:]),
    Layer("layers.Flatten()", SEQUENCE + IMAGE, flat),
    Layer(
        "layers.MultiHeadAttention(2, 3{mha})", SEQUENCE, mha_shape, call=ITSELF, after="{frozen}"
    ),
    Layer("layers.MultiHeadAttention(2, 3, dropout=0.2)", SEQUENCE, call=ITSELF),
    Layer(
        "layers.MultiHeadAttention(2, 3)",
        SEQUENCE,
        call=ITSELF,
        after="{layer}._query_dense.enable_lora(2)",
    ),
    Layer("layers.GroupQueryAttention(3, 4, 2)", SEQUENCE, call=ITSELF),
    Layer("layers.GroupQueryAttention(3, 4, 1, dropout=0.2)", SEQUENCE, call=ITSELF),
    Layer("layers.Attention(use_scale=True)", SEQUENCE, call=("{layer}([{x}, {x}])",)),
    Layer("layers.AdditiveAttention()", SEQUENCE, call=("{layer}([{x}, {x}])",)),
    Layer("layers.Permute((2, 1))", SEQUENCE, lambda s, d: s[::-1]),
    Layer("layers.SpatialDropout1D({rate})", SEQUENCE),
    Layer("layers.Dropout({rate}, noise_shape=(None, 1, None))", SEQUENCE),
    Layer("layers.Dropout({rate}, noise_shape=(1, None, None))", SEQUENCE),
    Layer("layers.ZeroPadding1D(1)", SEQUENCE, lambda s, d: (s[0] + 2, s[1])),
    Layer("layers.UpSampling1D(2)", SEQUENCE, lambda s, d: (2 * s[0], s[1])),
    Layer("layers.Masking(0.0)", SEQUENCE),
    # Images
    Layer(
        "layers.Conv2D({units}, 2, padding={pad}, activation={act}{dense})",
        IMAGE,
        convolved,
        fits=deep_enough,
        after="{after}",
    ),
    Layer("layers.DepthwiseConv2D(2, padding='same')", IMAGE),
    Layer("layers.SeparableConv2D({units}, 2, padding='same')", IMAGE, last),
    Layer("layers.Conv2DTranspose({units}, 2, padding='same')", IMAGE, last),
    Layer("layers.MaxPooling2D(2)", IMAGE, pooled, fits=deep_enough),
    Layer("layers.AveragePooling2D(2)", IMAGE, pooled, fits=deep_enough),
    Layer("layers.GlobalAveragePooling2D()", IMAGE, lambda s, d: s[2:]),
    Layer("layers.GlobalMaxPooling2D()", IMAGE, lambda s, d: s[2:]),
    Layer("layers.SpatialDropout2D({rate})", IMAGE),
    Layer("layers.UpSampling2D(2)", IMAGE, lambda s, d: (2 * s[0], 2 * s[1], s[2])),
    Layer("layers.ZeroPadding2D(1)", IMAGE, lambda s, d: (s[0] + 2, s[1] + 2, s[2])),
    Layer("layers.Reshape((-1, {same}))", IMAGE, lambda s, d: (s[0] * s[1], s[2])),
    Layer(
        "layers.TimeDistributed(layers.LSTM({units}))", IMAGE, lambda s, d: (s[0], int(d["units"]))
    ),
]

# For programs whose sequences stay sequences: of these, or of all that take one.
OF_SEQUENCES = (
    "layers.MultiHeadAttention",
    "layers.GroupQueryAttention",
    "Transformer",
    "AttentionByHand",
    "PositionEmbedding",
    "layers.Dense(",
    "layers.EinsumDense('abc",
    "layers.LayerNormalization",
    "layers.Dropout",
    "layers.TimeDistributed",
)

STYLES = [*["functional"] * 4, "sequential", "sequential", "nested", "nested", "subclassed"]

# What an input holds, the shape of an example, the layers that make a float tensor of it.
INPUTS = [
    ("real", (5,), [], (5,)),
    ("real", (6, 3), [], (6, 3)),
    ("real", (4, 4, 2), [], (4, 4, 2)),
    ("ids", (6,), ["layers.Embedding(9, 4)"], (6, 4)),
    ("ids", (6,), ["layers.Embedding(9, 4, mask_zero=True)"], (6, 4)),
    ("ids", (6,), ["layers.Embedding(9, 4, embeddings_regularizer='l2')"], (6, 4)),
    ("ids", (6,), ["layers.Embedding(9, 4, embeddings_constraint='unit_norm')"], (6, 4)),
    ("ids", (1,), ["layers.Embedding(9, 3)", "layers.Flatten()"], (3,)),
    (
        "ids",
        (6,),
        ["layers.CategoryEncoding(9, output_mode='multi_hot')", "layers.Rescaling(1.0)"],
        (9,),
    ),
    (
        "ids",
        (6,),
        ["layers.CategoryEncoding(9, output_mode='count')", "layers.Rescaling(1.0)"],
        (9,),
    ),
    (
        "ids",
        (1,),
        [
            "layers.IntegerLookup(vocabulary=[1, 2, 3])",
            "layers.Embedding(4, 3)",
            "layers.Flatten()",
        ],
        (3,),
    ),
    ("ids", (6,), ["layers.Hashing(5)", "layers.Embedding(5, 3)"], (6, 3)),
    (
        "words",
        (3,),
        ["layers.StringLookup(vocabulary=list('abcd'))", "layers.Embedding(5, 3)"],
        (3, 3),
    ),
    (
        "words",
        (1,),
        [
            "layers.StringLookup(vocabulary=list('abcd'), output_mode='one_hot')",
            "layers.Rescaling(1.0)",
        ],
        (5,),
    ),
    ("ids", (6,), ["layers.Embedding(9, 4, trainable=False)"], (6, 4)),
    ("ids", (6,), ["WordsAndPositions()"], (6, 4)),
    ("ids", (7,), ["WordsAndPositions(mask_zero=True)"], (7, 4)),
    ("real", (5,), ["layers.Normalization(mean=0.3, variance=2.0)"], (5,)),
    ("real", (5,), ["layers.Discretization([-1.0, 0.0, 1.0])", "layers.Embedding(4, 3)"], (5, 3)),
]
SMALL_INPUTS = [entry for entry in INPUTS if len(entry[3]) == 1]  # For a second input.
SEQUENCES = [entry for entry in INPUTS if len(entry[3]) == 2]
# Tables that the last layer reads once more, of an input of 6 ids.
TIED = ["TiedEmbedding()", "TiedEmbedding(mask_zero=True)"]
STEPS = ["ClippedStep", "DecayingStep"]  # Of models with a `train_step` of their own.

REDUCTION = ["", "reduction='sum'", "reduction='mean'", "reduction='mean_with_sample_weight'"]
REAL = [
    "'mse'",
    "losses.MeanSquaredError({r})",
    "losses.MeanAbsoluteError({r})",
    "losses.Huber({r})",
    "losses.LogCosh({r})",
    "losses.CosineSimilarity({r})",
    "squared_error",
    "Scaled({r})",
    "'mape'",
    "flattened_error",
    "Remembering()",
    "with_decay(model)",
]
# Metrics that take no axis of steps.
OF_TWO_AXES = ("metrics.F1Score", "metrics.FBetaScore", "metrics.R2Score")
# The last layer, what targets hold, losses and metrics.
HEADS = [
    (
        ["layers.Dense(3)"],
        "real",
        (3,),
        REAL,
        [
            "'mse'",
            "'mae'",
            "metrics.RootMeanSquaredError()",
            "metrics.CosineSimilarity()",
            "metrics.R2Score()",
            "absolute_error",
            "Largest()",
            "RowsSeen()",
            "ErrorsInFunction()",
            "Compounding()",
            "metrics.MeanMetricWrapper(absolute_error, name='wrapped')",
            "metrics.LogCoshError()",
        ],
    ),
    # Targets of an axis less than their outputs: Keras broadcasts them to every row's.
    (
        ["layers.Dense(4)", "layers.Reshape((-1, 4))"],
        "real",
        (4,),
        REAL,
        ["'mse'", "'mae'", "metrics.LogCoshError()"],
    ),
    (
        ["layers.Dense(1, activation='sigmoid')"],
        "binary",
        (1,),
        [
            "'binary_crossentropy'",
            "losses.BinaryCrossentropy({r})",
            "losses.BinaryFocalCrossentropy({r})",
            "losses.BinaryCrossentropy(label_smoothing=0.1)",
            "losses.Dice()",
            "'mse'",
        ],
        [
            "'accuracy'",
            "metrics.AUC(num_thresholds=11)",
            "metrics.Precision()",
            "metrics.Recall()",
            "metrics.BinaryAccuracy()",
            "metrics.TruePositives()",
            "metrics.BinaryIoU()",
            "metrics.PrecisionAtRecall(0.5)",
            "Largest()",
        ],
    ),
    (
        ["layers.Dense(1)"],
        "signs",
        (1,),
        ["losses.Hinge({r})", "losses.SquaredHinge({r})"],
        ["'hinge'", "Largest()"],
    ),
    (
        ["layers.Dense(4, activation='softmax')"],
        "one_hot",
        (),
        [
            "'categorical_crossentropy'",
            "losses.CategoricalCrossentropy({r})",
            "losses.KLDivergence({r})",
            "losses.CategoricalFocalCrossentropy({r})",
            "losses.CategoricalHinge({r})",
            "losses.CategoricalGeneralizedCrossEntropy()",
            "losses.Tversky()",
        ],
        [
            "'accuracy'",
            "metrics.CategoricalCrossentropy()",
            "metrics.F1Score()",
            "metrics.FBetaScore()",
            "metrics.OneHotMeanIoU(4)",
            "metrics.KLDivergence()",
            "metrics.AUC(num_thresholds=9)",
        ],
    ),
    (
        ["layers.Dense(4)"],
        "labels",
        (),
        [
            "losses.SparseCategoricalCrossentropy(from_logits=True)",
            "losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)",
            "losses.SparseCategoricalCrossentropy(from_logits=True, {r})",
        ],
        [
            "'accuracy'",
            "metrics.SparseCategoricalCrossentropy(from_logits=True)",
            "metrics.MeanIoU(4, sparse_y_pred=False)",
        ],
    ),
    (
        ["layers.Dense(4, activation='softmax')"],
        "labels",
        (),
        ["'sparse_categorical_crossentropy'", "losses.SparseCategoricalCrossentropy({r})"],
        ["'accuracy'", "'sparse_categorical_accuracy'"],
    ),
    (
        ["layers.Dense(2, activation='softplus')"],
        "positive",
        (2,),
        ["losses.Poisson({r})", "losses.MeanSquaredLogarithmicError({r})"],
        ["'mse'", "'poisson'"],
    ),
    # Targets of another rank than the outputs, and outputs without an axis but the rows'.
    (
        ["layers.Dense(1, activation='softplus')"],
        "positive",
        (),
        ["'mse'", "losses.MeanAbsoluteError({r})", "losses.Poisson({r})"],
        ["'mae'", "'poisson'", "'kl_divergence'", "metrics.RootMeanSquaredError()"],
    ),
    (
        ["layers.Dense(1)", "layers.Lambda(lambda t: t[..., 0])"],
        "real",
        (),
        REAL,
        ["'mse'", "'mae'", "metrics.CosineSimilarity()", "metrics.LogCoshError()"],
    ),
    (
        ["layers.Dense(4, activation='softmax')"],
        "labels",
        (1,),
        [
            "'sparse_categorical_crossentropy'",
            "losses.SparseCategoricalCrossentropy({r})",
            "losses.CategoricalGeneralizedCrossEntropy()",
        ],
        ["'accuracy'", "metrics.SparseCategoricalCrossentropy()"],
    ),
]

OPTIMIZERS = [
    "optimizers.SGD(0.1{o})",
    "optimizers.SGD(0.05, momentum=0.9{o})",
    "optimizers.SGD(0.05, momentum=0.9, nesterov=True{o})",
    "optimizers.Adam(0.01{o})",
    "optimizers.Adam(0.01, amsgrad=True{o})",
    "optimizers.AdamW(0.01{o})",
    "optimizers.RMSprop(0.01{o})",
    "optimizers.RMSprop(0.01, centered=True, momentum=0.5{o})",
    "optimizers.Adagrad(0.05{o})",
    "optimizers.Adadelta(0.5{o})",
    "optimizers.Adamax(0.01{o})",
    "optimizers.Nadam(0.01{o})",
    "optimizers.Ftrl(0.05{o})",
    "optimizers.Lion(0.001{o})",
    "optimizers.Lamb(0.01{o})",
    "optimizers.Adafactor(0.01{o})",
    "optimizers.Muon(0.01{o})",
    "optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=256.0)",
    "optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 4){o})",
    "optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 2, 0.5){o})",
]
OPTIMIZER_OPTIONS = [
    "",
    ", global_clipnorm=0.1",
    ", clipnorm=0.05",
    ", clipvalue=0.01",
    ", weight_decay=0.02",
    ", gradient_accumulation_steps=2",
    ", gradient_accumulation_steps=3, global_clipnorm=0.1",
    ", use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2",
    ", use_ema=True",
]
# What comes after the first `fit`; a compile of its own needs a strategy's scope.
THEN = [
    ("evaluate", 4),
    ("predict", 4),
    ("save", 8),
    ("again", 8),
    ("on_batch", 8),
    ("reload", 8),
    ("resume", 8),
]
COMPILE = [
    "",
    "steps_per_execution=2",
    "weighted_metrics",
    "run_eagerly=True",
    "steps_per_execution=3",
    "jit_compile=True",
]
CALLBACKS = [
    "keras.callbacks.EarlyStopping(monitor='loss', patience=0, restore_best_weights=True)",
    "keras.callbacks.ReduceLROnPlateau(monitor='loss', patience=0, min_delta=10.0)",
    "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "keras.callbacks.TerminateOnNaN()",
    "keras.callbacks.SwapEMAWeights()",
]
VALIDATION = [
    "",
    "validation_data=load_data(7)",
    "validation_data=load_data(11), validation_freq=2",
    "validation_split=0.3",
    "validation_data=load_data(12), validation_batch_size=5",
]
