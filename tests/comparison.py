"""How the tests of every form compare a model with the same one on one device."""

import sys

import keras
import numpy as np

from tests.commands.command_line import ROOT

SEED = 3


def seeded(build):
    """Builds a model with the weights that it has in every form."""
    keras.utils.set_random_seed(SEED)
    return build()


def state_of(model):
    """Returns the values of all variables, the optimizer's after the model's."""
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_equal(actual, expected, rtol=1e-12, atol=1e-14):
    """Compares two pairs of a history and of arrays."""
    for name in expected[0]:
        np.testing.assert_allclose(actual[0][name], expected[0][name], rtol=rtol, err_msg=name)
    for value, expected_value in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=rtol, atol=atol)


def weights_of(path):
    """Reads a saved transformer, whose class only its task file knows: by running that."""
    sys.path.insert(0, str(ROOT / "models"))
    try:
        __import__("transformer")
    finally:
        sys.path.pop(0)
    return keras.models.load_model(path).get_weights()
