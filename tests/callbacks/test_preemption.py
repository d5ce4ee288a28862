"""A program that is told to end saves its state, and says that it should be started again.

Jobs of several workers are in `workers/test_restart.py`.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.callbacks.test_checkpoint import EPOCHS, STEPS, At, X, Y, build
from tests.commands.command_line import ROOT
from tests.comparison import seeded
from tfparallel.callbacks import Checkpoint, Preemption
from tfparallel.callbacks.preemption import Preempted
from tfparallel.cluster.preemption import SIGNALS, SignalWatch


def trained(directory, callbacks=(), **options):
    model = seeded(build)
    model.compile("adam", "mse")
    checkpoint = Checkpoint(directory)
    with Preemption(checkpoint, **options) as preemption:
        model.fit(
            *(X, Y),
            batch_size=8,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, checkpoint, preemption],
        )
    return model, checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_it_ends_with_code_75_and_goes_on_from_there(tmp_path, capsys, number):
    before = {each: signal.getsignal(each) for each in SIGNALS}
    whole, _ = trained(tmp_path / "whole")

    def signal_and_wait():  # A step takes a millisecond, and the thread that hears it may be late.
        os.kill(os.getpid(), number)
        time.sleep(0.5)

    stopping = At(4, signal_and_wait)
    try:
        with pytest.raises(Preempted) as ended:
            trained(tmp_path / "stopped", [stopping])
        assert ended.value.code == 75
        assert {signal.getsignal(each) for each in SIGNALS} == {signal.SIG_IGN}
        # Story: it was that of a closed socket, and then of whatever file had its number.
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    match = re.match(r"stopped by (\w+): (\d) steps are in the checkpoint", capsys.readouterr().out)
    # The thread that hears it may be late by a step.
    done = int(match[2])
    assert match[1] == signal.Signals(number).name and done in (4, 5)
    model, checkpoint = trained(tmp_path / "stopped")
    assert checkpoint.resumed == {"step": done, "epoch": 0, "step_in_epoch": done}
    for expected, weight in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-6)


def test_other_signals_are_left_alone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, [At(2, lambda: os.kill(os.getpid(), signal.SIGINT))])


def test_a_signal_is_heard_while_the_main_thread_is_in_c():
    heard = threading.Event()
    with SignalWatch([signal.SIGUSR1], lambda number: heard.set()):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(10)


ENDS = """
import os, signal, time
from tfparallel.cluster.preemption import SIGNALS, SignalWatch
class Slow:  # As TensorFlow's objects are.
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=SIGNALS):
        for number in numbers: kill(pid, number)
slow = Slow()
with SignalWatch(SIGNALS, print) as watch:
    watch.ignore()
raise SystemExit(75)
"""


def test_once_the_state_is_saved_no_signal_changes_the_exit_code():
    """Story: a second SIGTERM, while TensorFlow ended, and the job was not started again."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, timeout=60)
    assert done.returncode == 75


def test_on_another_thread_nothing_is_watched():
    handlers = []

    def enter():
        with SignalWatch([signal.SIGUSR1], handlers.append):
            handlers.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGUSR1)] and STEPS == 7
