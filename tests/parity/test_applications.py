"""Networks of `keras.applications` in stages: every variable after two steps, in float64."""

import keras
import numpy as np
import pytest

import tfparallel

from . import table
from .case import precision

NETWORKS = ["MobileNetV2", "EfficientNetV2B0", "DenseNet121", "ResNet50"]
DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
# `make parity` and TFPARALLEL_PARITY=all run all of them: two minutes each.
SAMPLE = [("MobileNetV2", 2)]
ALL = [(name, number) for name in NETWORKS for number in (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices"), ALL if table.MODE else SAMPLE)
def test_a_network_in_stages_is_the_network(name, num_devices):
    def build():
        keras.utils.set_random_seed(3)
        network = getattr(keras.applications, name)
        return network(weights=None, input_shape=(32, 32, 3), classes=5)

    images = np.random.default_rng(0).normal(size=(12, 32, 32, 3))
    with precision("float64"):
        trained = []
        for model in (
            build(),
            tfparallel.model_parallel(build, devices=DEVICES[:num_devices], batch_size=6),
        ):
            # Batch normalization of six examples multiplies a rounding error at each step; at
            # this rate two steps leave it what it is.
            optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            model.compile(optimizer, "sparse_categorical_crossentropy")
            model.fit(images, np.arange(12) % 5, batch_size=6, shuffle=False, verbose=0)
            trained.append(model)
    plain, placed = trained
    assert len(set(placed.placement.values())) == num_devices
    for one, other in zip(plain.variables, placed.variables, strict=True):
        largest = max(1e-2, np.abs(one.numpy()).max())
        np.testing.assert_allclose(
            other.numpy(), one.numpy(), rtol=0, atol=1e-12 * largest, err_msg=one.path
        )
