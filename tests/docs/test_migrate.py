"""The scripts of docs/migrate.md run: before in one process, after in one and on two workers."""

import ast
import importlib.util
import pathlib
import re
import sys

import pytest

import tfparallel
from tests.forked import run_python
from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.flag_table import flags_of

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs" / "migrate.md").read_text(encoding="utf-8")
DEADLINE_SECONDS = 180
# Sums of float32 in another order, over 48 steps.
TOLERANCE = 1e-4


def scripts():
    """(source, "before" or "after") -> the script, as the page shows it."""
    by_name = {}
    for section in PAGE.split("\n## From ")[1:]:
        name = section.splitlines()[0].split()[-1].lower()
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        by_name[name, "before"], by_name[name, "after"] = blocks
    return by_name


SCRIPTS = scripts()
SOURCES = ["horovod", "ddp", "tf.distribute"]


def run_script(text, folder, *launcher):
    """Runs a script in an empty folder; returns the lines that tell the loss."""
    (folder / "train.py").write_text(text)
    done = run_python([*launcher, "train.py"], cwd=folder, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^(?:\[(\d)\] )?loss (\S+)$", done.stdout, re.MULTILINE)


def on_two_workers(text, folder):
    launcher = ["-m", "tfparallel", "launch", "--nproc_per_node=2", "--", sys.executable]
    return dict(run_script(text, folder, *launcher))


def test_each_source_has_a_script_before_and_after():
    assert sorted(SCRIPTS) == sorted(
        (source, when) for source in SOURCES for when in ("before", "after")
    )


@pytest.mark.parametrize("source", SOURCES)
def test_before_is_python(source):
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(SCRIPTS[source, "before"]))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert {"horovod": "horovod", "ddp": "torch", "tf.distribute": "tensorflow"}[source] in imported
    assert "tfparallel" not in imported


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_after_is_one_training_on_one_worker_and_on_two(source, tmp_path):
    text = SCRIPTS[source, "after"]
    ((_, alone),) = run_script(text, tmp_path)
    (tmp_path / "best.keras").unlink(missing_ok=True)
    losses = on_two_workers(text, tmp_path)
    # Under tf.distribute's own names, print() is every worker's.
    assert sorted(losses) == (["0", "1"] if source == "tf.distribute" else ["0"])
    for loss in losses.values():
        assert float(loss) == pytest.approx(float(alone), rel=TOLERANCE)
    assert (tmp_path / "best.keras").exists() == (source == "horovod")


@pytest.mark.slow
def test_before_and_after_tf_distribute_are_the_same_training(tmp_path):
    ((_, before),) = run_script(SCRIPTS["tf.distribute", "before"], tmp_path)
    ((_, after),) = run_script(SCRIPTS["tf.distribute", "after"], tmp_path)
    assert float(after) == pytest.approx(float(before), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_before_ddp_runs_under_our_launcher(tmp_path):
    losses = on_two_workers(SCRIPTS["ddp", "before"], tmp_path)
    assert sorted(losses) == ["0"] and float(losses["0"]) < 5


def test_after_tf_distribute_is_one_line_away():
    before = SCRIPTS["tf.distribute", "before"].splitlines()[1:]
    after = SCRIPTS["tf.distribute", "after"].splitlines()[1:]
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert changed == [
        ("import tensorflow as tf", "import tfparallel"),
        ("strategy = tf.distribute.MultiWorkerMirroredStrategy()",
         "strategy = tfparallel.MultiWorkerMirroredStrategy()"),
    ]  # fmt: skip


def test_names_and_flags_exist():
    names = set(re.findall(r"\btfparallel\.([A-Za-z_]\w*)", PAGE))
    assert names and names <= set(tfparallel.__all__)
    commands = set(re.findall(r"`tfparallel ([a-z]+)", PAGE)) - {"train and"}
    assert commands <= set(COMMANDS)
    flags = {
        flag
        for line in re.findall(r"tfparallel launch ([^`]*)", PAGE)
        for flag in re.findall(r"--([a-z_]+)", line)
    }
    assert {"nproc_per_node", "node_rank"} <= flags <= set(flags_of("launch"))
    assert {"parallel", "num_workers"} <= set(flags_of("train"))
