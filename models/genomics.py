r"""Detect whether an exon ends in the middle of a DNA sequence, with a deep stack of convolutions.

Parallelism: `pipeline` (also checked: `hybrid`, two replicas of such a pipeline).
Why: the model has many equal layers, so its stages work on different micro-batches at once.

    tfparallel check models/genomics.py --parallel=pipeline --num_devices=2 --num_micro_batches=4 \
        --steps=5
    tfparallel check models/genomics.py --parallel=hybrid --mesh=data=2,pipeline=2 --steps=5
    tfparallel train models/genomics.py --parallel=pipeline --num_devices=2 --num_micro_batches=4

No package that this project needs ships labelled sequences, so these are synthetic. All letters are
equally likely, and each sequence has GT in the middle. Around it, a true site has nine letters
drawn independently from DONOR: the frequencies at all 5' splice sites of the human genome
(GENCODE's annotation of hg38, which the package logomaker ships). Nine sequences in ten also
contain one GAAGAA, a splicing enhancer: before the middle in true sites, after it in decoys.

References:
    Frankish et al. GENCODE reference annotation for the human and mouse genomes. Nucleic Acids
    Research 47(D1), 2019.
    Tareen, Kinney. Logomaker: beautiful sequence logos in Python. Bioinformatics 36(7), 2020.
"""

import keras
import numpy as np

EPOCHS = 3
LETTERS = "ACGT"
SEQUENCE_LENGTH = 101
SITE = 50  # Where the intron begins, with GT.
NUM_TRAIN, NUM_VALIDATION = 4000, 1000
ENHANCER = "GAAGAA"
ENHANCER_SHARE = 0.9
# The last three letters of the exon, and the first six of the intron: shares of A, C, G and T.
DONOR = (
    (0.325, 0.359, 0.189, 0.127),
    (0.629, 0.111, 0.121, 0.139),
    (0.105, 0.028, 0.794, 0.073),
    (0.000, 0.000, 1.000, 0.000),
    (0.000, 0.028, 0.000, 0.972),
    (0.573, 0.038, 0.348, 0.041),
    (0.666, 0.085, 0.129, 0.120),
    (0.092, 0.066, 0.758, 0.084),
    (0.178, 0.156, 0.194, 0.472),
)
FILTERS = 24
DILATIONS = (1, 2, 4, 8)


def build_model():
    """Returns a model that outputs one logit, above zero for a true site."""
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32", name="letters")
    x = keras.layers.Embedding(len(LETTERS), FILTERS, name="letter")(inputs)
    for dilation in DILATIONS:
        x = block(x, dilation, name=f"block{dilation}")
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    # The site is in the middle, so where a pattern stands matters: ten places are kept.
    x = keras.layers.AveragePooling1D(10, name="pool")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="logit")(x), name="genomics")


def block(x, dilation, name):
    """Adds two convolutions to `x`, `(batch, letters, filters)`; the first one looks far around."""
    y = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
    y = keras.layers.Conv1D(
        2 * FILTERS,
        5,
        padding="same",
        dilation_rate=dilation,
        activation="gelu",
        name=f"{name}_far",
    )(y)
    y = keras.layers.Conv1D(FILTERS, 1, name=f"{name}_mix")(y)
    return keras.layers.Add(name=f"{name}_add")([x, y])


def compile_model(model):
    """Compiles the net with Adam, cross-entropy, accuracy and the area under the ROC curve."""
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-4),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),
            keras.metrics.AUC(from_logits=True, name="auc"),
        ],
    )


def load_data():
    """Returns (train, validation), each `(letters, labels)`.

    Letters `(examples, 101)` in int32, 0 to 3 for A, C, G, T; labels `(examples, 1)` in float32.
    """
    random = np.random.default_rng(0)
    return draw(NUM_TRAIN, random), draw(NUM_VALIDATION, random)


def draw(num_sequences, random):
    """Draws sequences, half of them true sites, as the top of this file says."""
    letters = random.integers(len(LETTERS), size=(num_sequences, SEQUENCE_LENGTH))
    labels = np.arange(num_sequences) % 2
    enhancer = [LETTERS.index(letter) for letter in ENHANCER]
    first = SITE - 3
    for sequence, is_site in zip(letters, labels, strict=True):
        sequence[SITE : SITE + 2] = LETTERS.index("G"), LETTERS.index("T")
        if is_site:
            for offset, shares in enumerate(DONOR):
                sequence[first + offset] = random.choice(len(LETTERS), p=shares)
        if random.random() < ENHANCER_SHARE:
            start = random.integers(10, first - len(enhancer))
            if not is_site:
                start += SITE
            sequence[start : start + len(enhancer)] = enhancer
    return letters.astype("int32"), labels[:, np.newaxis].astype("float32")
