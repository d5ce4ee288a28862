r"""Segment handwriting in photographs with a U-Net.

Parallelism: `model` (also checked: `tensor` with `--convolutions=height`).
Why: activations of large images fill a device; skip connections go to the device that reads them.

    tfparallel check models/segmentation.py --parallel=model --num_devices=2 --steps=5 \
        --precision=float64
    tfparallel check models/segmentation.py --parallel=tensor --num_devices=2 --steps=5 \
        --convolutions=height --precision=float64
    tfparallel train models/segmentation.py --parallel=model --num_devices=2 \
        --global_batch_size=32

scikit-learn ships no segmented images, so these are composed from real data: its digits, enlarged
and drawn in dark or bright ink on crops of 32 x 32 pixels from its two photographs (read with
Pillow). The mask marks the pixels that ink covers by more than half. Run `check` in float64,
because batch normalization amplifies float32 rounding.
"""

import keras
import numpy as np
from digits_cnn import load_digits

EPOCHS = 3
SIDE = 32
DIGIT_SIDE = 24
FILTERS = (8, 16, 32)


def build_model():
    """Returns a model that outputs a logit for each pixel, above zero for ink."""
    inputs = keras.Input((SIDE, SIDE, 3), name="picture")
    x, skips = inputs, []
    for level, filters in enumerate(FILTERS[:-1], start=1):
        x = convolutions(x, filters, name=f"down{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(2, name=f"down{level}_pool")(x)
    x = convolutions(x, FILTERS[-1], name="bottom")
    for level in range(len(skips), 0, -1):
        x = keras.layers.UpSampling2D(2, name=f"up{level}_resize")(x)
        x = keras.layers.Concatenate(name=f"up{level}_skip")([skips[level - 1], x])
        x = convolutions(x, FILTERS[level - 1], name=f"up{level}")
    outputs = keras.layers.Conv2D(1, 1, name="logit")(x)
    return keras.Model(inputs, outputs, name="segmentation")


def convolutions(x, filters, name):
    """Convolves `x`, `(batch, side, side, channels)`, twice, each time normalized and cut at 0."""
    for number in (1, 2):
        # Without bias: the normalization behind it would take it out again.
        x = keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            name=f"{name}_conv{number}",
        )(x)
        # An epoch is 45 steps, too few for averages of the default momentum, 0.99.
        x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm{number}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{number}")(x)
    return x


def compile_model(model):
    """Compiles the net with Adam, cross-entropy of each pixel and the intersection over union."""
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        # The threshold is on the logit: 0 is a probability of one half.
        metrics=[keras.metrics.BinaryIoU(target_class_ids=[1], threshold=0.0, name="iou")],
    )


def load_data():
    """Returns (train, validation), each `(pictures, masks)` in float32.

    Pictures `(examples, 32, 32, 3)` from 0 to 1; masks `(examples, 32, 32, 1)`, 1 where there is
    ink. Digits of the validation are others than those of the training, and so are the photographs'
    parts: their left two thirds are for training.
    """
    (train_digits, _), (validation_digits, _) = load_digits(DIGIT_SIDE)
    train, validation = backgrounds()
    return compose(train_digits, train, seed=0), compose(validation_digits, validation, seed=1)


def backgrounds():
    """Returns the photographs' parts for training and for validation, each a list."""
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
    """Writes each digit, `(examples, side, side, 1)`, on a random part of a background."""
    random = np.random.default_rng(seed)
    pictures = np.empty((len(digits), SIDE, SIDE, 3), "float32")
    masks = np.zeros((len(digits), SIDE, SIDE, 1), "float32")
    for index, digit in enumerate(digits):
        background = backgrounds[random.integers(len(backgrounds))]
        pictures[index] = cut(background, SIDE, random)
        row, column = random.integers(SIDE - digit.shape[0] + 1, size=2)
        place = np.s_[index, row : row + digit.shape[0], column : column + digit.shape[1]]
        # Ink is dark on a bright background, and bright on a dark one.
        colour = random.uniform(0.0, 0.4, size=3).astype("float32")
        if pictures[index].mean() < 0.5:
            colour = 1 - colour
        pictures[place] = digit * colour + (1 - digit) * pictures[place]
        masks[place] = digit > 0.5
    return pictures, masks


def cut(picture, side, random):
    """Returns a random square of `picture`, `(height, width, 3)`."""
    row = random.integers(picture.shape[0] - side + 1)
    column = random.integers(picture.shape[1] - side + 1)
    return picture[row : row + side, column : column + side]
