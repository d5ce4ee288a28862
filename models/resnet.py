"""Classify handwritten digits with a small residual network.

Parallelism: `model`.
Why: skip connections cross the cut; their tensors are sent to the device that reads them.

    tfparallel check models/resnet.py --parallel=model --num_devices=2 --precision=float64
    tfparallel train models/resnet.py --parallel=model --num_devices=4 --epochs=3

The network has three groups of two residual blocks, with 16, 32 and 64 filters of 3x3 and batch
normalization (He et al., 2015, "Deep Residual Learning for Image Recognition", in the order of
2016: normalize, ReLU, convolve). It reads the same digits as `digits_cnn.py`.
"""

import keras
from digits_cnn import data_source, load_digits

FILTERS = (16, 32, 64)
BLOCKS_PER_GROUP = 2


def build_model():
    """Returns a model that outputs logits, one for each digit."""
    inputs = keras.Input((_side(), _side(), 1), name="image")
    x = convolution(FILTERS[0], name="stem")(inputs)
    for group, filters in enumerate(FILTERS, start=1):
        for block in range(1, BLOCKS_PER_GROUP + 1):
            # The first block of each later group halves the picture.
            strides = 2 if group > 1 and block == 1 else 1
            x = residual_block(x, filters, strides, name=f"group{group}_block{block}")
    x = normalized(x, name="last")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(10, name="logits")(x)
    return keras.Model(inputs, outputs, name="resnet")


def residual_block(x, filters, strides, name):
    """Adds what two convolutions make of `x`, `(batch, side, side, channels)`, to it."""
    y = normalized(x, name=f"{name}_first")
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = convolution(filters, 1, strides, name=f"{name}_shortcut")(y)
    y = convolution(filters, strides=strides, name=f"{name}_conv1")(y)
    y = normalized(y, name=f"{name}_second")
    y = convolution(filters, name=f"{name}_conv2")(y)
    return keras.layers.Add(name=f"{name}_add")([shortcut, y])


def normalized(x, name):
    """Normalizes a batch, and cuts what is negative.

    An epoch here is 23 steps, in which averages of the default momentum, 0.99, go nowhere.
    """
    x = keras.layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return keras.layers.ReLU(name=f"{name}_relu")(x)


def convolution(filters, size=3, strides=1, *, name):
    """Returns a convolution without bias: the normalization behind it would take it out again."""
    return keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )


def compile_model(model):
    """Compiles the net with SGD with momentum and cross-entropy on the logits."""
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(images, labels)`."""
    return load_digits(_side())


def _side():
    return 28 if data_source() == "mnist" else 8
