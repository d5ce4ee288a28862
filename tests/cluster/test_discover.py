"""`Cluster.from_env`: each launcher, what it leaves open, and launchers that disagree."""

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel import Cluster
from tfparallel.cluster.launcher_env import without_counts

DEADLINE_SECONDS = 60


def refusal(environ):
    with pytest.raises(ValueError) as caught:
        Cluster.from_env(environ)
    message = str(caught.value)
    assert "Received: " in message
    return message


def tf_config(num_workers, index, **jobs):
    workers = [f"host{rank}:2222" for rank in range(num_workers)]
    cluster = {"worker": workers, **jobs}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def torchrun(rank, size, local_rank=None, num_local=None):
    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "host", "MASTER_PORT": 29500}
    if num_local is not None:
        variables |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": num_local}
    return {name: str(value) for name, value in variables.items()}


def open_mpi(rank, size, local_rank, num_local):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(num_local),
        "PMIX_NAMESPACE": "prterun-host-4711@1",
    }


def srun(rank, nodes="node[01-02]", tasks="2(x2)", place=None, job=1234, size=4, **more):
    """The variables of task `rank`, on the node and with the local id in `place`."""
    node, local = place or divmod(rank, 2)
    variables = {
        # The job may be larger than the step.
        "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[01-09]", "SLURM_NTASKS": 18,
        "SLURM_TASKS_PER_NODE": "2(x9)", "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": rank,
        "SLURM_NODEID": node, "SLURM_LOCALID": local, **more,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def pod(index, num_workers=3, **more):
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "HOSTNAME": f"train-digits-{index}",
        "TFPARALLEL_NUM_WORKERS": str(num_workers),
        "TFPARALLEL_SERVICE": "workers",
        **more,
    }


def test_nothing_is_a_single_process():
    cluster = Cluster.from_env({})
    assert cluster == Cluster()
    assert (cluster.source, cluster.num_workers, cluster.is_chief) == ("none", 1, True)
    assert Cluster.from_env({"TF_CONFIG": "", "WORLD_SIZE": " ", "PATH": "/bin"}) == Cluster()
    # A launcher of one process; an unrelated RANK.
    assert Cluster.from_env(torchrun(0, 1, 0, 1)) == Cluster()
    assert Cluster.from_env({"RANK": "first"}) == Cluster()
    assert Cluster.from_env(srun(0, "node01", "1", size=1)) == Cluster()


def test_the_processes_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(3, 2)["TF_CONFIG"])
    assert Cluster.from_env().worker_index == 2


def test_tf_config():
    cluster = Cluster.from_env(tf_config(2, 1))
    assert (cluster.workers, cluster.worker_index) == (("host0:2222", "host1:2222"), 1)
    assert cluster.source == "TF_CONFIG"
    assert "TF_CONFIG cannot be used" in refusal({"TF_CONFIG": "{"})


def test_torchrun_on_one_host():
    clusters = [Cluster.from_env(torchrun(rank, 3, rank, 3)) for rank in range(3)]
    assert [cluster.worker_index for cluster in clusters] == [0, 1, 2]
    assert [cluster.local_rank for cluster in clusters] == [0, 1, 2]
    assert {cluster.workers for cluster in clusters} == {
        ("127.0.0.1:29501", "127.0.0.1:29502", "127.0.0.1:29503")
    }
    assert {(each.num_local_workers, each.source) for each in clusters} == {(3, "torchrun")}
    moved = Cluster.from_env({**torchrun(1, 3, 1, 3), "TFPARALLEL_PORT": "4000"})
    assert moved.address == "127.0.0.1:4001"


def test_torchrun_on_several_hosts_needs_addresses():
    several = torchrun(3, 4, 1, 2)
    message = refusal(several)
    assert "torchrun starts 4 workers, 2 of them on this host, but does not say where" in message
    assert 'Set TFPARALLEL_WORKERS="host1:port,host2:port"' in message
    assert "an unknown number of them" in refusal(torchrun(3, 4))
    named = {"TFPARALLEL_WORKERS": "a:1, a:2, b:1, b:2"}
    cluster = Cluster.from_env({**several, **named})
    assert cluster.workers == ("a:1", "a:2", "b:1", "b:2")
    assert (cluster.address, cluster.local_rank, cluster.num_local_workers) == ("b:2", 1, 2)
    # Without LOCAL_RANK the hosts' names tell.
    assert Cluster.from_env({**torchrun(3, 4), **named}) == cluster


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "3"}, "RANK must be a whole number from 0 to 2, not '3'"),
        ({"RANK": ""}, "RANK is missing"),
        ({"RANK": "-1"}, "not '-1'"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE must be a whole number from 1 up, not 'x'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK must be a whole number from 0 to 2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE must be a whole number from 1 to 3"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is missing"),
        ({"MASTER_PORT": "65534"}, "3 ports from 65535 on are needed"),
        ({"TFPARALLEL_PORT": "0"}, "TFPARALLEL_PORT must be a whole number from 1 to 65535"),
    ],
)
def test_what_torchrun_never_sets(changed, words):
    assert words in refusal({**torchrun(0, 3, 0, 3), **changed})


def test_open_mpi_on_one_host():
    clusters = [Cluster.from_env(open_mpi(rank, 2, rank, 2)) for rank in range(2)]
    assert clusters[0].workers == clusters[1].workers
    assert [cluster.local_rank for cluster in clusters] == [0, 1]
    assert {cluster.source for cluster in clusters} == {"MPI"}
    assert all(address.startswith("127.0.0.1:") for address in clusters[0].workers)
    other_job = {**open_mpi(0, 2, 0, 2), "PMIX_NAMESPACE": "prterun-host-4712@1"}
    assert Cluster.from_env(other_job).workers != clusters[0].workers


def test_mpi_on_several_hosts_needs_addresses():
    assert "MPI starts 4 workers, 2 of them on this host" in refusal(open_mpi(2, 4, 0, 2))
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert "MPI starts 2 workers, 1 of them on this host" in refusal(hydra)
    cluster = Cluster.from_env({**hydra, "TFPARALLEL_WORKERS": "a:1,b:1"})
    assert (cluster.address, cluster.source) == ("b:1", "MPI")
    message = refusal({"PMI_SIZE": "2", "PMI_RANK": "2"})
    assert "PMI_RANK must be a whole number from 0 to 1, not '2'" in message


@pytest.mark.skipif(not shutil.which("mpiexec"), reason="there is no mpiexec on PATH")
def test_a_real_mpiexec():
    program = (
        "from tfparallel import Cluster; c = Cluster.from_env()\n"
        "print(c.source, c.worker_index, c.local_rank, c.num_workers, c.address, flush=True)"
    )
    finished = subprocess.run(
        ["mpiexec", "-n", "2", sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    lines = sorted(line.split() for line in finished.stdout.splitlines())
    assert [line[:4] for line in lines] == [["MPI", "0", "0", "2"], ["MPI", "1", "1", "2"]]
    ports = [int(line[4].removeprefix("127.0.0.1:")) for line in lines]
    assert ports[1] == ports[0] + 1


def test_slurm_one_task_a_gpu():
    clusters = [Cluster.from_env(srun(rank)) for rank in range(4)]
    assert len({cluster.workers for cluster in clusters}) == 1
    base = 13_000 + 1234 * 2
    assert clusters[0].workers == (
        f"node01:{base}", f"node01:{base + 1}", f"node02:{base}", f"node02:{base + 1}"
    )  # fmt: skip
    assert [cluster.worker_index for cluster in clusters] == [0, 1, 2, 3]
    assert [cluster.local_rank for cluster in clusters] == [0, 1, 0, 1]
    assert {(each.num_local_workers, each.source) for each in clusters} == {(2, "Slurm")}
    assert Cluster.from_env(srun(0, job=1235)).workers != clusters[0].workers
    assert Cluster.from_env(srun(0, SLURM_STEP_ID=1)).workers != clusters[0].workers
    moved = Cluster.from_env({**srun(3), "TFPARALLEL_PORT": "5000"})
    assert moved.address == "node02:5001"


def test_slurm_one_task_a_node():
    clusters = [
        Cluster.from_env(srun(rank, "n[08-10]", "1(x3)", place=(rank, 0), size=3))
        for rank in range(3)
    ]
    assert len({cluster.workers for cluster in clusters}) == 1
    assert [address.split(":")[0] for address in clusters[0].workers] == ["n08", "n09", "n10"]
    assert {cluster.num_local_workers for cluster in clusters} == {1}


def test_slurm_deals_tasks_out_in_rounds():
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    clusters = [
        Cluster.from_env(
            srun(rank, "a,b,c", "2,1,2", place, size=5, SLURM_DISTRIBUTION="cyclic")
        )
        for rank, place in enumerate(places)
    ]
    assert len({cluster.workers for cluster in clusters}) == 1
    assert [address[0] for address in clusters[0].workers] == ["a", "b", "c", "a", "c"]
    # The same places, without the variable that explains them.
    message = refusal(srun(1, "a,b,c", "2,1,2", (1, 0), size=5))
    assert "task 1 should be number 1 on node 0 of the step, but is number 0 on node 1" in message
    assert "--distribution must be block or cyclic" in message
    message = refusal(srun(1, SLURM_DISTRIBUTION="arbitrary"))
    assert "--distribution=arbitrary" in message
    named = {"TFPARALLEL_WORKERS": "a:1,b:1,a:2,b:2"}
    cluster = Cluster.from_env({**srun(1, SLURM_DISTRIBUTION="arbitrary"), **named})
    assert (cluster.address, cluster.local_rank) == ("b:1", 1)


def test_a_batch_script_is_no_task():
    """Its shell has rank 0 and the job's size, and yet runs alone."""
    script = {name: value for name, value in srun(0).items() if "STEP" not in name}
    assert script["SLURM_NTASKS"] == "18"
    assert script["SLURM_PROCID"] == "0"
    assert Cluster.from_env(script) == Cluster()
    # The shell of `salloc` is a step of one task, with the size of the job around it.
    shell = srun(0, "node01", "1", size=1, SLURM_STEP_ID=0xFFFFFFFA)
    assert Cluster.from_env(shell) == Cluster()
    assert Cluster.from_env({**shell, "SLURM_STEP_ID": "3"}) == Cluster()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_STEP_NODELIST": "node[01-"}, "SLURM_STEP_NODELIST is not a node list"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST is missing"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE cannot be read"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "the step has 4 tasks and 2 nodes, but its task"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID must be a whole number from 0 to 3, not '4'"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is missing"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID must be less than the node's 2 tasks"),
    ],
)
def test_what_slurm_never_sets(changed, words):
    assert words in refusal({**srun(0), **changed})


def test_several_mistakes_come_in_one_error():
    message = refusal({**srun(0), "SLURM_PROCID": "x", "SLURM_JOB_ID": "", "SLURM_LOCALID": "y"})
    assert message.count("\n  - ") == 3


def test_kubernetes():
    clusters = [Cluster.from_env(pod(index)) for index in range(3)]
    assert len({cluster.workers for cluster in clusters}) == 1
    assert clusters[2].workers[1] == "train-digits-1.workers:13000"
    assert [cluster.worker_index for cluster in clusters] == [0, 1, 2]
    assert {(each.num_local_workers, each.source) for each in clusters} == {(1, "Kubernetes")}
    assert Cluster.from_env(pod(0, TFPARALLEL_PORT="99")).address == "train-digits-0.workers:99"
    # Pods that each train a model of their own say so.
    assert Cluster.from_env(pod(2, num_workers=1)) == Cluster()


def train_job(index, num_pods=3):
    """What Kubeflow Trainer tells a pod under a runtime with the policy `torch`."""
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "HOSTNAME": f"digits-node-0-{index}",
        "PET_NNODES": str(num_pods),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "digits-node-0-0.digits",
        "PET_MASTER_PORT": "29500",
    }


def test_a_pod_of_a_train_job_is_a_worker():
    clusters = [Cluster.from_env(train_job(index)) for index in range(3)]
    assert [cluster.worker_index for cluster in clusters] == [0, 1, 2]
    assert {cluster.workers for cluster in clusters} == {
        tuple(f"digits-node-0-{index}.digits:13000" for index in range(3))
    }
    assert Cluster.from_env(train_job(0, num_pods=1)) == Cluster()


def test_launchers_in_the_pods_of_a_train_job_count_their_own_workers():
    launched = {**torchrun(3, 4, 1, 2), "GROUP_WORLD_SIZE": "2", **tf_config(4, 3)}
    cluster = Cluster.from_env({**train_job(1, num_pods=2), **launched})
    assert (cluster.worker_index, cluster.num_workers, cluster.source) == (3, 4, "TF_CONFIG")
    stale = refusal({**train_job(1), **launched})
    assert "Kubernetes says worker 1 of 3" in stale
    assert "PET_NNODES" not in without_counts(train_job(1))


@pytest.mark.parametrize("index", range(2))
def test_a_worker_of_a_tf_job(index):
    """TF_CONFIG as Kubeflow's training operator writes it; Kubernetes sets no index there."""
    workers = [f"digits-worker-{k}.team.svc:2222" for k in range(2)]
    config = {
        "cluster": {"chief": ["digits-chief-0.team.svc:2222"], "worker": workers},
        "task": {"type": "worker", "index": index},
        "environment": "cloud",
    }
    cluster = Cluster.from_env({"TF_CONFIG": json.dumps(config)})
    assert (cluster.num_workers, cluster.worker_index) == (3, index + 1)
    assert cluster.address == workers[index]
    # The operator does not list the evaluator.
    config["task"] = {"type": "evaluator", "index": 0}
    assert Cluster.from_env({"TF_CONFIG": json.dumps(config)}).is_evaluator


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"TFPARALLEL_NUM_WORKERS": ""}, "TFPARALLEL_NUM_WORKERS is missing"),
        ({"TFPARALLEL_SERVICE": ""}, "TFPARALLEL_SERVICE is missing"),
        ({"HOSTNAME": "ip-10-0-0-7"}, "HOSTNAME must be the Job's name and the pod's index, as in"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX must be a whole number from 0 to 2"),
    ],
)
def test_what_a_pod_must_be_told(changed, words):
    message = refusal({**pod(0), **changed})
    assert words in message
    assert "Set TFPARALLEL_NUM_WORKERS to the Job's completions and TFPARALLEL_SERVICE" in message


def test_addresses_without_a_rank():
    message = refusal({"TFPARALLEL_WORKERS": "a:1,b:1"})
    assert "TFPARALLEL_WORKERS name several workers, but not which one" in message
    assert "TFPARALLEL_NUM_WORKERS name" in refusal({"TFPARALLEL_NUM_WORKERS": "2"})
    assert Cluster.from_env({"TFPARALLEL_WORKERS": "a:1"}) == Cluster()


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("a:1", "it names 1 workers, but torchrun says 2"),
        ("a:1,b", "TFPARALLEL_WORKERS[1], 'b', is not a valid address: it has no port"),
        ("a:1,a:1", "TFPARALLEL_WORKERS[1] and TFPARALLEL_WORKERS[0] have the same address"),
        ("a:1,", "TFPARALLEL_WORKERS[1], '', is not a valid address"),
    ],
)
def test_wrong_addresses(named, words):
    assert words in refusal({**torchrun(0, 2, 0, 2), "TFPARALLEL_WORKERS": named})


def test_tf_config_goes_before_those_that_agree():
    launched = {**tf_config(2, 1), **torchrun(1, 2, 1, 2)}
    cluster = Cluster.from_env(launched)
    assert (cluster.workers, cluster.source) == (("host0:2222", "host1:2222"), "TF_CONFIG")
    # The launcher knows better than two names of one host.
    assert (cluster.local_rank, cluster.num_local_workers) == (1, 2)
    by_slurm = Cluster.from_env({**tf_config(4, 3), **srun(3)})
    assert (by_slurm.address, by_slurm.local_rank) == ("host3:2222", 1)
    message = refusal({**tf_config(2, 1), "TFPARALLEL_WORKERS": "host0:2222,other:2222"})
    assert "its addresses differ from those in TF_CONFIG" in message


def test_slurm_knows_the_hosts_that_others_do_not():
    by_hand = {"RANK": "3", "WORLD_SIZE": "4"}
    cluster = Cluster.from_env({**srun(3), **by_hand})
    assert cluster.workers == Cluster.from_env(srun(3)).workers
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert Cluster.from_env({**srun(3), **pmi}).workers == cluster.workers


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**tf_config(2, 1), **srun(3)}, "TF_CONFIG says worker 1 of 2, Slurm says worker 3 of 4"),
        ({**tf_config(2, 1), **torchrun(0, 2, 0, 2)},
         "TF_CONFIG says worker 1 of 2, torchrun says worker 0 of 2"),
        ({**tf_config(1, 0), **torchrun(1, 2, 1, 2)},
         "TF_CONFIG says worker 0 of 1, torchrun says worker 1 of 2"),
        ({**torchrun(0, 2), **open_mpi(1, 2, 1, 2)},
         "torchrun says worker 0 of 2, MPI says worker 1 of 2"),
        ({**srun(3), **pod(0)}, "Slurm says worker 3 of 4, Kubernetes says worker 0 of 3"),
        # Two launchers of two workers each by mistake, instead of one job of four.
        ({**tf_config(2, 1), **torchrun(1, 2, 1, 2),
          **srun(0, "a,b", "1(x2)", (0, 0), size=2)},
         "TF_CONFIG says worker 1 of 2, Slurm says worker 0 of 2"),
    ],
)  # fmt: skip
def test_sources_that_contradict_each_other(environ, words):
    message = refusal(environ)
    assert message.startswith("The sources contradict each other about this process: " + words)
    # The variables of those that disagree are shown, and of no other.
    telling = {"TF_CONFIG": "TF_CONFIG", "Slurm": "SLURM_PROCID", "torchrun": "WORLD_SIZE",
               "MPI": "OMPI_COMM_WORLD_RANK", "Kubernetes": "JOB_COMPLETION_INDEX"}
    for source, name in telling.items():
        assert (f"{name}=" in message) == (f"{source} says" in words)


def test_launchers_inside_launchers():
    # One launcher a node, started by srun, starts two workers each.
    one_a_node = srun(1, "a,b", "1(x2)", (1, 0), size=2)
    nested = {**tf_config(4, 2), **torchrun(2, 4, 0, 2), **one_a_node}
    assert Cluster.from_env(nested).worker_index == 2
    assert Cluster.from_env(nested).num_local_workers == 2
    # mpirun inside a batch job starts one daemon a node by srun.
    daemons = srun(2, "n[1-3]", "1(x3)", (2, 0), size=3)
    named = {"TFPARALLEL_WORKERS": ",".join(f"h{rank}:1" for rank in range(6))}
    assert Cluster.from_env({**open_mpi(5, 6, 1, 2), **daemons, **named}).worker_index == 5
    # torchrun in the pods of an indexed Job: the index is the pod's, not the worker's.
    in_pod = {"JOB_COMPLETION_INDEX": "1", **torchrun(0, 2, 0, 2)}
    assert Cluster.from_env(in_pod).worker_index == 0
    assert Cluster.from_env({**pod(2), **torchrun(1, 6, 1, 2), **named}).worker_index == 1


@pytest.mark.parametrize(
    "outer", [srun(0, "a,b", "1(x2)", (0, 0), size=2), open_mpi(0, 2, 0, 1), pod(0, num_workers=2)]
)
def test_a_job_that_has_lost_a_host_does_not_count_as_what_started_it(outer):
    remaining = {**tf_config(1, 0), **torchrun(0, 1, 0, 1)}
    assert "contradict" in refusal({**outer, **remaining})
    assert Cluster.from_env({**without_counts(outer), **remaining}).num_workers == 1


def test_evaluators_may_be_counted_by_the_launcher():
    with_evaluator = tf_config(3, 2, evaluator=["e:1"])
    assert Cluster.from_env({**with_evaluator, **srun(2)}).worker_index == 2
    evaluator = json.loads(with_evaluator["TF_CONFIG"])
    evaluator["task"] = {"type": "evaluator", "index": 0}
    cluster = Cluster.from_env({"TF_CONFIG": json.dumps(evaluator), **srun(3)})
    assert (cluster.is_evaluator, cluster.num_workers, cluster.address) == (True, 3, "e:1")


VARIABLES = sorted(
    {*torchrun(0, 1, 0, 1), *open_mpi(0, 1, 0, 1), *srun(0), *pod(0), "PMI_SIZE", "PMI_RANK",
     "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "TFPARALLEL_WORKERS", "TFPARALLEL_PORT",
     "SLURM_DISTRIBUTION", "TF_CONFIG", "GROUP_WORLD_SIZE"}
)  # fmt: skip
values = st.one_of(
    st.sampled_from(["", "0", "1", "2", "4", "a:1,b:1", "n[1-2]", "2(x2)", "cyclic", "h-0"]),
    st.text(max_size=8),
)
changes = st.dictionaries(st.sampled_from(VARIABLES), values, max_size=8)
whole = st.sampled_from(
    [{}, torchrun(1, 2, 1, 2), open_mpi(1, 2, 1, 2), srun(3), pod(1), tf_config(2, 1)]
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(whole, whole, changes)
def test_every_environment_is_read_or_refused(first, second, changed):
    try:
        cluster = Cluster.from_env({**first, **second, **changed})
    except ValueError as error:
        assert "Received: " in str(error)
    else:
        assert 0 <= cluster.worker_index < cluster.num_workers
        assert 0 <= cluster.local_rank < cluster.num_local_workers
