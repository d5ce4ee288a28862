r"""Detect and box the handwritten digits in photographs, without anchors.

Parallelism: `model` (also checked: `tensor` with `--convolutions=height`).
Why: the maps of large pictures fill a device, and each device can compute a part of their rows.

    tfparallel check models/detection.py --parallel=model --num_devices=2 --steps=5
    tfparallel check models/detection.py --parallel=tensor --num_devices=2 --steps=5 \
        --convolutions=height
    tfparallel train models/detection.py --parallel=model --num_devices=2

scikit-learn ships no boxes, so the pictures are composed from real data: two of its digits,
tripled, on a crop of 48 x 48 pixels of its two photographs (read with Pillow). For each cell of 4 x
4 pixels the model says which digit has its center there, if any, and where that digit's box ends:
its distances to the left, top, right and bottom, in cells.

References:
    Zhou, Wang, Krähenbühl. Objects as points. arXiv 1904.07850, 2019.
    Tian, Shen, Chen, He. FCOS: fully convolutional one-stage object detection. ICCV 2019.
"""

import keras
import numpy as np
from digits_cnn import load_digits
from keras import ops

EPOCHS = 15
SIDE, CELL = 48, 4
GRID = SIDE // CELL
NUM_DIGITS = 2  # In each picture.
NUM_CLASSES = 10


def build_model():
    """Returns a model that outputs `(batch, 12, 12, 14)`: logits of ten digits, four distances."""
    layer = {"padding": "same", "activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3), name="picture"),
            keras.layers.Conv2D(16, 3, name="conv1", **layer),
            keras.layers.MaxPooling2D(2, name="pool1"),
            keras.layers.Conv2D(32, 3, name="conv2", **layer),
            keras.layers.MaxPooling2D(2, name="pool2"),
            keras.layers.Conv2D(64, 3, name="conv3", **layer),
            keras.layers.Conv2D(64, 3, name="conv4", **layer),
            keras.layers.Conv2D(64, 3, name="conv5", **layer),
            keras.layers.Conv2D(NUM_CLASSES + 4, 1, bias_initializer=first_guess, name="cells"),
        ],
        name="detection",
    )


def first_guess(shape, dtype=None):
    """Returns biases by which all cells are almost surely empty, as nearly all are."""
    return ops.cast(np.where(np.arange(shape[0]) < NUM_CLASSES, -4.0, 2.0), dtype)


def compile_model(model):
    """Compiles the net with Adam; the metric is the share of digits that are detected."""
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3, epsilon=1e-4),
        loss=detection_loss,
        metrics=[detected],
    )


def detection_loss(cells, outputs):
    """Returns each picture's focal loss of centers plus L1 of boxes, per digit; `(batch,)`."""
    centers, logits = cells[..., :NUM_CLASSES], outputs[..., :NUM_CLASSES]
    is_there, is_absent = ops.sigmoid(logits), ops.sigmoid(-logits)
    focal = centers * ops.square(is_absent) * ops.softplus(-logits)
    focal += (1 - centers) * ops.square(is_there) * ops.softplus(logits)
    has_center = ops.sum(centers, axis=-1, keepdims=True)
    boxes = has_center * ops.abs(cells[..., NUM_CLASSES:] - outputs[..., NUM_CLASSES:])
    return (ops.sum(focal, axis=(1, 2, 3)) + ops.sum(boxes, axis=(1, 2, 3))) / NUM_DIGITS


def detected(cells, outputs):
    """Returns the share of each picture's digits whose box is met by half; `(batch,)`.

    The picture's two highest peaks count. One meets a digit if it names that digit, and if the
    intersection of the two boxes is more than half of their union.
    """
    digit, box = strongest(cells[..., :NUM_CLASSES], cells[..., NUM_CLASSES:])
    logits = outputs[..., :NUM_CLASSES]
    # A peak is no less than its eight neighbors.
    is_peak = ops.equal(logits, ops.max_pool(logits, 3, strides=1, padding="same"))
    named, named_box = strongest(ops.where(is_peak, logits, -1e9), outputs[..., NUM_CLASSES:])
    digit, box = digit[:, :, None], box[:, :, None]
    named, named_box = named[:, None], named_box[:, None]
    low = ops.maximum(box[..., :2], named_box[..., :2])
    high = ops.minimum(box[..., 2:], named_box[..., 2:])
    both = area(low, high)
    either = area(box[..., :2], box[..., 2:]) + area(named_box[..., :2], named_box[..., 2:]) - both
    meets = ops.logical_and(ops.equal(digit, named), both > 0.5 * either)
    return ops.mean(ops.cast(ops.any(meets, axis=2), outputs.dtype), axis=1)


def strongest(scores, distances):
    """Returns the two best-scored digits, `(batch, 2)`, and their boxes, `(batch, 2, 4)`."""
    _, best = ops.top_k(ops.reshape(scores, (-1, GRID * GRID * NUM_CLASSES)), NUM_DIGITS)
    cell = best // NUM_CLASSES
    distances = ops.reshape(distances, (-1, GRID * GRID, 4))
    distances = ops.take_along_axis(distances, cell[..., None], axis=1)
    middle = ops.cast(ops.stack([cell % GRID, cell // GRID], axis=-1), distances.dtype) + 0.5
    box = ops.concatenate([middle - distances[..., :2], middle + distances[..., 2:]], axis=-1)
    return best % NUM_CLASSES, box


def area(low, high):
    """Returns the areas of boxes by their corners, `(..., 2)` each; 0 if one is empty."""
    return ops.prod(ops.maximum(high - low, 0.0), axis=-1)


def load_data():
    """Returns (train, validation), each `(pictures, cells)` in float32.

    Pictures `(examples, 48, 48, 3)` from 0 to 1. Cells `(examples, 12, 12, 14)`: 1 for the digit
    whose center is in the cell, else 0; and that digit's four distances, else 0.
    """
    train_digits, validation_digits = load_digits(8)
    train, validation = backgrounds()
    return compose(train_digits, train, seed=0), compose(validation_digits, validation, seed=1)


def backgrounds():
    """Returns the photographs' parts, their left two thirds to train on, the others to validate."""
    train, validation = [], []
    for photograph in photographs():
        border = photograph.shape[1] * 2 // 3
        train.append(photograph[:, :border])
        validation.append(photograph[:, border:])
    return train, validation


def photographs():
    """Returns scikit-learn's two photographs, each `(427, 640, 3)` in float32 from 0 to 1."""
    from sklearn.datasets import load_sample_images

    return [image.astype("float32") / 255.0 for image in load_sample_images().images]


def compose(digits, backgrounds, seed):
    """Draws each digit, and another one beside it, on a random part of a background."""
    images, labels = digits
    random = np.random.default_rng(seed)
    pictures = np.empty((len(images), SIDE, SIDE, 3), "float32")
    cells = np.zeros((len(images), GRID, GRID, NUM_CLASSES + 4), "float32")
    for index in range(len(images)):
        picture = cut(backgrounds[random.integers(len(backgrounds))], SIDE, random).copy()
        # One in the left half, one in the right, so that neither hides the other.
        for half, chosen in enumerate((index, random.integers(len(images)))):
            ink = np.kron(images[chosen, ..., 0], np.ones((3, 3), "float32"))
            is_row, is_column = ink.any(axis=1), ink.any(axis=0)
            ink = ink[np.ix_(is_row, is_column)][..., np.newaxis]
            height, width = ink.shape[:2]
            top = random.integers(SIDE - height + 1)
            first = half * SIDE // 2 + random.integers(SIDE // 2 - width + 1)
            place = np.s_[top : top + height, first : first + width]
            bright = picture.mean() < 0.5
            picture[place] = ink * (0.9 if bright else 0.1) + (1 - ink) * picture[place]
            box = np.array([first, top, first + width, top + height], "float32") / CELL
            column, row = ((box[:2] + box[2:]) / 2).astype(int)
            middle = np.array([column, row], "float32") + 0.5
            cells[index, row, column, labels[chosen]] = 1
            cells[index, row, column, NUM_CLASSES:] = [*(middle - box[:2]), *(box[2:] - middle)]
        pictures[index] = picture
    return pictures, cells


def cut(picture, side, random):
    """Returns a random square of `picture`, `(height, width, 3)`."""
    row = random.integers(picture.shape[0] - side + 1)
    column = random.integers(picture.shape[1] - side + 1)
    return picture[row : row + side, column : column + side]
