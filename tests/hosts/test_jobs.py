"""Jobs over several hosts: the weights of one device, and what befalls hosts and the links."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest

from tests.commands.command_line import ROOT, TASKS, tfparallel

from .network import hosts

pytestmark = [pytest.mark.slow]
PORT = 29_555
FLAGS = ["--epochs=4", "--global_batch_size=16", "--seed=3", "--device_type=cpu"]
LONG = ["--epochs=60", "--checkpoint_every_steps=5"]
DEADLINE_SECONDS = 120


def made_or_skipped(stack, number, **options):
    try:
        return stack.enter_context(hosts(number, **options))
    except RuntimeError as error:
        if "root" not in str(error) and "tools" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(name="two")
def two_hosts():
    with contextlib.ExitStack() as stack:
        yield made_or_skipped(stack, 2)


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch):
    """What the launchers of several hosts know each other by."""
    monkeypatch.setenv("TFPARALLEL_JOB_TOKEN", "a-secret-of-the-tests")


class Job:
    """A launcher on each host."""

    def __init__(self, network, launch, train, folder, *, environment=None):
        self._folder, self.launchers = folder, []
        for host, address in enumerate(network.addresses):
            flags = [flag.format(host=host, address=address) for flag in launch]
            train_blobs = [sys.executable, "-m", "tfparallel", "train", TASKS / "blobs.py", *train]
            command = [sys.executable, "-m", "tfparallel", "launch", *flags, "--", *train_blobs]
            with open(self._folder / f"host_{host}", "ab") as output:
                launcher = subprocess.Popen(
                    network.command(host, *command),
                    cwd=ROOT,
                    env=os.environ | (environment or {}),
                    stdout=output,
                    stderr=output,
                )
            self.launchers.append(launcher)

    def said(self, host):
        return (self._folder / f"host_{host}").read_text()

    def wait(self):
        return [each.wait(DEADLINE_SECONDS) for each in self.launchers]

    def until(self, host, pattern):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not re.search(pattern, self.said(host)):
            assert time.monotonic() < deadline, self.said(host)
            assert self.launchers[host].poll() is None, self.said(host)
            time.sleep(0.05)

    def close(self):
        for each in self.launchers:
            each.terminate()
        for each in self.launchers:
            each.wait(DEADLINE_SECONDS)


@pytest.fixture(name="start")
def start_jobs(tmp_path):
    started = []

    def start(network, launch, train, **options):
        job = Job(network, launch, [*FLAGS, "--parallel=data", *train], tmp_path, **options)
        started.append(job)
        return job

    yield start
    for job in started:
        job.close()


@pytest.fixture(name="alone", scope="module")
def trained_alone(tmp_path_factory):
    """By number of epochs, the weights that one device gives."""
    by_epochs = {}

    def weights(epochs):
        if epochs not in by_epochs:
            path = tmp_path_factory.mktemp("alone") / "a.keras"
            code, _, errors = tfparallel(
                "train", TASKS / "blobs.py", *FLAGS, f"--epochs={epochs}", f"--save={path}"
            )
            assert code == 0, errors
            by_epochs[epochs] = keras.models.load_model(path).get_weights()
        return by_epochs[epochs]

    return weights


def meeting(network, number=2):
    return [
        f"--nnodes={number}", "--node_rank={host}", f"--rdzv_endpoint={network.addresses[0]}:{PORT}"
    ]  # fmt: skip


def are_equal(path, weights):
    for expected, weight in zip(weights, keras.models.load_model(path).get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transport", ["tensorflow", "mpi"])
@pytest.mark.parametrize("workers", [1, 2])
def test_hosts_train_to_the_weights_of_one_device(two, start, alone, tmp_path, workers, transport):
    if transport == "mpi":
        pytest.importorskip("mpi4py")
    launch = [*meeting(two), f"--nproc_per_node={workers}", f"--transport={transport}"]
    job = start(two, launch, [f"--save={tmp_path}/a.keras", f"--report={tmp_path}/a.json"])
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    are_equal(tmp_path / "a.keras", alone(4))
    assert json.loads((tmp_path / "a.json").read_text())["num_workers"] == 2 * workers
    counts = [job.said(host).count("is open to other hosts") for host in range(2)]
    assert counts == [1, 0], job.said(0) + job.said(1)


def test_a_proxy_of_the_environment_captures_nothing(two, start, alone, tmp_path):
    proxy = "http://10.78.0.99:3128"
    names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY")
    job = start(
        two, [*meeting(two), "--transport=tensorflow"], [f"--save={tmp_path}/a.keras"],
        environment=dict.fromkeys(names, proxy),
    )  # fmt: skip
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    are_equal(tmp_path / "a.keras", alone(4))


def test_a_host_with_two_addresses_says_which(two, start, alone, tmp_path):
    two.also(1, "10.79.0.1")
    launch = [*meeting(two), "--transport=tensorflow", "--local_addr={address}"]
    job = start(two, launch, [f"--save={tmp_path}/a.keras"])
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    are_equal(tmp_path / "a.keras", alone(4))


@pytest.mark.parametrize("translated", [[1], [0, 1]], ids=["one", "both"])
def test_a_host_behind_a_gateway_that_translates(translated, start, alone, tmp_path):
    """Both know themselves by one and the same private address."""
    with contextlib.ExitStack() as stack:
        network = made_or_skipped(stack, 2, translated=translated)
        launch = [*meeting(network), "--transport=tensorflow", "--local_addr={address}"]
        job = start(network, launch, [f"--save={tmp_path}/a.keras"])
        assert job.wait() == [0, 0], job.said(0) + job.said(1)
        for host in range(2):
            assert ("probably a gateway's" in job.said(host)) == (host in translated)
    are_equal(tmp_path / "a.keras", alone(4))


def test_a_killed_worker_is_started_again(two, start, alone, tmp_path):
    launch = [*meeting(two), "--max_restarts=1"]
    train = [f"--save={tmp_path}/a.keras", f"--checkpoint_dir={tmp_path}/checkpoints"]
    job = start(two, launch, [*train, "--inject=kill:worker=1,step=9"])
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    assert "worker 1 of node 1 was killed by SIGKILL" in job.said(0)
    are_equal(tmp_path / "a.keras", alone(4))


@pytest.fixture
def slow_job(two, start, tmp_path):
    """A job over TensorFlow's transport that is in its third epoch, and takes its time."""
    launch = [*meeting(two), "--transport=tensorflow"]
    train = [*LONG, f"--checkpoint_dir={tmp_path}/c", "--inject=slow:worker=0,ms=50"]
    job = start(two, launch, train)
    job.until(0, "Epoch 3/")
    return job


def test_a_link_that_is_cut_ends_both_sides_and_is_named(two, slow_job):
    job = slow_job
    two.cut(1)
    assert all(code != 0 for code in job.wait())
    for host in (0, 1):
        pattern = r"launcher of node \d is lost|connection to (worker \d|another worker) was lost"
        assert re.search(pattern, job.said(host)), job.said(host)
    assert "connection to worker 1 was lost" in job.said(0)


def test_of_a_link_that_is_cut_one_way_both_sides_say_whom_they_lost(two, slow_job):
    """Story: host 1 blamed worker 0, which had ended since it heard nothing of worker 1."""
    job = slow_job
    two.mute(1)
    assert all(code != 0 for code in job.wait())
    for host in (0, 1):
        assert f"connection to worker {1 - host} was lost" in job.said(host), job.said(host)
        pattern = r"worker (\d)( of node \d)? exited with code 75 .* \(it lost worker (\d), or"
        match = re.search(pattern, job.said(host))
        assert match and {match[1], match[3]} == {"0", "1"}, job.said(host)


def test_a_slow_link_changes_nothing(two, start, alone, tmp_path):
    pytest.importorskip("mpi4py")
    two.limit("100mbit")
    launch = [*meeting(two), "--nproc_per_node=2", "--transport=mpi"]
    job = start(two, launch, [f"--save={tmp_path}/a.keras"])
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    are_equal(tmp_path / "a.keras", alone(4))


def test_no_process_is_left(two, start, tmp_path):
    job = start(two, meeting(two), [*LONG, f"--checkpoint_dir={tmp_path}/c"])
    job.until(0, "Epoch 2/")
    below = [p for each in job.launchers for p in psutil.Process(each.pid).children(True)]
    job.launchers[0].send_signal(signal.SIGTERM)
    job.wait()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive
