"""What each process of the tests needs first: few threads, no GPU, a checkout that is found."""

import importlib
import os
import pathlib
import signal

from hypothesis import HealthCheck, settings

# That a machine is slow is no fault of a test.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")

# Small thread pools: the tests share their cores with each other and with the
# workers they start. TensorFlow reads both when it starts, in sub-processes too.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "2")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
# XLA keeps some hundred maps of memory for each program on a CPU, and a process has 65,530 of them:
# without this a process that compiles a hundred models ends itself.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
# The tests are of logical CPUs, on a machine with GPUs too: the one device that a form is held
# against must not be a GPU. What is marked `gpu` shows them to a process of its own.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

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

pytest_plugins = ["tests.suites"]


def pytest_configure(config):
    """Loads TensorFlow, but for the process of `pytest -n` that only hands out tests."""
    if not getattr(config.option, "numprocesses", None):
        plugin = importlib.import_module("tests.with_tensorflow")
        config.pluginmanager.register(plugin, "with_tensorflow")


def pytest_xdist_make_scheduler(config, log):
    """Called by pytest-xdist, where it runs the tests."""
    from tests.scheduling import BySharedWork

    return BySharedWork(config, log)
