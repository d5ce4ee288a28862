"""`tfparallel launch` of a script that never joins the job: N models are not one."""

import os
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tests.forked import run_python
from tfparallel.cluster.ports import free_ports

DEADLINE_SECONDS = 240

# The model is gone from the script's names when it ends.
PLAIN = """
import os
import keras, numpy as np
def main():
    x = np.ones((8, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    {train}
    print("done", flush=True)
main()
"""
FIT = "model.fit(x, x[:, :1], verbose=0)"
# Of the two, one trains; the other one evaluates.
ONE_TRAINS = f"{FIT} if os.environ['RANK'] == '0' else model.evaluate(x, x[:, :1], verbose=0)"
# As in TensorFlow's tutorial, with a loop of its own.
JOINED = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.ones((8, 2), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.make_train_function()
strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
print("done", flush=True)
"""


def launch(tmp_path, text, *flags):
    (tmp_path / "script.py").write_text(text)
    command = ["-m", "tfparallel", "launch", "--nproc_per_node=2", *flags]
    done = run_python(
        [*command, "--", sys.executable, tmp_path / "script.py"], cwd=ROOT, timeout=DEADLINE_SECONDS
    )
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"], done.stdout + done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_plain_script_is_an_error_that_names_the_workers(tmp_path):
    """Story: it trained two models, wrote one over the other, and ended with code 0."""
    code, said = launch(tmp_path, PLAIN.format(train=FIT))
    assert code == 1
    assert "tfparallel launch: workers 0 and 1 never joined the job." in said
    assert "Received: 2 models, each trained by one worker alone." in said
    assert "model = tfparallel.data_parallel(model)" in said and "--independent" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (PLAIN.format(train=FIT), ["--independent"]),
        (PLAIN.format(train=ONE_TRAINS), []),
        (JOINED, []),
    ],
    ids=["independent", "one trains", "tf.distribute"],
)
def test_others_are_not_accused(tmp_path, text, flags):
    code, said = launch(tmp_path, text, *flags)
    assert code == 0 and "joined" not in said, said


@pytest.mark.slow
def test_a_command_that_checks_by_itself_is_not_accused(tmp_path):
    done = run_python(
        ["-m", "tfparallel", "launch", "--nproc_per_node=2", "--", sys.executable, "-m"]
        + ["tfparallel", "train", "models/mlp.py", "--parallel=none", "--epochs=1"]
        + ["--steps_per_epoch=2", "--allow_independent_workers"],
        cwd=ROOT,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0 and "joined" not in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_on_several_hosts_each_launcher_names_its_own(tmp_path):
    """With one worker each, the chief's launcher cannot know whether the others wait for it."""
    (tmp_path / "script.py").write_text(PLAIN.format(train=FIT))
    (port,) = free_ports(1)
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "tfparallel", "launch", "--nnodes=2", f"--node_rank={rank}"]
            + [f"--rdzv_endpoint=127.0.0.1:{port}", "--", sys.executable, tmp_path / "script.py"],
            cwd=ROOT,
            env=os.environ | {"TFPARALLEL_JOB_TOKEN": "a-secret-of-the-tests"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [launcher.communicate(timeout=DEADLINE_SECONDS)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 1], errors
    assert "joined" not in errors[0]
    assert "tfparallel launch: worker 1 never joined the job." in errors[1]
    assert "Received: 1 model, each" in errors[1]
