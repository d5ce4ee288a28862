"""Asynchronous training, in real jobs: a chief, workers, servers."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.commands.command_line import ROOT, TASKS
from tests.parts import each_a_part, parts_asked_for
from tfparallel.asynchronous.in_flight import InFlight, least_staleness, steps_ahead

from .program import CASES

PROGRAM = pathlib.Path(__file__).with_name("program.py")
TFPARALLEL = [sys.executable, "-m", "tfparallel"]
TRAIN = [*TFPARALLEL, "train", str(TASKS / "blobs.py"), "--sync=async"]
DEADLINE_SECONDS = 600


def launch(num_workers, *command, num_servers=1):
    flags = [f"--nproc_per_node={num_workers}", f"--num_ps={num_servers}"]
    return [*TFPARALLEL, "launch", *flags, "--", *map(str, command)]


def run(*command):
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(name="results", scope="module")
def run_program(request, tmp_path_factory):
    """One worker, so that nothing is stale."""
    folder = tmp_path_factory.mktemp("asynchronous")
    parts = parts_asked_for(request)
    code, shown, said = run(*launch(1, sys.executable, PROGRAM, folder, *parts))
    assert code == 0, shown + said
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", each_a_part(CASES))
def test_one_worker_is_one_device(results, case):
    """Weights, losses and metrics: those that add up, and one of which the chief sees the rows."""
    assert results[case]["weights"] < 1e-12 and results[case]["logs"] < 1e-12
    assert results[case]["largest staleness"] == 0


@pytest.mark.slow
@pytest.mark.part("a run")
def test_a_run_is_resumed_saved_and_made_of_a_built_model(results):
    assert max(results[name] for name in ("resumed", "built", "in the middle")) < 1e-12
    assert results["saved"] == {"class": "keras.src.models.sequential", "apart": 0}
    assert "the weights are on 1 server" in results["layout"]
    assert (
        results["bytes"]["weights"] == results["bytes"]["gradients"] == 8 * (5 * 16 + 16 + 32 + 2)
    )


@pytest.mark.slow
@pytest.mark.part("refused")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("train_on_batch", "Received: `train_on_batch`"),
        ("own step", "`train_step` of class OwnStep"),
        ("XLA", "Received: jit_compile=True"),
        ("compiled", "Pass the function that builds it"),
        ("beside", "Received: compression='bf16'. Remove it"),
        ("names", "adds 'staleness' to an object of class Named"),
        ("scaled", "must not wrap others. Received: a LossScaleOptimizer"),
    ],
)
def test_unsupported_models_are_refused(results, case, message):
    assert message in results["refused"][case]


@pytest.mark.slow
def test_a_task_is_trained_by_two_workers_and_two_servers(tmp_path):
    report = tmp_path / "report.json"
    train = [*TRAIN, "--epochs=4", "--global_batch_size=16", f"--report={report}"]
    code, shown, said = run(*launch(2, *train, num_servers=2))
    assert code == 0, shown + said
    written = json.loads(report.read_text())
    staleness = written["staleness"]
    assert written["num_servers"] == written["num_workers"] == 2 and written["sync"] == "async"
    assert 0 <= staleness["mean"] <= staleness["largest"] <= staleness["bound"] == 6
    assert staleness["updates"] > 0 and staleness["updates"] % 4 == 0  # Epochs.
    assert written["history"]["loss"][-1] < written["history"]["loss"][0]
    assert written["sent_bytes"]["gradients"] > 0
    assert "[chief] async: " in shown + said


def processes_of(launcher):
    """The job's processes, by the role that their TF_CONFIG names."""
    by_role = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            is_own = "train" in process.cmdline() or str(PROGRAM) in process.cmdline()
        except psutil.Error:
            continue
        if config and is_own and "reaper.py" not in " ".join(process.cmdline()):
            task = config["task"]
            by_role[task["type"], task["index"]] = process
    return by_role


@contextlib.contextmanager
def running_job(*flags):
    """A job of two workers that is training; it is ended, whatever happens."""
    train = [*TRAIN, "--epochs=100", "--global_batch_size=16", *flags]
    launcher = subprocess.Popen(
        launch(2, *train), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    shown = ""
    deadline = time.monotonic() + 120
    try:
        while "Epoch 3/" not in shown:
            assert time.monotonic() < deadline, shown
            line = launcher.stdout.readline()
            assert line, shown
            shown += line
        yield launcher, processes_of(launcher)
    finally:
        launcher.terminate()  # Takes its processes with it.
        launcher.wait()
        launcher.stdout.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_step_in_flight(tmp_path):
    report = tmp_path / "report.json"
    with running_job(f"--report={report}") as (launcher, processes):
        os.kill(processes["worker", 1].pid, signal.SIGKILL)
        rest, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 0, rest
    assert "worker 1 was killed by SIGKILL" in rest and "the job continues with the" in rest
    written = json.loads(report.read_text())
    assert len(written["history"]["loss"]) == 100
    # Each batch is counted once, but for those whose numbers the worker has taken along.
    assert 0 <= -written["staleness"]["updates"] % 100 <= written["staleness"]["bound"]
    assert not any(process.is_running() for process in processes.values())


LOSES_A_WORKER = """
import json, os, pathlib, signal, sys, threading, time
import tfparallel, keras, numpy as np

begun = pathlib.Path(sys.argv[1])
if json.loads(os.environ["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}:
    def end():
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
build = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model = tfparallel.data_parallel(build, sync="async")
model.compile("sgd", "mse")

class Begins(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 100:
            begun.touch()

model.fit(np.ones((3200, 4)), np.ones((3200, 2)), batch_size=4, verbose=0, callbacks=[Begins()])
print("trained, loss below one:", model.evaluate(np.ones((4, 4)), np.ones((4, 2)), verbose=0) < 1)
"""


@pytest.mark.slow
def test_a_program_ends_though_a_worker_was_lost(tmp_path):
    """Without `tfparallel train`: TensorFlow would wait for the worker, when Python ends."""
    program = tmp_path / "program.py"
    program.write_text(LOSES_A_WORKER)
    code, shown, said = run(*launch(2, sys.executable, program, tmp_path / "begun"))
    assert code == 0, shown + said
    assert "worker 1 was killed by SIGKILL" in said
    assert "trained, loss below one: True" in shown


@pytest.mark.slow
def test_a_server_that_is_killed_is_named_and_ends_the_job():
    with running_job() as (launcher, processes):
        os.kill(processes["ps", 0].pid, signal.SIGKILL)
        rest, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode != 0 and "ps 0 was killed by SIGKILL" in rest, rest
    assert not any(process.is_running() for process in processes.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TRAIN, "Start it with `tfparallel launch --nproc_per_node=2 --num_ps=1"),
        ([*TRAIN[:-1], "--sync=async:-1"], "whole numbers of at least 1"),
        ([*TRAIN, "--compression=bf16"], "--compression=bf16 with --sync=async"),
        ([*TRAIN, "--shard=optimizer"], "--shard=optimizer with --sync=async"),
        ([*TRAIN, "--parallel=pipeline"], "Received: --sync=async with --parallel=pipeline"),
        (launch(2, "true", num_servers=0), "--num_ps must be at least 1"),
        ([*TFPARALLEL, "launch", "--num_ps=1", "--nnodes=2", "--", "true"], "on this host"),
    ],
)
def test_flags_that_do_not_fit(arguments, message):
    code, _, said = run(*arguments)
    assert code == 2 and message in said


def test_a_bound_that_workers_cannot_keep_is_refused():
    assert [least_staleness(number) for number in (1, 2, 4)] == [0, 2, 6]
    assert steps_ahead(2, 2) == 1 and steps_ahead(6, 2) == 5 and steps_ahead(0, 1) == 0
    with pytest.raises(ValueError, match="at least 6. Received: sync='async:5'"):
        steps_ahead(5, 4)


class Remote:
    """A step that has ended; keeps the order in which steps are asked for."""

    def __init__(self, number, log):
        self.number, self.log = number, log

    def fetch(self):
        self.log.append(f"end {self.number}")
        return self.number


def test_a_step_begins_once_as_many_have_ended_as_must_have():
    log, taken = [], []
    steps = InFlight(1, lambda result, batch: taken.append((result, batch)))

    def deal(number):
        log.append(f"begin {number}")
        return Remote(number, log)

    for number in range(4):
        steps.begin(deal, number)
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3", "end 2"]
    steps.end_all()
    assert taken == [(number, number) for number in range(4)]
