r"""Tell in which of six ways a piece of a gene is read, with a deep stack of convolutions.

Parallelism: `pipeline` (also checked: `hybrid`, two replicas of such a pipeline).
Why: the model has many equal layers, so its stages work on different micro-batches at once.

    tfparallel check models/genomics.py --parallel=pipeline --num_devices=2 --num_micro_batches=4 \
        --steps=5
    tfparallel check models/genomics.py --parallel=hybrid --mesh=data=2,pipeline=2 --steps=5
    tfparallel train models/genomics.py --parallel=pipeline --num_devices=2 --num_micro_batches=4

A gene is read three letters at a time, on one of the two strands of the DNA, so a piece that is cut
out of it anywhere has six possible reading frames. The sequences are real: ten genes of *Bacillus
amyloliquefaciens* that together make an antibiotic, 44,660 letters with the genes' ends, from the
files that the package pyhmmer ships with its tests. Genes that are validated on are not trained on.

References:
    Chen et al. Comparative analysis of the complete genome sequence of the plant growth-promoting
    bacterium Bacillus amyloliquefaciens FZB42. Nature Biotechnology 25, 2007.
    Terlouw et al. MIBiG 3.0. Nucleic Acids Research 51(D1), 2023. Entry BGC0001090.
"""

import functools
import importlib.resources
import re

import keras
import numpy as np

EPOCHS = 3
RECORD = "BGC0001090.gbk"
LETTERS = "acgt"
PIECE_LENGTH = 99  # 33 codons.
NUM_FRAMES = 6
TRAIN_STRIDE, VALIDATION_STRIDE = 5, 16
LAST_TO_TRAIN = 27_237  # The genes behind it are those to validate on.
FILTERS = 24
DILATIONS = (1, 2, 4, 8)


def build_model():
    """Returns a model that outputs six logits, one for each reading frame."""
    inputs = keras.Input((PIECE_LENGTH,), dtype="int32", name="letters")
    x = keras.layers.Embedding(len(LETTERS), FILTERS, name="letter")(inputs)
    for dilation in DILATIONS:
        x = block(x, dilation, name=f"block{dilation}")
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    # Which of its three places a codon begins in must survive the mean over all codons.
    x = keras.layers.Reshape((PIECE_LENGTH // 3, 3 * FILTERS), name="codons")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_FRAMES, name="logits")(x), name="genomics")


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
    """Compiles the net with Adam, cross-entropy and accuracy."""
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(letters, frames)`.

    Letters `(examples, 99)` in int32, 0 to 3 for A, C, G, T. Frames `(examples,)` in int32: how
    many letters the first codon lacks, 0 to 2, and 3 more if the piece is of the other strand.
    """
    genes = [(gene, end <= LAST_TO_TRAIN) for gene, end in read_genes()]
    train = pieces([gene for gene, is_trained in genes if is_trained], TRAIN_STRIDE)
    order = np.random.default_rng(0).permutation(len(train[0]))
    validation = pieces([gene for gene, is_trained in genes if not is_trained], VALIDATION_STRIDE)
    return tuple(each[order] for each in train), validation


def pieces(genes, stride):
    """Cuts genes into pieces, every second one as it stands on the other strand."""
    starts = [
        (gene, start) for gene in genes for start in range(0, len(gene) - PIECE_LENGTH + 1, stride)
    ]
    letters = np.stack([gene[start : start + PIECE_LENGTH] for gene, start in starts])
    frames = np.array([start % 3 for _, start in starts])
    letters[1::2] = complement(letters[1::2])
    frames[1::2] += 3
    return letters.astype("int32"), frames.astype("int32")


def complement(letters):
    """Returns the other strand, which is read from its other end; A pairs with T, C with G."""
    return len(LETTERS) - 1 - letters[..., ::-1]


@functools.cache
def read_genes():
    """Returns each gene as it is read, `(letters,)` in int64, and the number of its last letter."""
    try:
        files = importlib.resources.files("pyhmmer")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "The sequences come with the package pyhmmer. Received: no such package. "
            "pip install 'tfparallel[models]'"
        ) from None
    text = (files / "tests" / "data" / "seqs" / RECORD).read_text()
    annotation, _, origin = text.partition("ORIGIN")
    dna = np.array([LETTERS.index(letter) for letter in re.findall("[acgt]", origin)])
    spans = re.findall(r"^ {5}CDS +complement\((\d+)\.\.(\d+)\)$", annotation, re.MULTILINE)
    return [(complement(dna[int(start) - 1 : int(end)]), int(end)) for start, end in spans]
