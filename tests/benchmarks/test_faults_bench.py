"""What `benchmarks/faults.py` draws and counts; the runs are made up."""

import argparse
import importlib
import pathlib
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def faults(monkeypatch):
    """The program, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("faults")


class Run:
    """A run whose kinds of faults move the weights by another amount each."""

    struck = []

    def __init__(self, folder, dtype):
        self._dtype = dtype

    def to_the_end(self):
        return [np.ones(3, self._dtype)]

    def _moved(self, victim, step, by):
        self.struck.append((victim, step))
        return [np.ones(3, self._dtype) + by], 1.0

    def kill(self, victim, step):
        return self._moved(victim, step, 0.0)

    def actor(self, victim, step):
        return self._moved(victim, step, 1e-6)

    def arrival(self, victim, step):
        return self._moved(victim, step, 1e-12)

    def stop(self, victim, step):
        self.struck.append((victim, step))
        raise TimeoutError("never came back")

    def remaining(self):
        return []


def test_only_equal_weights_are_right(faults, capsys):
    options = argparse.Namespace(num_faults=8, seed=0, busy=False, on="ray")
    rows = faults.injected(Run, ["kill", "actor", "arrival", "stop"], options)
    assert [faults.is_right(row) for row in rows] == [True, False, True, False] * 2
    assert "never came back" in capsys.readouterr().err
    page = "\n".join(faults.page(rows, options))
    assert "## Faults on Ray: 8 at random moments" in page and "| 4 of 8 | all |" in page
    assert "| kill | 2 | 2 | 0.0e+00 | 1.0, 1.0 |" in page
    options.busy = True
    assert "| kill | 2 | 2 | 0.0e+00 |\n" in "\n".join(faults.page(rows, options))


def test_a_seed_draws_the_same_faults_on_every_launcher(faults):
    drawn = []
    for kinds in (["kill"], ["kill", "actor", "arrival"]):
        Run.struck = []
        faults.injected(Run, kinds, argparse.Namespace(num_faults=40, seed=3))
        drawn.append(Run.struck)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 30


def test_every_kind_has_a_run(faults):
    runs = {"host": faults.Run, "ray": faults.RunOnRay}
    for launcher, kinds in faults.KINDS_ON.items():
        assert all(hasattr(runs[launcher], kind.replace(" ", "_")) for kind in kinds)


def test_other_kinds_are_refused(faults, capsys):
    with pytest.raises(SystemExit):
        faults.parse(["--kinds=kill,flood"])
    assert "must be of kill, stop" in capsys.readouterr().err


def test_a_missing_ray_is_told(faults, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # Python then finds none.
    assert faults.main(["--on=ray", "--write="]) == 0
    assert "faults.py --on=ray measures nothing here: `pip install ray`" in capsys.readouterr().err
