"""Networks of `keras.applications` on devices: every variable after ten float64 steps.

`TFPARALLEL_NETWORKS=all` runs all of them, a minute or two each; `make networks` does.
"""

import functools
import itertools
import os

import keras
import numpy as np
import pytest

import tfparallel
from tfparallel.pipeline.batch_norm import batch_norms, grouped

from .case import precision

# Batch normalization divides a rounding error by the spread of what it normalizes. Pictures of
# 64 x 64 end as 2 x 2, so that a micro-batch of four has 16 numbers a channel, which leave the
# error what it is. Those of 32 x 32 end as one pixel: with 4 numbers a channel, and a rate of 0.01,
# two runs on one device whose pictures differ in the last bit were 0.2 apart after ten steps.
SIZES = {"VGG16": 32, "ConvNeXtTiny": 32, "Xception": 71}
# Sixteen layers without normalization take small pictures to zero. EfficientNet takes pictures of
# 0 to 255: of small ones its first normalization makes noise, and two runs on one device whose
# pictures differ in the last bit are 6e-5 apart after ten steps.
SCALES = {"VGG16": 100.0, "EfficientNetV2B0": 100.0}
# Not ResNet50: of its last bit ten steps on one device make 0.1, at these sizes.
OPTIONS = {"MobileNet": {"alpha": 0.25}}
# On a CPU Keras gives ConvNeXt's grouped convolutions to XLA: a minute and a half a step.
NUM_EPOCHS = {"ConvNeXtTiny": 1}
NETWORKS = [
    "MobileNet", "MobileNetV2", "MobileNetV3Small", "EfficientNetV2B0", "DenseNet121", "VGG16",
    "Xception", "ConvNeXtTiny",
]  # fmt: skip
DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
WHOLE = os.environ.get("TFPARALLEL_NETWORKS") == "all"
NUM_MICRO_BATCHES = 4


def pipeline(build, devices, schedule):
    return tfparallel.pipeline_parallel(
        build,
        devices,
        NUM_MICRO_BATCHES,
        schedule,
        batch_normalization="deferred",
        balance="memory",
    )


FORMS = {
    "model_parallel": functools.partial(tfparallel.model_parallel, batch_size=16),
    "tensor_parallel": tfparallel.tensor_parallel,
    "height": functools.partial(tfparallel.tensor_parallel, convolutions="height"),
    "gpipe": functools.partial(pipeline, schedule="gpipe"),
    "1f1b": functools.partial(pipeline, schedule="1f1b"),
    "interleaved": functools.partial(pipeline, schedule="interleaved"),
}
# Stages compute what one device does, digit by digit. Sums of parts are in another order.
TOLERANCE = dict.fromkeys(FORMS, 1e-9) | {"model_parallel": 1e-12}
ON = dict.fromkeys(FORMS, (2, 4)) | {"height": (2,)}
ALL = [
    (name, num_devices, form)
    for name, form in itertools.product(NETWORKS, FORMS)
    for num_devices in ON[form]
]


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="`make networks` runs these; one is a row of the page")
@pytest.mark.parametrize(("name", "num_devices", "form"), ALL)
def test_a_network_on_devices_is_the_network(name, num_devices, form):
    with precision("float64"):
        build = functools.partial(network, name)
        placed = FORMS[form](build, devices=DEVICES[:num_devices])
        if form in ("tensor_parallel", "height"):
            kinds = {"column", "row"} if form == "tensor_parallel" else {"height"}
            assert kinds <= set(placed.split.values())
        else:
            assert len(set(placed.placement.values())) == num_devices
        moments_of_parts = hasattr(placed, "schedule") and bool(batch_norms(placed))
        actual = train(placed, name)
        expected = on_one_device(name, moments_of_parts)
    for (path, one), (_, other) in zip(expected, actual, strict=True):
        largest = max(1e-2, np.abs(one).max())
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE[form] * largest, err_msg=path)


@functools.lru_cache(2)
def on_one_device(name, moments_of_parts):
    """Plain Keras; of deferred statistics, with layers that normalize the batch in groups."""
    build = functools.partial(network, name)
    return train(grouped(build, NUM_MICRO_BATCHES)() if moments_of_parts else build(), name)


def network(name):
    keras.utils.set_random_seed(3)
    options = {"weights": None, "classes": 5} | OPTIONS.get(name, {})
    size = SIZES.get(name, 64)
    model = getattr(keras.applications, name)(input_shape=(size, size, 3), **options)
    for layer in model.layers:
        if "layer_scale" in layer.name:  # ConvNeXt's blocks begin as a millionth of themselves.
            layer.gamma.assign(np.ones(layer.gamma.shape))
    return model


def train(model, name):
    """Ten steps of 16 examples, if not said otherwise."""
    images = np.random.default_rng(0).normal(size=(32, *model.input_shape[1:]))
    images *= SCALES.get(name, 1.0)
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    epochs = NUM_EPOCHS.get(name, 5)
    model.fit(images, np.arange(32) % 5, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return [(variable.path, variable.numpy()) for variable in model.variables]
