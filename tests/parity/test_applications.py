"""Networks of `keras.applications` in stages, or split: every variable of two float64 steps."""

import keras
import numpy as np
import pytest

import tfparallel

from . import table
from .case import precision

NETWORKS = ["MobileNetV2", "EfficientNetV2B0", "DenseNet121", "ResNet50"]
DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
# `make parity` and TFPARALLEL_PARITY=all run all of them: two minutes each.
SAMPLE = [("MobileNetV2", 2, "model_parallel")]
# Stages compute what one device does, digit by digit. Sums of parts are in another order, which
# batch normalization of six examples, on pictures of one pixel, multiplies.
TOLERANCE = {"model_parallel": 1e-12, "tensor_parallel": 1e-9}
ALL = [(name, number, form) for form in TOLERANCE for name in NETWORKS for number in (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices", "form"), ALL if table.MODE else SAMPLE)
def test_a_network_on_devices_is_the_network(name, num_devices, form):
    def build():
        keras.utils.set_random_seed(3)
        network = getattr(keras.applications, name)
        return network(weights=None, input_shape=(32, 32, 3), classes=5)

    images = np.random.default_rng(0).normal(size=(12, 32, 32, 3))
    place, options = getattr(tfparallel, form), {"devices": DEVICES[:num_devices]}
    if form == "model_parallel":
        options["batch_size"] = 6
    with precision("float64"):
        trained = []
        for model in (build(), place(build, **options)):
            # Batch normalization of six examples multiplies a rounding error at each step; at
            # this rate two steps leave it what it is.
            optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            model.compile(optimizer, "sparse_categorical_crossentropy")
            model.fit(images, np.arange(12) % 5, batch_size=6, shuffle=False, verbose=0)
            trained.append(model)
    plain, placed = trained
    if form == "model_parallel":
        assert len(set(placed.placement.values())) == num_devices
    else:
        assert {"column", "row", "features"} <= set(placed.split.values())
    for one, other in zip(plain.variables, placed.variables, strict=True):
        largest = max(1e-2, np.abs(one.numpy()).max())
        np.testing.assert_allclose(
            other.numpy(), one.numpy(), rtol=0, atol=TOLERANCE[form] * largest, err_msg=one.path
        )
