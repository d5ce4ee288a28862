"""All-reduce through MPI between real workers: `mpi.py` is what each of them runs."""

import contextlib
import glob
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.cluster.test_worker_rendezvous import name_of_the_loopback
from tests.commands.command_line import ROOT, TASKS
from tfparallel.cluster import pmi
from tfparallel.collectives.mpi import workers

from .jobs import run_workers
from .mpi import CHECKS

PROGRAM = pathlib.Path(__file__).with_name("mpi.py")
MESSAGE = "{same}: call {n}, {first}; worker 1: call {n}, {second}."

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module")
def run_job():
    """What each of three workers saw, by check."""
    return run_workers(PROGRAM, 3, timeout_seconds=150)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "disagreement"])
def test_on_every_worker(job, name):
    for worker, seen in enumerate(job):
        assert seen[name] == "ok", f"worker {worker}:\n{seen[name]}"


def test_workers_of_one_host_share_memory(job):
    assert [seen["transport"] for seen in job] == ["mpi_shared_memory"] * 3


def test_workers_that_disagree_are_named_with_what_they_called(job):
    calls = [
        ("all_reduce(op='sum') of float32 (3,)", "all_reduce(op='sum') of float32 (4,)"),
        ("all_reduce(op='sum') of float32 (3,)", "all_reduce(op='sum') of float64 (3,)"),
        ("all_reduce(op='sum') of float32 (3,)", "all_reduce(op='max') of float32 (3,)"),
    ]
    for seen in job:
        messages = seen["disagreement"]
        assert isinstance(messages, list), messages
        for message, (first, second) in zip(messages, calls * 2, strict=True):
            assert "workers 0 and 2: call" in message and f", {first}; worker 1:" in message
            assert f", {second}. Run the same program" in message


def test_a_worker_that_does_not_come_in_time_is_named(job):
    for worker, seen in enumerate(job):
        expected = "nothing" if worker == 1 else "waited 0.5 s for the other workers"
        assert expected in seen["late"]
    assert "Received: worker 1 did not arrive." in job[0]["late"]


def train(*flags, transport="mpi", **environment):
    command = [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2"]
    command += [f"--transport={transport}"] * (transport is not None)
    command += ["--", sys.executable, "-m", "tfparallel", "train"]
    done = subprocess.run(
        [*command, str(TASKS / "dropout.py"), "--parallel=data", "--epochs=2", *flags],
        cwd=ROOT,
        env={**os.environ, "TFPARALLEL_PROFILES": "none", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout


def test_the_survivor_names_the_worker_that_was_killed():
    before = set(glob.glob("/dev/shm/mpich_shm_*"))
    code, shown = train("--inject=kill:worker=1,step=1")
    assert code == 137, shown
    assert "all-reduce by mpi_shared_memory" in shown
    assert "[0] tfparallel train: The connection to worker 1 was lost" in shown
    assert "worker 1 was killed by SIGKILL" in shown
    assert set(glob.glob("/dev/shm/mpich_shm_*")) <= before  # No memory is left behind.


def test_without_mpi_the_error_says_how_to_get_it(tmp_path):
    """A package without a library stands where mpi4py would."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('No library libmpi.so')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    code, shown = train(PYTHONPATH=path)
    assert code == 1, shown
    lacking = "Received: worker 0: No library libmpi.so; worker 1: No library libmpi.so."
    assert f"{lacking} Install them: pip install 'tfparallel[mpi]'" in shown


@pytest.mark.parametrize(
    ("transport", "expected", "why"),
    [
        (
            None,
            ("mpi_shared_memory", "MPI shared memory, pipelined", "default"),
            "the memory of one host",
        ),
        (
            "tensorflow",
            ("ring_tuned", "TensorFlow CollectiveReduceV2 (RING, in pieces)", "argument"),
            "TFPARALLEL_ALL_REDUCE=tensorflow",
        ),
    ],
)
def test_workers_of_one_host_sum_through_its_memory_unless_told_otherwise(
    tmp_path, transport, expected, why
):
    report = tmp_path / "report.json"
    code, shown = train(f"--report={report}", transport=transport)
    assert code == 0, shown
    choice = json.loads(report.read_text())["all_reduce"]
    assert (choice["algorithm"], choice["implementation"], choice["source"]) == expected
    assert why in choice["why"]


def test_auto_takes_what_was_fastest_when_fit_began(tmp_path):
    report = tmp_path / "report.json"
    code, shown = train("--all_reduce=auto", f"--report={report}", transport=None)
    assert code == 0, shown
    assert "all-reduce by auto" in shown
    choice = json.loads(report.read_text())["all_reduce"]
    assert set(choice["microseconds"]) == {"ring_tuned", "mpi"}
    assert choice["source"] == "calibration" and "on 2 workers" in choice["why"]
    # On the chief alone.
    taken = "data_parallel: 2 workers x 1 device (CPU:0); gradients: all-reduce, chosen by a "
    assert shown.count(f"{taken}measurement when training begins.") == 1, shown
    assert shown.count(f"all-reduce: {choice['algorithm']} ({choice['implementation']}); ") == 1


ONE_WITHOUT_LIBRARY = """
import json
import os
import pathlib
import sys
import tempfile

folder = tempfile.TemporaryDirectory()
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    package = pathlib.Path(folder.name, "mpi4py")
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('No library libmpi.so')")
    sys.path.insert(0, folder.name)
os.environ["TFPARALLEL_PROFILES"] = folder.name

import tensorflow as tf

import tfparallel
from tfparallel.collectives import profile, transport_selection

def main():
    group = tfparallel.MultiWorkerMirroredStrategy().workers
    choices = [transport_selection.TransportChoice(group).choose(1000)]
    names = transport_selection.names_of(group)
    if group.worker_index == 0:
        profile.save(names, {"ring_tuned": [(1000, 2e-3)], "mpi": [(1000, 1e-3)]})
    choices.append(transport_selection.TransportChoice(group).choose(1000))
    rank = [tf.constant(1.0 + group.worker_index)]
    sums = [float(one.workers.all_reduce(rank)[0]) for one in choices]
    by_default = transport_selection.by_default(group).choice
    return [one.as_json() for one in (by_default, *(one.choice for one in choices))], sums
"""


def test_auto_and_the_default_go_on_where_one_worker_has_no_library():
    for (default, calibrated, profiled), sums in run_workers(ONE_WITHOUT_LIBRARY, 2):
        assert (default["algorithm"], default["source"]) == ("ring_tuned", "default")
        assert default["why"] == "one host, without MPI: pip install 'tfparallel[mpi]'"
        assert (calibrated["algorithm"], calibrated["source"]) == ("ring_tuned", "calibration")
        assert set(calibrated["microseconds"]) == {"ring_tuned"}
        assert (profiled["algorithm"], profiled["source"]) == ("ring_tuned", "default")
        assert "mpi failed to start" in profiled["why"]
        assert sums == [3.0, 3.0]


TWO_HOSTS = """
import os
import tensorflow as tf
import tfparallel
from tfparallel.collectives import transport_selection
from tfparallel.collectives.mpi import workers

def main():
    workers._memory_name = lambda: os.environ["RANK"]  # Each on a host of its own, it says.
    group = tfparallel.MultiWorkerMirroredStrategy(all_reduce="mpi").workers
    by_default = transport_selection.by_default(group.by_tensorflow).choice
    sums = [group.all_reduce([tf.ones([size])])[0] for size in (1, 100, 300_000)]
    try:
        group.communicator.use("mpi_shared_memory")
    except ValueError as error:
        by_default = [by_default.algorithm, by_default.why]
        return [by_default, group.transport, [float(y[-1]) for y in sums], str(error)]
"""


def test_workers_of_several_hosts_take_the_librarys_own_way():
    for default, transport, sums, refusal in run_workers(TWO_HOSTS, 2):
        assert default == ["ring_tuned", "the workers are on several hosts"]
        assert (transport, sums) == ("mpi_library", [2.0, 2.0, 2.0])
        assert "Received: 2 workers that do not all share memory." in refusal


@pytest.mark.parametrize(("hosts", "is_reached"), [(["a", "b"], True), (["a", "a"], False)])
def test_workers_of_other_hosts_reach_worker_0_that_knows_its_own_name_as_a_loopback(
    hosts, is_reached
):
    server = workers._serve(name_of_the_loopback(), hosts, "secret")
    try:
        with contextlib.nullcontext() if is_reached else pytest.raises(OSError):
            pmi.connect(("127.0.0.2", server.port), "secret", 1, "watch", 1.0).close()
    finally:
        server.close()


ONE_ENDS = """
import os
import time

import tensorflow as tf
import tfparallel

def main():
    workers = tfparallel.MultiWorkerMirroredStrategy(all_reduce="mpi").workers
    group = tfparallel.new_group([0, 1])
    if workers.worker_index == 2:
        return None
    deadline = time.monotonic() + 20
    while not workers.communicator._waiting._lost() and time.monotonic() < deadline:
        time.sleep(0.05)
    rows = tf.ones([300_000])
    (total,) = tfparallel.all_reduce([rows], group=group)
    try:
        workers.all_reduce([rows])
    except RuntimeError as error:
        return float(total[-1]), str(error)
"""


def test_a_group_goes_on_after_the_end_of_a_worker_outside_of_it():
    *members, outside = run_workers(ONE_ENDS, 3)
    assert outside is None
    for total, error in members:
        assert total == 2.0
        assert "The connection to worker 2 was lost" in error


ALONE = """
import mpi4py.MPI  # Starts MPI in each worker alone, as Open MPI does without its mpiexec.
import tensorflow as tf
import tfparallel

def main():
    try:
        workers = tfparallel.MultiWorkerMirroredStrategy(all_reduce="mpi").workers
    except RuntimeError as error:
        return str(error)
    return float(workers.all_reduce([tf.ones([1])])[0][0])
"""


def test_an_mpi_that_connects_fewer_processes_than_the_job_has_workers_is_refused():
    """Story: each worker was alone, and an error about shapes was all that it said."""
    before = set(glob.glob("/dev/shm/mpich_shm_*"))
    for worker, error in enumerate(run_workers(ALONE, 2)):
        assert "MPI connects 1 processes, but the job has 2 workers." in str(error)
        assert f"Received: worker {worker}, with MPICH Version: " in error
    assert set(glob.glob("/dev/shm/mpich_shm_*")) <= before  # No memory is left behind.
