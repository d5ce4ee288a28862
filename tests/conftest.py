"""Four logical CPU devices and fixed seeds for every test, before TensorFlow runs an op."""

import gc
import os
import pathlib
import random
import signal

# Small thread pools: the tests share their cores with each other and with the
# workers they start. TensorFlow reads both when it starts, in sub-processes too.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
# The tests are of logical CPUs, on a machine with GPUs too: the one device that a form is held
# against must not be a GPU. What is marked `gpu` shows them to a process of its own.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import pytest

import tfparallel

# A shell makes what it starts in the background ignore Ctrl-C, and every process started from
# there with it; the tests of Ctrl-C need one that is heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # As `nohup` has it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Sub-processes find this checkout wherever they run, and start quickly.
TOP = pathlib.Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TOP), str(TOP / "tests" / "quick_start"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

NUM_CPU_DEVICES = 4
SEED = 7

tfparallel.devices.split_cpu(NUM_CPU_DEVICES)

import keras  # noqa: E402  (TensorFlow is loaded by the face, without its chatter)

from tests.nightly import is_nightly  # noqa: E402
from tfparallel.chatter import has_nvidia_gpu  # noqa: E402
from tfparallel.newer_keras import ACTIVITY_IS_SUMMED  # noqa: E402


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


def pytest_collection_modifyitems(items):
    """Marks what is nightly, and skips what is marked `gpu` where the host has none."""
    for item in items:
        if is_nightly(item.nodeid):
            item.add_marker("nightly")
    if has_nvidia_gpu():
        return
    skip = pytest.mark.skip(reason="this machine shows no NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_xdist_make_scheduler(config, log):
    """Called by pytest-xdist, where it runs the tests."""
    from tests.scheduling import BySharedWork

    return BySharedWork(config, log)
