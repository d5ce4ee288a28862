"""Small real data: scikit-learn's 8x8 digits, cut into the shapes the cases need."""

from __future__ import annotations

import functools

import numpy as np
from sklearn.datasets import load_digits

NUM_EXAMPLES = 87  # six batches of 17, the last of 2: see case.fit


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images / 16.0, labels


def flat(count: int = NUM_EXAMPLES, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels `(count, 64)` in [0, 1] and labels `(count,)`."""
    images, labels = _digits()
    return images[offset : offset + count].copy(), labels[offset : offset + count].copy()


def images(count: int = NUM_EXAMPLES, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images `(count, 8, 8, 1)` and labels."""
    pixels, labels = flat(count, offset)
    return pixels.reshape(-1, 8, 8, 1), labels


def rows(count: int = NUM_EXAMPLES, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Each image as a sequence of 8 rows, `(count, 8, 8)`, and labels."""
    pixels, labels = flat(count, offset)
    return pixels.reshape(-1, 8, 8), labels


def tokens(
    count: int = NUM_EXAMPLES, *, by_length: bool = True, length: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    """Padded sequences of the ids 1 to 16, 0 for padding, and labels.

    A sequence is the grey levels of an image's inked pixels, between 1 and
    `length` of them. Sorted by length, as text is batched in practice, the
    replicas of a step see very different counts of valid tokens.
    """
    pixels, labels = flat(count)
    levels = np.round(pixels * 16).astype("int64")
    lengths = 1 + (np.arange(count) * 7) % length
    padded = np.zeros((count, length), dtype="int64")
    for row, (image, size) in enumerate(zip(levels, lengths, strict=True)):
        padded[row, :size] = image[image > 0][:size]
    if by_length:
        order = np.argsort((padded > 0).sum(axis=1), kind="stable")
        padded, labels = padded[order], labels[order]
    return padded, labels


def one_hot(labels: np.ndarray, num_classes: int = 10) -> np.ndarray:
    return np.eye(num_classes)[labels]


def weights(count: int = NUM_EXAMPLES) -> np.ndarray:
    """Sample weights between 0.1 and 2, some of them zero, growing along the batch."""
    values = 0.1 + 1.9 * (np.arange(count) % 17) / 16
    values[::11] = 0.0
    return values
