"""`Cluster.device_environment`: which GPUs each of several workers on a host sees."""

import os

import pytest

from tfparallel import Cluster
from tfparallel.cluster.gpu_binding import BOUND


def visible(environ, local_rank=1, num_local_workers=2):
    cluster = Cluster(local_rank=local_rank, num_local_workers=num_local_workers)
    return cluster.device_environment(environ).get("CUDA_VISIBLE_DEVICES")


def test_one_task_a_node_sees_every_gpu():
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 0, 1) is None
    assert visible({"SLURM_GPUS_ON_NODE": "4"}, 0, 1) is None


def test_one_task_a_gpu_sees_its_own():
    # Slurm gives every task of the node the whole list.
    listed = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [visible(listed, rank, 4) for rank in range(4)] == ["4", "5", "6", "7"]
    counted = {"SLURM_GPUS_ON_NODE": "2"}
    assert [visible(counted, rank, 2) for rank in range(2)] == ["0", "1"]
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-8a, GPU-9b"}) == "GPU-9b"


def test_more_gpus_than_tasks_are_dealt_out_in_blocks():
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == "2,3"


@pytest.mark.parametrize(
    "bound",
    [
        {"SLURM_GPU_BIND": "single:1"},
        {"SLURM_GPU_BIND": "verbose,closest"},
        {"SLURM_GPUS_PER_TASK": "2"},
        {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=2"},
    ],
)
def test_what_slurm_has_bound_is_left_alone(bound):
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1", **bound}) is None


def test_what_ray_has_bound_is_left_alone():
    """Each of two actors on a node sees two GPUs, its own."""
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1"}) == "1"
    assert visible({"CUDA_VISIBLE_DEVICES": "0,1", BOUND: "1"}) is None


def test_a_single_visible_gpu_is_this_workers_own_or_shared():
    """Story: the first of two workers on one GPU took all of its memory."""
    assert visible({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}) is None
    cluster = Cluster(local_rank=1, num_local_workers=2)
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    assert cluster.device_environment(one) == {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert cluster.device_environment({**one, "TF_FORCE_GPU_ALLOW_GROWTH": "false"}) == {}
    with pytest.raises(ValueError, match=r"cannot share 1 GPU equally.*Start 1 worker per host"):
        cluster.device_environment({"SLURM_GPUS_ON_NODE": "1"})


def test_binding_may_be_turned_off():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}
    assert visible(environ) == "1"


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_stay_hidden(hidden):
    environ = {"CUDA_VISIBLE_DEVICES": hidden, "SLURM_GPUS_ON_NODE": "4"}
    assert visible(environ) is None


def test_unequal_shares_are_refused():
    with pytest.raises(ValueError) as caught:
        visible({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    message = str(caught.value)
    assert message.startswith("2 workers on one host cannot share 3 GPUs equally")
    assert "Received: CUDA_VISIBLE_DEVICES='0,1,2'." in message
    with pytest.raises(ValueError, match="4 workers on one host cannot share 2 GPUs"):
        visible({"SLURM_GPUS_ON_NODE": "2"}, 0, 4)


def test_nothing_is_set(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cluster = Cluster(local_rank=1, num_local_workers=2)
    assert cluster.device_environment() == {"CUDA_VISIBLE_DEVICES": "1"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
