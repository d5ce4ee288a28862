"""Replicas of several devices, shared out to workers: the weights of one device."""

import pathlib

import pytest

from .jobs import JobFailed, run_workers

PROGRAM = pathlib.Path(__file__).with_name("hybrid.py")

pytestmark = pytest.mark.slow

# A replica on each worker, with all cases of the program, and two, with some of them.
SOME = ["stages", "a mask, sparse gradients", "a metric in a layer", "shares", "shares of weights"]
JOBS = {"1": (2, 2, []), "2": (4, 4, SOME)}


@pytest.fixture(name="job", scope="module", params=JOBS)
def run_job(request, tmp_path_factory):
    num_replicas, num_devices, names = JOBS[request.param]
    return run_workers(
        PROGRAM,
        2,
        num_devices=num_devices,
        arguments=[str(tmp_path_factory.mktemp("saved")), names],
        timeout_seconds=600,
        environment={"NUM_REPLICAS": str(num_replicas)},
    )


def test_trains_to_the_weights_of_one_device(job):
    for seen in job:
        for name, apart in seen["apart"].items():
            assert max(apart.values()) < 1e-9, (name, apart)


def test_what_workers_save_at_once_is_whole(job):
    for seen in job:
        saved = [apart["saved"] for apart in seen["apart"].values() if "saved" in apart]
        assert saved and max(saved) == 0


def test_gradients_of_several_batches_are_sent_once(job):
    """Two epochs of three batches: two updates; losses and metrics are a few numbers a batch."""
    for seen in job:
        sent = seen["sent"].get("several batches")
        if sent is not None:
            gradients = 8 * (9 * 4 + 4 * 6 + 6 + 6 * 3 + 3)
            assert 2 * gradients < sent < 2 * gradients + 2000


def test_by_one_seed_of_tensorflows_each_replica_draws_its_own_numbers(job):
    for seen in job:
        drawn = [number for row in seen["drawn"] for number in row]
        assert len(drawn) == 16 == len(set(drawn))


def test_the_layout_names_workers_and_replicas(job):
    lines = job[1]["layout"]
    assert lines == job[0]["layout"]
    assert lines[1].split()[:6] == ["worker", "0", "replica", "0", "stage", "0"]
    assert [line.split()[1] for line in lines if "worker" in line] == sorted(
        line.split()[1] for line in lines if "worker" in line
    )


def test_a_mesh_whose_replicas_the_workers_cannot_share_is_refused():
    program = """
import keras, tfparallel

def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)])

def main():
    tfparallel.hybrid_parallel(build, tfparallel.Mesh(data=3, pipeline=2))
"""
    with pytest.raises(JobFailed, match="must have the same number of replicas"):
        run_workers(program, 2, num_devices=2)




def test_workers_that_cut_the_batch_in_different_ways_are_refused():
    program = """
import keras, numpy as np, tfparallel

def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)])

def main():
    mesh = tfparallel.Mesh(data=2, pipeline=2)
    number = 2 + int(tfparallel.Cluster.from_env().worker_index)
    model = tfparallel.hybrid_parallel(build, mesh, num_micro_batches=number, balance="memory")
    model.compile("sgd", "mse")
    model.fit(np.ones((12, 4)), np.ones((12, 2)), batch_size=12, verbose=0)
"""
    with pytest.raises(JobFailed, match="The workers disagree on what to train.*3 micro-batches"):
        run_workers(program, 2, num_devices=2)
