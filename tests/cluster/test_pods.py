"""The pods of `launch --emit` as processes: they meet, and survive an eviction and a lost node.

No cluster: each process gets the command and the variables that Kubernetes, JobSet and Kubeflow
Trainer would give to a pod's container, and is restarted as they would.
"""

import contextlib
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.cluster.emitted_files import KINDS, WORKER, expanded, objects_of, pod_of, token_of
from tests.commands.command_line import ROOT, TASKS
from tfparallel.cluster.job_files import JobFile
from tfparallel.cluster.ports import free_ports

pytestmark = pytest.mark.slow
FIRST_POD = {"kubernetes": "train-0.train:29500", "jobset": "train-node-0-0.train:29500"}
TRAIN = [sys.executable, "-m", "tfparallel", "train", str(TASKS / "dropout.py")]
TRAIN += ["--parallel=data", "--epochs=8", "--seed=7", "--global_batch_size=32"]


@contextlib.contextmanager
def pods(job, kind, folder=ROOT):
    """Starts a process for each pod."""
    objects = objects_of(job, kind)
    container, port = pod_of(objects)[1], free_ports(1)[0]
    words, variables, by_trainer = container["command"], container.get("env"), {}
    if kind == "trainjob":
        trainer = objects["TrainJob"]["spec"]["trainer"]
        words, variables = words + trainer["args"], trainer["env"]
        by_trainer = {"PET_NNODES": str(job.nnodes), "PET_NPROC_PER_NODE": "1"}
        by_trainer |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    else:
        # There is no Service here to resolve the name of the first pod.
        assert sum(FIRST_POD[kind] in word for word in words) == 1
        words = [word.replace(FIRST_POD[kind], f"127.0.0.1:{port}") for word in words]
    assert words[:2] == ["tfparallel", "launch"]
    variables = by_trainer | {"TFPARALLEL_JOB_TOKEN": token_of(objects, variables)}
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(job.nnodes):
            of_pod = {"JOB_COMPLETION_INDEX": str(index), "PET_NODE_RANK": str(index)}
            process = subprocess.Popen(
                [sys.executable, "-m", *expanded(words, **by_trainer)],
                cwd=folder,
                env={**os.environ, **variables, **of_pod},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            started.append(process)
        yield started


def ends(processes):
    """The exit codes, and what was shown since."""
    shown = [process.communicate(timeout=150)[0] for process in processes]
    return [process.returncode for process in processes], shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_meet_and_run_the_workers(kind, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "worker.py", "it's one", "$(HOME)", "$$HOME"]
    job = JobFile("train", command, ["--nproc_per_node=2"], nnodes=2, image="i")
    assert len(job.token) == 32
    with pods(job, kind, tmp_path) as started:
        codes, shown = ends(started)
    assert codes == [0, 0], shown
    for worker in range(4):
        line = f"[{worker}] worker {worker} of 4 [\"it's one\", '$(HOME)', '$$HOME']"
        assert line in shown[worker // 2], shown


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.keras"
    job = JobFile("train", [*TRAIN, f"--save={path}"], nnodes=2, image="i")
    with pods(job, "jobset") as started:
        codes, shown = ends(started)
    assert codes == [0, 0], shown
    return keras.models.load_model(path).get_weights()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["evicted", "lost"])
def test_an_evicted_and_a_lost_pod_change_no_weight(signum, tmp_path, undisturbed):
    """Evicted: no pod fails, and the Job replaces both. Lost: the JobSet recreates both."""
    flags = [f"--checkpoint_dir={tmp_path}/ckpt", f"--save={tmp_path}/k.keras"]
    flags += ["--checkpoint_every_steps=1"]
    slow = "--inject=slow:worker=0,ms=100"  # Else it may have ended before.
    job = JobFile("train", [*TRAIN, *flags, slow], nnodes=2, image="i")
    with pods(job, "jobset") as started:
        assert any("Epoch 2/8" in line for line in started[0].stdout)
        started[1].send_signal(signum)
        codes, shown = ends(started)
    if signum == signal.SIGTERM:
        assert codes == [75, 75], shown
    else:
        assert codes[0] not in (0, 2) and codes[1] == -signal.SIGKILL, (codes, shown)
    with pods(JobFile("train", [*TRAIN, *flags], nnodes=2, image="i"), "jobset") as started:
        codes, shown = ends(started)
    assert codes == [0, 0] and "steps are done)" in shown[0], shown
    weights = keras.models.load_model(tmp_path / "k.keras").get_weights()
    for expected, weight in zip(undisturbed, weights, strict=True):
        np.testing.assert_array_equal(weight, expected)
