"""What a worker is told."""

import dataclasses
import json

import pytest

from tfparallel.cluster import cgroup
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.environment import available_cores, core_shares
from tfparallel.cluster.launcher.local_workers import worker_environment
from tfparallel.cluster.rendezvous import Rendezvous

MEETING = Rendezvous([["a:1", "a:2"], ["[::1]:3"]], master="[::1]:4", token="secret", node=1)


def test_a_worker_knows_its_place():
    environment = worker_environment(
        {"PATH": "/bin", "RANK": "7", "TF_CONFIG": "{}"}, MEETING, local_rank=0, restart_count=1
    )
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:1", "a:2", "[::1]:3"]},
        "task": {"type": "worker", "index": 2},
    }
    assert {
        "PATH": "/bin",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "4",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TFPARALLEL_RESTART_COUNT": "1",
        "TFPARALLEL_JOB_TOKEN": "secret",
        "OMP_NUM_THREADS": str(len(available_cores())),
        "MALLOC_TOP_PAD_": "268435456",
        "PYTHONUNBUFFERED": "1",
    }.items() <= environment.items()


def test_pods_with_different_numbers_of_workers_are_one_job():
    """The number of pods is no multiple of what a worker sees on its own host."""
    inherited = {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-node-0-0", "PET_NNODES": "2"}
    inherited["PET_MASTER_ADDR"] = "a-node-0-0.a"
    environment = worker_environment(inherited, dataclasses.replace(MEETING, node=0), 1)
    cluster = Cluster.from_env(environment)
    assert (cluster.worker_index, cluster.num_workers, cluster.local_rank) == (1, 3, 1)


def test_more_workers_than_a_variable_can_name_are_refused():
    """The system's own error was "Argument list too long: 'python'"."""
    ports = range(20_000, 20_064)
    addresses = [[f"10.0.{host}.1:{port}" for port in ports] for host in range(145)]
    with pytest.raises(RuntimeError, match="Received: 9280 workers, which need 1.* fewer workers"):
        worker_environment({}, dataclasses.replace(MEETING, addresses=addresses), 0)


def test_threads_stay_within_the_cpu_quota_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    environment = worker_environment({}, MEETING, 0)
    assert environment["OMP_NUM_THREADS"] == environment["TF_NUM_INTRAOP_THREADS"] == "1"


def test_the_users_own_values_are_kept():
    user_values = {"OMP_NUM_THREADS": "5", "MALLOC_MMAP_MAX_": "9", "PYTHONUNBUFFERED": ""}
    assert user_values.items() <= worker_environment(user_values, MEETING, 0).items()


@pytest.mark.parametrize(
    "cores, num_workers, shares",
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 2, 3], 2, [[0], [2]]),
        ([5], 1, [[5]]),
    ],
)
def test_core_shares(cores, num_workers, shares):
    assert core_shares(cores, num_workers) == shares


def test_too_few_cores():
    with pytest.raises(ValueError, match=r"bind 3 workers to 2 cores.*cores \[0, 1\]"):
        core_shares([0, 1], 3)
