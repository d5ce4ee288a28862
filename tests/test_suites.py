"""A sample of the slow tests follows its seed; all the parts of a suite are all its tests."""

import os
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tests.suites import SUITES, is_chosen

SEEDS = range(200)
NODES = [f"tests/test_a.py::test_{number}" for number in range(200)]
CASE = [
    f"tests/parity/test_parity.py::test_it[Dice-{form}-3]" for form in ("data", "model", "tensor")
]


def chosen(suite, seed, nodes=NODES):
    return tuple(node for node in nodes if is_chosen(suite, node, seed))


@pytest.mark.parametrize("suite", SUITES)
def test_the_parts_of_a_suite_are_all_its_tests_and_each_is_in_one(suite):
    parts = {chosen(suite, str(seed)) for seed in SEEDS}
    num_parts, _ = SUITES[suite]
    assert len(parts) == num_parts
    assert sorted(node for part in parts for node in part) == sorted(NODES)


def test_tests_that_share_work_are_chosen_together():
    assert {chosen("parity", str(seed), CASE) for seed in SEEDS} == {(), tuple(CASE)}


# Of pytest alone: 40 slow tests of "features", a fast one, and one that fails.
FILE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_slow(number): pass

def test_fast(): pass

@pytest.mark.parametrize("word", ["a b"])
def test_wrong(word): raise KeyError
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What pytest shows of a sample of FILE."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_mine.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.suites", "--sample=3f2c1a0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_mine.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_sample_is_the_fast_tests_and_the_part_that_the_seed_chooses(shown):
    slow = [f"test_mine.py::test_slow[{number}]" for number in range(40)]
    part = chosen("features", "3f2c1a0", slow)
    passed = {line.split()[0] for line in shown.splitlines() if " PASSED" in line}
    assert "--sample=3f2c1a0\n" in shown and 0 < len(part) < 40
    assert passed == {"test_mine.py::test_fast", *part}


def test_the_command_that_runs_a_failed_test_alone_is_printed(shown):
    _, _, command = shown.partition(" run it alone ")
    assert "\n.venv/bin/python -m pytest 'test_mine.py::test_wrong[a b]'\n" in command
    assert command.count("-m pytest") == 1
