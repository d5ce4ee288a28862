"""The models that the programs of `contender.py` train, and their data.

The data are class prototypes with noise, so there is something to learn and nothing to download.
The time of a step does not depend on them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

SEED = 7
NUM_CLASSES = 10
NUM_BATCHES = 16
NOISE = 3.0


class Workload(NamedTuple):
    """A model and the data it is trained on.

    Attributes:
        description: What it is, for tables.
        build_model: Function that returns the Keras model; it puts out logits.
        input_shape: The shape of one example.
        global_batch_size: Examples of a step, over all replicas of a process.
        num_words: Of a language model, which reads word ids and predicts one at each place.
    """

    description: str
    build_model: Callable[[], keras.Model]
    input_shape: tuple[int, ...]
    global_batch_size: int
    num_words: int | None = None

    def batches(self, num_workers=1):
        """Returns inputs `(batches, global batch, …)`, float32 or ids, and labels in int32."""
        generator = np.random.default_rng(SEED)
        if self.num_words is not None:
            shape = (NUM_BATCHES, self.global_batch_size * num_workers, self.input_shape[0] + 1)
            ids = generator.integers(self.num_words, size=shape).astype("int32")
            return ids[..., :-1], ids[..., 1:]
        prototypes = generator.standard_normal((NUM_CLASSES, *self.input_shape))
        size = (NUM_BATCHES, self.global_batch_size * num_workers)
        labels = generator.integers(NUM_CLASSES, size=size)
        noise = generator.standard_normal((*labels.shape, *self.input_shape))
        return (prototypes[labels] + NOISE * noise).astype("float32"), labels.astype("int32")

    def gradient_bytes(self, model):
        """Returns the size of the gradients of a process's rows, in float32.

        The gradient of an embedding is a slice for each word of the batch, with its index in int32.
        """
        size = 4 * model.count_params()
        for layer in model.layers:
            if isinstance(layer, keras.layers.Embedding):
                num_slices = self.global_batch_size * self.input_shape[0]
                size += num_slices * (4 * layer.output_dim + 4) - 4 * layer.count_params()
        return size


def build_mlp():
    """Returns eight thin dense layers: next to no arithmetic, in hundreds of ops."""
    return keras.Sequential(
        [
            keras.Input((32,)),
            *[keras.layers.Dense(32, activation="relu") for _ in range(7)],
            keras.layers.Dense(NUM_CLASSES),
        ],
        name="mlp",
    )


def build_cnn(num_units=128, name="cnn"):
    """Returns the net of `models/digits_cnn.py` for 28 x 28 pixels, without padding.

    With 128 units it has 1.2 million parameters, with 1024 9.5 million.
    """
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(num_units, activation="relu"),
            keras.layers.Dense(NUM_CLASSES),
        ],
        name=name,
    )


NUM_WORDS, LENGTH = 32_768, 64


def build_language_model(width=64):
    """Returns a model of 4.2 million weights, whose predictions are 128 KiB a word."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(NUM_WORDS, width)(ids)
    x = keras.layers.Add()([x, keras.layers.Dense(width, activation="gelu")(x)])
    return keras.Model(ids, keras.layers.Dense(NUM_WORDS)(x), name="language_model")


NUM_BYTES, SEQUENCE_LENGTH, NUM_SEQUENCES = 256, 64, 64
WIDTH, NUM_HEADS, NUM_BLOCKS = 384, 6, 6
BLOCK = ("norm1", "attention", "add1", "norm2", "wide", "narrow", "add2")


def build_transformer():
    """Returns a GPT on bytes of 10.8 M parameters; `torch_pipeline_contender.py` has the same.

    The attention is written with `Dense`, as PyTorch's is with `Linear`. In Keras's
    `MultiHeadAttention` the gradient of a projection's weights is one matrix a sequence, and their
    sum: a step takes 1.14 times as long (docs/internals/pipeline.md).
    """
    layers, ops = keras.layers, keras.ops

    class Attention(layers.Layer):
        """Causal self-attention."""

        def build(self, shape):
            self.projections = [layers.Dense(WIDTH) for _ in range(4)]
            for projection in self.projections:
                projection.build(shape)
            self.seen = np.tril(np.ones((SEQUENCE_LENGTH, SEQUENCE_LENGTH), bool))

        def call(self, x):
            *projections, out = self.projections
            shape = (-1, SEQUENCE_LENGTH, NUM_HEADS, WIDTH // NUM_HEADS)
            query, key, value = (
                ops.transpose(ops.reshape(projection(x), shape), (0, 2, 1, 3))
                for projection in projections
            )
            query = query * (WIDTH // NUM_HEADS) ** -0.5
            scores = ops.matmul(query, ops.swapaxes(key, -1, -2))
            shares = ops.softmax(ops.where(self.seen, scores, -1e9))
            heads = ops.transpose(ops.matmul(shares, value), (0, 2, 1, 3))
            return out(ops.reshape(heads, (-1, SEQUENCE_LENGTH, WIDTH)))

    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_BYTES, WIDTH, name="embedding")(inputs)
    for index in range(NUM_BLOCKS):
        norm1, attention, add1, norm2, wide, narrow, add2 = (f"{index}_{part}" for part in BLOCK)
        y = layers.LayerNormalization(name=norm1)(x)
        x = layers.Add(name=add1)([x, Attention(name=attention)(y)])
        y = layers.LayerNormalization(name=norm2)(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=wide)(y)
        x = layers.Add(name=add2)([x, layers.Dense(WIDTH, name=narrow)(y)])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(NUM_BYTES, name="logits")(x), name="transformer")


def layers_per_stage():
    """Half of the blocks each, the same cut as in PyTorch's stages."""
    half = NUM_BLOCKS // 2 * len(BLOCK)
    return [1 + half, half + 2]


def build_mobilenet():
    return keras.applications.MobileNetV2(
        (64, 64, 3), alpha=0.35, weights=None, classes=NUM_CLASSES, classifier_activation=None
    )


WORKLOADS = {
    "dispatch_bound": Workload(
        "MLP of 8 thin dense layers", build_mlp, input_shape=(32,), global_batch_size=64
    ),
    # 128 examples for each of two replicas, so that two cores need over 100 ms a step.
    "compute_bound": Workload(
        "CNN of 2 convolutions", build_cnn, input_shape=(28, 28, 1), global_batch_size=256
    ),
    # For `scaling.py`: this many examples per worker.
    **{
        f"cnn_{number}": Workload(
            "CNN of 2 convolutions", build_cnn, input_shape=(28, 28, 1), global_batch_size=number
        )
        for number in (32, 128)
    },
    "wide_cnn_32": Workload(
        "CNN of 2 convolutions and 1024 units",
        functools.partial(build_cnn, 1024, "wide_cnn"),
        input_shape=(28, 28, 1),
        global_batch_size=32,
    ),
    "language_model": Workload(
        "language model of 32,768 words",
        build_language_model,
        input_shape=(LENGTH,),
        global_batch_size=16,
        num_words=NUM_WORDS,
    ),
    # For `pipeline.py` and, in a smaller batch per worker, for `sharded.py`.
    **{
        name: Workload(
            "transformer of 10.8 M parameters",
            build_transformer,
            input_shape=(SEQUENCE_LENGTH,),
            global_batch_size=number,
            num_words=NUM_BYTES,
        )
        for name, number in (("transformer", NUM_SEQUENCES), ("transformer_32", 32))
    },
    "mobilenet_v2": Workload(
        "MobileNetV2", build_mobilenet, input_shape=(64, 64, 3), global_batch_size=32
    ),
}
