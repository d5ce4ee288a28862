"""Four logical CPU devices and fixed seeds for every test, before TensorFlow runs an op.

A plugin of pytest, for the processes that run tests.
"""

import gc
import random

import numpy as np
import pytest

import tfparallel

NUM_CPU_DEVICES = 4
SEED = 7

tfparallel.devices.split_cpu(NUM_CPU_DEVICES)

import keras  # noqa: E402  (TensorFlow is loaded by the face, without its chatter)

from tests import forked  # noqa: E402
from tfparallel.chatter import has_nvidia_gpu  # noqa: E402
from tfparallel.keras_compat import ACTIVITY_IS_SUMMED  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Seeds Python, NumPy and TensorFlow, and drops Keras's global state afterwards.

    `clear_session` collects what the test left behind. What is there still stays, as a rule: the
    collector need not look at it again after each of the tests to come.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    keras.utils.set_random_seed(SEED)
    yield
    keras.backend.clear_session()
    gc.freeze()


# Of `keras.optimizers`, and not in each Keras that tfparallel runs on.
NEWER_OPTIMIZERS = {"MultiOptimizer", "OptimizerMap", "ScheduleFreeAdamW"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips what this Keras has not, or has otherwise."""
    try:
        return (yield)
    except AttributeError as error:
        if error.name in NEWER_OPTIMIZERS and not hasattr(keras.optimizers, error.name):
            pytest.skip(f"Keras {keras.__version__} has no {error.name}")
        raise
    except ValueError as error:
        if ACTIVITY_IS_SUMMED and "sums an activity regularizer" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def in_float64():
    """Makes float64 what Keras takes where nothing else is said."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # Which Keras keeps once somebody has asked for it.
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def pytest_collection_finish():
    """Has Python's collector leave alone what the imports made, and look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Has the programs of a test start anew, if it says so."""
    forked.starts_afresh(item.get_closest_marker("fresh_interpreter") is not None)


def pytest_collection_modifyitems(items):
    """Skips what is marked `gpu` where the host has none."""
    if has_nvidia_gpu():
        return
    skip = pytest.mark.skip(reason="this machine shows no NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # A folder of that name is a keyword, too.
            item.add_marker(skip)
