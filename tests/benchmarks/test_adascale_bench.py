"""The study of rules for the learning rate: what it makes of runs, literally, and that it runs."""

import argparse
import importlib
import json
import pathlib

import pytest

from tests.forked import run_python

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
DEADLINE_SECONDS = 900


@pytest.fixture
def study(monkeypatch):
    """Imports the program."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("adascale")


def run_of(loss, num_updates, gain):
    return {
        "loss": loss,
        "validation_loss": 2 * loss,
        "accuracy": 0.9,
        "num_updates": num_updates,
        "gain": gain,
    }


def runs_of(study):
    runs = {("", 1): [run_of(0.1, 80, 1.0), run_of(0.3, 80, 1.0)]}
    for scale in study.SCALES:
        for rule in study.RULES:
            runs[rule, scale] = [run_of(0.2, 80 // scale, scale), run_of(0.4, 80 // scale, scale)]
    runs["adascale", 2] = [run_of(0.1, 50, 1.6), run_of(0.2, 60, 1.5)]
    return runs


def test_figures_become_a_table(study):
    options = argparse.Namespace(num_steps=80, num_seeds=2, write="")
    lines = study.page({0.1: study.summarize(runs_of(study))}, options)
    rows = [line for line in lines if line.startswith(("| small", "| linear |", "| AdaScale"))]
    assert rows[:3] == [
        "| small batch | 1 | 0.2000 (0.1000 to 0.3000) | 0.4000 (0.2000 to 0.6000) "
        "| 90.0 (90.0 to 90.0) | 80 | 1.00 | 1.00 |",
        "| linear | 2 | 0.3000 (0.2000 to 0.4000) | 0.6000 (0.4000 to 0.8000) "
        "| 90.0 (90.0 to 90.0) | 40 | 2.00 | 1.00 |",
        "| AdaScale | 2 | 0.1500 (0.1000 to 0.2000) | 0.3000 (0.2000 to 0.4000) "
        "| 90.0 (90.0 to 90.0) | 55 | 1.55 | 1.38 |",
    ]


def test_the_picture_is_drawn(study, tmp_path):
    study.draw(tmp_path / "picture.png", {0.1: study.summarize(runs_of(study))})
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_program_trains_by_each_rule(tmp_path):
    flags = ["--num_seeds=1", "--num_steps=16", "--learning_rate=0.08"]
    paths = tmp_path / "figures.json", tmp_path / "RESULTS.md"
    files = [f"--json={paths[0]}", f"--write={paths[1]}"]
    done = run_python([BENCHMARKS / "adascale.py", *flags, *files], timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    runs = json.loads(paths[0].read_text())["runs"]["0.08"]
    updates = {name: of_seeds[0]["num_updates"] for name, of_seeds in runs.items()}
    assert updates["small batch, 1"] == 16 and updates["linear, 8"] == 2
    for scale in (2, 4, 8):
        assert 16 // scale <= updates[f"adascale, {scale}"] <= 16
        assert updates[f"linear, longer, {scale}"] == updates[f"adascale, {scale}"]
    assert 'sync="adascale:S"' in paths[1].read_text()
    assert (tmp_path / "adascale.png").exists()
