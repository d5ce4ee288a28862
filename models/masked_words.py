"""Fill in masked words, like BERT: a transformer that reads in both directions.

Parallelism: `hybrid` with `--mesh=sequence=2` (also checked: `data`).
Why: each device holds half of every sequence; attention reads all of it.

    tfparallel check models/masked_words.py --parallel=hybrid --mesh=sequence=2 --steps=5
    tfparallel check models/masked_words.py --parallel=data --num_devices=2 --steps=5
    tfparallel train models/masked_words.py --parallel=hybrid --mesh=sequence=2

The text is that of language_model.py: Python's own documentation. Of each sequence 15% of the words
are to be predicted. Of those, 80% are masked, 10% replaced by random words and 10% left. Sample
weights of 0 leave all other positions out of the loss.

References:
    Devlin, Chang, Lee, Toutanova. BERT: pre-training of deep bidirectional transformers for
    language understanding. NAACL 2019.
"""

import keras
import numpy as np
from language_model import UNKNOWN, text_as_ids
from transformer import Position, attention, perceptron

EPOCHS = 3
SEQUENCE_LENGTH = 32
VOCABULARY_SIZE = 2048  # The most frequent words; MASK is one more.
MASK = VOCABULARY_SIZE
WIDTH = 64
NUM_BLOCKS = 2
SHARE_TO_PREDICT = 0.15
VALIDATION_SHARE = 0.1


def build_model():
    """Returns a model that outputs logits of the word at each position."""
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32", name="words")
    x = keras.layers.Embedding(VOCABULARY_SIZE + 1, WIDTH, name="embedding")(inputs)
    x = Position(name="position")(x)
    for block in range(1, NUM_BLOCKS + 1):
        x = attention(x, name=f"block{block}_attention", causal=False)
        x = perceptron(x, name=f"block{block}_perceptron")
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    outputs = keras.layers.Dense(VOCABULARY_SIZE, name="logits")(x)
    return keras.Model(inputs, outputs, name="masked_words")


def compile_model(model):
    """Compiles the net with Adam and cross-entropy of the words to predict."""
    model.compile(
        # As in language_model.py: weights without a true gradient must not move by rounding.
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-5, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(words, original_words, weights)`.

    All three are `(sequences, 32)`, ids in int32. A weight is 1 / 0.15 where the word is to be
    predicted and else 0, so that the loss is about the mean over the words to predict.
    """
    ids = np.array(text_as_ids(), "int32")
    ids = np.where(ids < VOCABULARY_SIZE, ids, UNKNOWN)
    original = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(-1, SEQUENCE_LENGTH)
    random = np.random.default_rng(0)
    # Texts of one module stand together; shuffled, both parts have sequences of each.
    original = original[random.permutation(len(original))]
    # A rare word is not known by its number, so it is nothing to predict.
    chosen = (random.random(original.shape) < SHARE_TO_PREDICT) & (original != UNKNOWN)
    how = random.random(original.shape)
    words = np.where(chosen & (how < 0.8), MASK, original)
    replaced = chosen & (how >= 0.8) & (how < 0.9)
    words[replaced] = random.integers(VOCABULARY_SIZE, size=replaced.sum())
    weights = chosen.astype("float32") / np.float32(SHARE_TO_PREDICT)
    arrays = (words.astype("int32"), original, weights)
    num_train = len(original) - int(len(original) * VALIDATION_SHARE)
    train, validation = zip(*((a[:num_train], a[num_train:]) for a in arrays), strict=True)
    return train, validation
