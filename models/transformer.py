r"""Predict the next byte of Python's documentation with a small GPT.

Parallelism: `model`, `pipeline`.
Why: equal blocks make equal stages.

    tfparallel check models/transformer.py --parallel=pipeline --num_devices=2
    tfparallel train models/transformer.py --parallel=model --num_devices=2 --steps_per_epoch=50
    tfparallel launch --nproc_per_node=2 -- \
        tfparallel train models/transformer.py --parallel=model --steps_per_epoch=50

The model has two blocks of causal self-attention and a perceptron, each after a layer normalization
(Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), and reads sequences
of 64 bytes. The text comes with every Python: the language reference of `help()`, 465 KB.
"""

import keras
import numpy as np

SEQUENCE_LENGTH = 64
NUM_BYTES = 256
WIDTH = 64
NUM_HEADS = 4
NUM_BLOCKS = 2
VALIDATION_SHARE = 0.1


@keras.saving.register_keras_serializable(package="tfparallel_models")
class Position(keras.layers.Layer):
    """Adds to each position of a sequence a vector of its own, which is learned."""

    def build(self, input_shape):
        """Makes the vectors, `(positions, width)`."""
        self.vectors = self.add_weight(
            shape=input_shape[1:], initializer=keras.initializers.RandomNormal(0.02), name="vectors"
        )

    def call(self, x):
        """Adds them to `x`, `(batch, positions, width)`."""
        return x + self.vectors


def build_model():
    """Returns a model that outputs logits of the next byte at each position."""
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32", name="bytes")
    x = keras.layers.Embedding(NUM_BYTES, WIDTH, name="embedding")(inputs)
    x = Position(name="position")(x)
    for block in range(1, NUM_BLOCKS + 1):
        x = attention(x, name=f"block{block}_attention")
        x = perceptron(x, name=f"block{block}_perceptron")
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    outputs = keras.layers.Dense(NUM_BYTES, name="logits")(x)
    return keras.Model(inputs, outputs, name="transformer")


def attention(x, name, causal=True):
    """Adds to each position of `x`, `(batch, positions, width)`, what it sees (before itself)."""
    y = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
    heads = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS, name=name)
    return keras.layers.Add(name=f"{name}_add")([x, heads(y, y, use_causal_mask=causal)])


def perceptron(x, name):
    """Adds to each position of `x` what two dense layers make of it."""
    y = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu", name=f"{name}_wide")(y)
    y = keras.layers.Dense(WIDTH, name=f"{name}_narrow")(y)
    return keras.layers.Add(name=f"{name}_add")([x, y])


def compile_model(model):
    """Compiles the net with AdamW and cross-entropy of the next byte."""
    model.compile(
        # As in digits_cnn.py: with the default epsilon, a weight without a true gradient (the
        # attention's bias of the keys) moves by rounding alone.
        optimizer=keras.optimizers.AdamW(3e-3, weight_decay=0.01, epsilon=1e-4, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(bytes, next_bytes)`, both `(sequences, 64)` in int32."""
    text = np.frombuffer(documentation().encode(), np.uint8).astype("int32")
    num_sequences = (len(text) - 1) // SEQUENCE_LENGTH
    length = num_sequences * SEQUENCE_LENGTH
    x = text[:length].reshape(num_sequences, SEQUENCE_LENGTH)
    y = text[1 : length + 1].reshape(num_sequences, SEQUENCE_LENGTH)
    num_train = num_sequences - int(num_sequences * VALIDATION_SHARE)
    return (x[:num_train], y[:num_train]), (x[num_train:], y[num_train:])


def documentation():
    """Returns the text of Python's `help()` topics, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "The text is that of Python's own help(), in the module pydoc_data, which this Python "
            "lacks. Some systems have it in a package of its own (python3-doc, libpython3-stdlib); "
            f"install it, or use Python from python.org. Received: {error}."
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))
