"""Faults strike where they are asked to, once."""

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.commands.command_line import ROOT
from tfparallel.diagnostics.inject import Inject

PROGRAM = """
import sys
import keras, numpy as np
from tfparallel.diagnostics.inject import Inject
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
x = np.ones((12, 2))
model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Inject(sys.argv[1])])
print("done", int(model.optimizer.iterations), flush=True)
"""


def start(fault, restart_count=None):
    environment = {k: v for k, v in os.environ.items() if k != "TFPARALLEL_RESTART_COUNT"}
    if restart_count is not None:
        environment["TFPARALLEL_RESTART_COUNT"] = str(restart_count)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, fault],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, returncode, words",
    [
        ("kill:worker=0,step=4", -signal.SIGKILL, "worker 0 kills itself after 4 steps"),
        ("exit:worker=0,step=8,code=5", 5, "worker 0 exits with 5 after 8 steps"),
    ],
)
def test_a_fault_strikes_in_the_first_attempt_alone(fault, returncode, words):
    struck, restarted = start(fault, restart_count=0), start(fault, restart_count=1)
    shown, errors = struck.communicate(timeout=100)
    assert struck.returncode == returncode, errors
    assert words in shown and "done" not in shown
    shown, errors = restarted.communicate(timeout=100)
    assert (restarted.returncode, shown) == (0, "done 9\n"), errors


@pytest.mark.slow
def test_a_worker_that_hangs_lives():
    hanging = start("hang:worker=0,step=0")
    try:
        assert hanging.stdout.readline() == "inject: worker 0 hangs after 0 steps\n"
        time.sleep(1)
        assert hanging.poll() is None
    finally:
        hanging.kill()
        hanging.communicate(timeout=30)


def fit(fault):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((8, 2))
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Inject(fault)])


@pytest.mark.slow
def test_a_slow_worker_is_slow():
    begin = time.perf_counter()
    fit("slow:worker=0,ms=300")
    assert time.perf_counter() - begin > 0.6


def test_a_worker_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="job's 1 worker, numbered from 0.*kill:worker=1,step=20"):
        fit("kill:worker=1,step=20")
