r"""Predict the next of 8,192 words with a causal transformer: a model with a large vocabulary.

Parallelism: `tensor` (also checked: `data`).
Why: embedding and logits hold nine tenths of the weights; each device stores a part of both.

    tfparallel check models/language_model.py --parallel=tensor --num_devices=2 --steps=5
    tfparallel check models/language_model.py --parallel=data --num_devices=2 --steps=5
    tfparallel train models/language_model.py --parallel=tensor --num_devices=2 \
        --steps_per_epoch=60

The text comes with every Python: its `help()` and the triple-quoted strings of its standard
library, about 460,000 words and punctuation marks. It differs between versions of Python.
"""

import functools
import pathlib
import re
import sysconfig

import keras
import numpy as np
from transformer import Position, documentation

EPOCHS = 2
SEQUENCE_LENGTH = 32
VOCABULARY_SIZE = 8192
UNKNOWN = 0
WIDTH = 64
NUM_HEADS = 4
VALIDATION_SHARE = 0.1
PACKAGES = (
    ".", "asyncio", "collections", "concurrent/futures", "ctypes", "curses", "dbm", "email", "html",
    "http", "importlib", "json", "logging", "multiprocessing", "sqlite3", "tkinter", "unittest",
    "urllib", "wsgiref", "xml/etree", "xml/sax", "xmlrpc",
)  # fmt: skip


def build_model():
    """Returns a model that outputs logits of the next word at each position."""
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32", name="words")
    x = keras.layers.Embedding(VOCABULARY_SIZE, WIDTH, name="embedding")(inputs)
    x = Position(name="position")(x)
    y = keras.layers.LayerNormalization(name="attention_norm")(x)
    heads = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS, name="attention")
    x = keras.layers.Add(name="attention_add")([x, heads(y, y, use_causal_mask=True)])
    y = keras.layers.LayerNormalization(name="perceptron_norm")(x)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu", name="wide")(y)
    y = keras.layers.Dense(WIDTH, name="narrow")(y)
    x = keras.layers.Add(name="perceptron_add")([x, y])
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    outputs = keras.layers.Dense(VOCABULARY_SIZE, name="logits")(x)
    return keras.Model(inputs, outputs, name="language_model")


def compile_model(model):
    """Compiles the net with Adam and cross-entropy of the next word."""
    model.compile(
        # As in digits_cnn.py: with the default epsilon, weights without a true gradient move by
        # rounding alone. Here these are the attention's bias of the keys and the words not read.
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-5, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(words, next_words)`, both `(sequences, 32)` in int32."""
    words = np.array(text_as_ids(), "int32")
    num_sequences = (len(words) - 1) // SEQUENCE_LENGTH
    length = num_sequences * SEQUENCE_LENGTH
    x = words[:length].reshape(num_sequences, SEQUENCE_LENGTH)
    y = words[1 : length + 1].reshape(num_sequences, SEQUENCE_LENGTH)
    # Texts of one module stand together; shuffled, both parts have sequences of each.
    order = np.random.default_rng(0).permutation(num_sequences)
    num_validation = int(num_sequences * VALIDATION_SHARE)
    validation, train = order[:num_validation], order[num_validation:]
    return (x[train], y[train]), (x[validation], y[validation])


@functools.cache
def text_as_ids():
    """Returns the text as numbers of words, the most frequent first; 0 stands for all rare ones."""
    strings = [
        string
        for source in sources()
        for string in re.findall(r'"""(.*?)"""', source, flags=re.DOTALL)
    ]
    text = "\n".join([documentation(), *strings])
    words = re.findall(r"[A-Za-z_]+|\d+|[^\w\s]", text)
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    # Ties by the alphabet, so that every run numbers the words alike.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY_SIZE - 1]
    ids = {word: number for number, word in enumerate(frequent, start=1)}
    return tuple(ids.get(word, UNKNOWN) for word in words)


@functools.cache
def sources():
    """Returns the source text of the standard library's modules, in the order of their paths."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [path for name in PACKAGES for path in sorted((library / name).glob("*.py"))]
    if not paths:
        raise RuntimeError(
            "The text is that of the standard library's sources, which this Python lacks. Some "
            "systems have it in a package of its own; install it, or use Python from python.org. "
            f"Received: no .py file in {library}."
        )
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
