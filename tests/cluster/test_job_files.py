"""What is submitted to Slurm is what it takes, and starts the job it says; mistakes of any file."""

import os
import re
import subprocess
import sys

import pytest

from tests.cluster.emitted_files import AWKWARD, WORKER, emitted
from tfparallel.cluster.job_files import JobFile, job_name_of, slurm_script

# --- Slurm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_shell_linter_finds_nothing_in_the_script(tmp_path, nnodes):
    job = JobFile("train", AWKWARD, nnodes=nnodes, sbatch_args=["--partition=long"])
    (tmp_path / "job.sh").write_text(slurm_script(job))
    linter = os.path.join(os.path.dirname(sys.executable), "shellcheck")
    # It would tell a user that "$HOME" in single quotes stays what it is: as it was given.
    arguments = ["--severity=warning", tmp_path / "job.sh"]
    done = subprocess.run([linter, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Two tasks, as of two nodes; each is told which it is, and all that Slurm would tell it besides.
SRUN = """#!/bin/bash
echo "srun $1"
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 \\
  SLURM_STEP_ID=0 SLURM_STEP_NODELIST=127.0.0.1,127.0.0.2 SLURM_STEP_TASKS_PER_NODE='1(x2)' \\
  SLURM_NNODES=2 "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) echo 127.0.0.1; echo 127.0.0.2 ;;
  requeue) echo "requeued $2" ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 75, 3])
def test_the_script_starts_a_launcher_on_each_node(tmp_path, code):
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = f'#!/bin/bash\nexec {sys.executable} -m tfparallel "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("tfparallel", tool)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "worker.py", "it's one", "$HOME"]
    # Slurm may start a job at another size than it was written for.
    job = JobFile("train", command, ["--nproc_per_node=2"], nnodes=3)
    (tmp_path / "job.sh").write_text(slurm_script(job))
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    slurm |= {"SLURM_CPUS_PER_TASK": "3", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={
            **os.environ,
            **slurm,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "ENDS_WITH": str(code),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == code, shown
    assert ("requeued" in shown) == (code == 75), shown
    assert "srun --cpus-per-task=3\n" in shown
    if code == 0:
        for worker in range(4):
            assert f"[{worker}] worker {worker} of 4 [\"it's one\", '$HOME']" in shown, shown


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_token_reaches_the_launchers_where_a_site_exports_nothing(nnodes):
    """SBATCH_EXPORT=NONE holds for srun, too, unless it is told otherwise."""
    script = slurm_script(JobFile("train", ["true"], nnodes=nnodes))
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    assert ("--export=ALL" in line) == (nnodes > 1) == ("TFPARALLEL_JOB_TOKEN" in script)


def test_the_command_prints_the_script():
    code, script, errors = emitted(
        *("--emit=slurm", "--nnodes=2", "--nproc_per_node=4", "--gpus_per_node=4"),
        *("--sbatch_args=--partition=long", "--sbatch_args=--time=1:00:00"),
    )
    assert code == 0, errors
    lines = script.splitlines()
    for line in ("--job-name=digits-cnn", "--gpus-per-node=4", "--partition=long", "--requeue"):
        assert f"#SBATCH {line}" in lines
    assert '--job_name="digits-cnn-$SLURM_JOB_ID"' in script
    (line,) = (line for line in lines if line.startswith("TFPARALLEL_JOB_TOKEN="))
    tokens = {
        subprocess.run(
            ["bash", "-c", f"{line}; echo $TFPARALLEL_JOB_TOKEN"], capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(tokens) == 2 and all(re.fullmatch(r"[0-9a-f]{32}\n", token) for token in tokens)
    assert "#SBATCH --signal=USR1@75" in lines and "--grace_seconds=60" in script


# --- Mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--emit=kubernetes"], ["needs --image=NAME"]),
        (["--emit=slurm", "--image=a"], ["--image is for --emit=kubernetes, jobset or trainjob"]),
        (["--emit=slurm", "--queue=a"], ["--queue is for --emit=kubernetes, jobset or trainjob"]),
        (["--emit=jobset", "--image=a", "--queue=A b"], ["--queue must be the name of a Local"]),
        (["--emit=jobset", "--nnodes=2:4"], ["needs --image=NAME", "the number of hosts is fixed"]),
        (["--emit=trainjob", "--image=a", "--standby"], ["restarts the job in new pods"]),
        (["--emit=jobset", "--image=a", f"--job_name={'a' * 47}"], ["must have at most 46"]),
        (["--emit=kubernetes", "--image=a", "--volume=a"], ["--volume must be CLAIM:/PATH"]),
        (["--emit=slurm", "--sbatch_args=long"], ["must begin with '-'"]),
        (["--emit=slurm", "--job_name=My Job", "--nnodes=0"], ["--job_name must have", "--nnodes"]),
        (["--emit=slurm", "--node_rank=1"], ["--node_rank cannot be in a job file"]),
        (["--emit=slurm", "--job_name=3d"], ["start with a letter"]),
        (
            ["--emit=slurm", "--max_restarts=-1", "--start_timeout=nan", "--grace_seconds=inf"],
            ["--max_restarts must be", "--start_timeout must be", "--grace_seconds must be from 0"],
        ),
        (["--emit=slurm", "--grace_seconds=1e6", "--standby"], ["from 0 to 65520", "--standby is"]),
        (["--emit=slurm", "--nnodes=5000"], ["--nnodes must be at most 1000"]),
        (["--image=a"], ["--image is for --emit"]),
    ],
)
def test_mistakes(flags, messages):
    code, shown, errors = emitted(*flags)
    assert code == 2 and shown == ""
    for message in messages:
        assert message in errors


def test_bytes_that_are_no_text_are_refused():
    code, shown, errors = emitted("--emit=slurm", command=("python", b"caf\xe9.py"))
    assert (code, shown) == (2, "") and "is UTF-8 text" in errors


def test_a_scheduler_that_says_another_index_is_believed(monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "1")
    code, _, errors = emitted(
        *("--nnodes=2", "--node_rank=0", "--rdzv_endpoint=127.0.0.1:29400"), command=["true"]
    )
    assert code == 2 and "SLURM_NODEID=1. Received: --node_rank=0" in errors


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["tfparallel", "train", "models/digits_cnn.py"], "digits-cnn"),
        (["/usr/bin/env", "x"], "env"),
        (["--"], "train"),
        (["python", "3d_cnn.py"], "train-3d-cnn"),
    ],
)
def test_the_name_of_a_job(command, name):
    assert job_name_of(command) == name
