"""`tfparallel doctor` inside a pod, a Slurm job and a Ray cluster.

A process gets the variables, files and mounts that the engine would give it; Ray is real.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tfparallel.cluster.environment import available_cores
from tfparallel.cluster.ports import free_ports

ENGINES = ("JOB_COMPLETION_INDEX", "KUBERNETES_", "PET_", "RAY_", "SLURM_", "TFPARALLEL_", "TF_")
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
# A pod that `launch` of two workers has started this process in.
TWO_WORKERS = {
    **POD, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
}  # fmt: skip
TRAIN_JOB = {
    **POD, "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "digits-node-0-1", "PET_NNODES": "2",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
}  # fmt: skip
CORES = len(available_cores())
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]",
}  # fmt: skip


def step(num_tasks, **more):
    nodes, tasks = ("node1", "1") if num_tasks == 1 else ("node[1-2]", f"{num_tasks // 2}(x2)")
    return {
        **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0", **more,
    }  # fmt: skip


def can_mount():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not can_mount(), reason="needs unshare, and the right to mount")


@pytest.fixture
def look(tmp_path):
    """Runs the doctor's quick part; returns its findings by check, without TensorFlow's."""

    def run(environment, mount="", *flags):
        path = tmp_path / "doctor.json"
        flags = flags or ("--quick", "--peer_timeout=0.5")
        command = [sys.executable, "-m", "tfparallel", "doctor", *flags, f"--report={path}"]
        if mount:
            command = ["unshare", "--mount", "sh", "-ec", f'{mount}\nexec "$@"', "sh", *command]
        elsewhere = {k: v for k, v in os.environ.items() if not k.startswith(ENGINES)}
        done = subprocess.run(
            command,
            cwd=ROOT,
            # With another backend, the doctor looks no further than the engine.
            env={**elsewhere, "KERAS_BACKEND": "jax", **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert path.exists(), done.stderr
        findings = json.loads(path.read_text())["findings"]
        checks = {finding["check"]: finding for finding in findings}
        return {k: (v["verdict"], v["meaning"], v["advice"]) for k, v in checks.items()}

    return run


def test_without_an_engine_nothing_is_said(look):
    assert not {"pod", "pod name", "shared memory", "Slurm", "Ray"} & set(look({}))


# --- Kubernetes -------------------------------------------------------------------------------


def test_a_pod_that_nobody_told_of_others(look):
    verdict, meaning, advice = look(POD)["pod"]
    assert verdict == "warn" and "neither TF_CONFIG nor an index" in meaning
    assert "--emit=jobset" in advice


def test_pods_of_jobs(look):
    assert look(TRAIN_JOB)["pod"] == ("ok", "number 1 of a TrainJob", "")
    config = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    checks = look({**POD, "TF_CONFIG": json.dumps(config)})
    assert checks["pod"] == ("ok", "TF_CONFIG names its job", "")
    # Of an indexed Job that does not say how many pods it has.
    alone = look({**POD, "JOB_COMPLETION_INDEX": "0"})
    assert alone["pod"][1] == "number 0 of an indexed Job or a JobSet"
    assert alone["cluster"][0] == "broken" and "TFPARALLEL_NUM_WORKERS" in alone["cluster"][1]


@mounts
@pytest.mark.parametrize("name", ["", "digits-node-0-1.digits.team.svc.cluster.local "])
def test_a_pod_without_a_service_has_no_name(look, tmp_path, name):
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n10.0.0.5\t{name}digits-node-0-1\n")
    checks = look(TRAIN_JOB, f"mount --bind {shlex.quote(str(tmp_path))}/hosts /etc/hosts")
    if name:
        assert "pod name" not in checks
    else:
        verdict, meaning, advice = checks["pod name"]
        assert verdict == "broken" and "digits-node-0-1 belongs to no Service" in meaning
        assert "spec.subdomain" in advice


@mounts
@pytest.mark.parametrize(
    ("options", "environment", "verdict", "words"),
    [
        ("size=64m", TWO_WORKERS, "ok", "64 MiB at /dev/shm"),
        ("size=2m", TWO_WORKERS, "broken", "MPI needs 3 MiB for the workers of this pod"),
        ("ro", POD, "broken", "cannot be written"),
    ],
)
def test_shared_memory(look, options, environment, verdict, words):
    finding = look(environment, f"mount -t tmpfs -o {options} none /dev/shm")["shared memory"]
    assert finding[0] == verdict and words in finding[1]
    assert ("emptyDir" in finding[2]) == (verdict != "ok")


@mounts
@pytest.mark.parametrize("size, verdict", [("64m", "warn"), ("1g", "ok")])
def test_shared_memory_beside_a_gpu(look, size, verdict):
    """A container's default is too little for NCCL; a file stands for the device."""
    mount = f"mount -t tmpfs -o size={size} none /dev/shm"
    devices = "mount -t tmpfs none /mnt\nmkdir /mnt/dev\nmount --rbind /dev /mnt/dev"
    overlay = "mount -t tmpfs none /dev\nfor each in /mnt/dev/*; do ln -s $each /dev; done"
    gpu = "rm -f /dev/shm\nmkdir /dev/shm\ntouch /dev/nvidia0"
    finding = look(POD, "\n".join([devices, overlay, gpu, mount]))["shared memory"]
    assert finding[0] == verdict and ("NCCL" in finding[1]) == (verdict == "warn")


@mounts
@pytest.mark.slow
@pytest.mark.parametrize("size, is_enough", [("2m", False), ("4m", True)])
def test_how_much_shared_memory_mpi_needs(size, is_enough):
    """The doctor's limit: below it, workers that sum by MPI are killed."""
    pytest.importorskip("mpi4py")
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    mpiexec = pathlib.Path(sys.executable).with_name("mpiexec")
    run = f"mount -t tmpfs -o size={size} none /dev/shm\nexec {mpiexec} -n 2 {sys.executable} -c"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{run} "$0"', program],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    # Two processes write at the same time.
    assert (done.stdout.count("2") == 2) == is_enough, done.stdout + done.stderr
    assert ("Bus error" in done.stdout + done.stderr) != is_enough


@mounts
def test_the_limits_of_a_container(look):
    mib = 2**20
    files = {"cpu.max": "50000 100000", "memory.max": 900 * mib, "memory.current": 300 * mib}
    mount = "mount -t tmpfs none /sys/fs/cgroup"
    for name, text in files.items():
        mount += f"\necho {text} > /sys/fs/cgroup/{name}"
    checks = look(POD, mount)
    assert checks["memory"][0] == "warn"
    assert "600 MiB free within the limit of this container or job" in checks["memory"][1]
    assert checks["cores"][0] == "warn" and "is 0.5: TensorFlow starts" in checks["cores"][1]
    assert checks["cores"][2] == "set TF_NUM_INTRAOP_THREADS=1 and OMP_NUM_THREADS=1"


@pytest.mark.slow
@pytest.mark.parametrize("environment", [TRAIN_JOB, step(4)])
def test_two_workers_are_tried_inside_a_job_as_elsewhere(environment):
    """They joined the job around them, and the doctor blamed tfparallel."""
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel.diagnostics.cluster_probe", "ours"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert json.loads(done.stdout)["ours"].get("difference", 1) < 1e-9, done.stdout + done.stderr


# --- Slurm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "verdict", "words", "advice"),
    [
        (BATCH, "warn", "job 7 has 4 tasks, but this shell is one process on the first", "srun"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, "ok", "job 7, on one node", ""),
        ({**BATCH, "SLURM_NTASKS": ""}, "warn", "job 7 has 2 nodes, but this shell", "srun"),
        # `salloc` opens such a step.
        (step(1, SLURM_STEP_ID=str(0xFFFFFFFA)), "warn", "this shell is one process", "srun"),
        (step(1), "warn", "has 4 tasks, but this step has one task", "srun --ntasks=4"),
        (step(1, SLURM_NTASKS="1"), "warn", "has 2 nodes, but this step has one", "--ntasks=2"),
        (step(4), "ok", "job 7, task 0 of 4", ""),
    ],
)
def test_tasks_of_slurm(look, environment, verdict, words, advice):
    finding = look(environment)["Slurm"]
    assert finding[0] == verdict and words in finding[1] and advice in finding[2]


@pytest.mark.parametrize(
    ("more", "num_cores"),
    [
        ({"SLURM_CPUS_PER_TASK": str(CORES + 3)}, CORES + 3),
        ({"SLURM_CPUS_PER_TASK": str(CORES)}, None),
        ({"SLURM_JOB_CPUS_PER_NODE": f"{4 * CORES}(x2)"}, 2 * CORES),
        ({"SLURM_JOB_CPUS_PER_NODE": f"{2 * CORES}(x2)"}, None),
    ],
)
def test_a_task_that_srun_gave_few_cores(look, more, num_cores):
    checks = look(step(4, **more))
    if num_cores is None:
        assert "cores of the task" not in checks
    else:
        verdict, meaning, advice = checks["cores of the task"]
        assert verdict == "warn" and f"{CORES} of its {num_cores} cores" in meaning
        assert advice == f"srun --cpus-per-task={num_cores}"


# --- Ray --------------------------------------------------------------------------------------

has_ray = importlib.util.find_spec("ray") is not None
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_an_address_of_a_cluster_without_ray(look):
    checks = look({"RAY_ADDRESS": "127.0.0.1:6379"}, "", "--probe_timeout=30")
    assert checks["Ray"][0] == "broken" and "ray is not installed" in checks["Ray"][1]


@pytest.fixture(name="ray_cluster", scope="module")
def started():
    utilities = pytest.importorskip("ray.cluster_utils")
    cluster = utilities.Cluster(initialize_head=True, head_node_args=SMALL)
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
def test_a_cluster_that_takes_this_process(look, ray_cluster):
    checks = look({"RAY_ADDRESS": ray_cluster.address}, "", "--probe_timeout=120")
    verdict, meaning, _ = checks["Ray"]
    assert verdict == "ok" and "1 of 1 nodes have the versions of this" in meaning


@pytest.mark.slow
@mounts
def test_a_node_without_tfparallel(look, ray_cluster):
    hide = f"mount -t tmpfs none {shlex.quote(str(pathlib.Path(ROOT, 'tfparallel')))}"
    ray = pathlib.Path(sys.executable).with_name("ray")
    join = f"exec {ray} start --block --num-cpus=1 --object-store-memory={80 * 2**20}"
    command = ["unshare", "--mount", "sh", "-ec", f"{hide}\n{join} --address={ray_cluster.address}"]
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(node.terminate)
        assert any("Ray runtime started" in line for line in node.stdout)
        checks = look({"RAY_ADDRESS": ray_cluster.address}, "", "--probe_timeout=120")
    (node,) = (finding for check, finding in checks.items() if check.startswith("Ray node "))
    assert node[0] == "broken" and "tfparallel is missing" in node[1]
    assert "1 of 2 nodes" in checks["Ray"][1]


@pytest.mark.slow
def test_a_cluster_of_another_version(look, ray_cluster):
    """The cluster's own record of its version says another one."""
    gcs = importlib.import_module("ray._raylet").GcsClient(address=ray_cluster.address)
    key, namespace = b"CLUSTER_METADATA", b"cluster"
    metadata = json.loads(gcs.internal_kv_get(key, namespace))
    other = {**metadata, "ray_version": "1.0.0"}
    gcs.internal_kv_put(key, json.dumps(other).encode(), True, namespace)
    try:
        checks = look({"RAY_ADDRESS": ray_cluster.address}, "", "--probe_timeout=120")
    finally:
        gcs.internal_kv_put(key, json.dumps(metadata).encode(), True, namespace)
    verdict, meaning, advice = checks["Ray"]
    assert verdict == "broken" and "Version mismatch" in meaning and "Ray: 1.0.0" in meaning
    assert advice == "use the cluster's Ray and Python"


def test_a_cluster_that_is_gone(look):
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    verdict, meaning, _ = look({"RAY_ADDRESS": address}, "", "--probe_timeout=30")["Ray"]
    why = f"RAY_ADDRESS={address} names a cluster, but it cannot be reached: refused"
    assert (verdict, meaning) == ("broken", why)
