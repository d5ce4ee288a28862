"""The quick start's files run as they stand, and agree in one process and in two workers."""

import pathlib
import re
import sys

import pytest

from tests.forked import run_python

PAGE = pathlib.Path(__file__).parents[2].joinpath("docs", "quick_start.md").read_text("utf-8")
TRAIN, CHECK = re.findall(r"^```python\n(import .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LAUNCH = ["-m", "tfparallel", "launch", "--nproc_per_node=2", "--", sys.executable]


def run(folder, *command):
    done = run_python(command, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_logs(printed):
    return re.findall(r"accuracy: [\d.]+ - loss: [\d.]+", printed)[-1]


@pytest.mark.slow
@pytest.mark.fresh_interpreter
def test_the_script_and_its_check_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "check.py").write_text(CHECK)
    alone = run(tmp_path, "train.py")
    assert (tmp_path / "digits.keras").stat().st_size > 0
    # The page shows what it prints.
    assert last_logs(alone) == last_logs(PAGE)
    assert last_logs(run(tmp_path, *LAUNCH, "train.py")) == last_logs(alone)
    assert "OK: " in run(tmp_path, "check.py")
