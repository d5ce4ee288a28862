"""The study of policies: what it makes of runs, literally, and that it runs. Times are made up."""

import importlib
import json
import pathlib

import pytest

from tests.forked import run_python

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
DEADLINE_SECONDS = 300


@pytest.fixture
def module(monkeypatch):
    """Imports a module that lies beside the program."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def reply(seconds, losses=(0.5, 0.2), accuracy=0.9, sent=1000):
    return {
        "losses": list(losses),
        "accuracies": [0.5, accuracy],
        "seconds": seconds,
        "sent_bytes": [sent // 2, sent],
        "sent_bytes_in_all": sent,
        "num_reductions": 16,
        "loss": losses[-1],
        "accuracy": accuracy,
    }


def test_the_clock_is_that_of_the_slower_worker_without_the_steps_that_trace(module):
    fast, slow = [60.0] + [1.0] * 15, [50.0] + [1.0] * 7 + [2.0] * 8
    run = module("sync").of_workers([reply(fast), reply(slow)], (0, 64))
    assert run["seconds"] == [7.0, 23.0]
    assert run["step_ms"] == pytest.approx(1e3 * 23 / 15)
    assert run["sent_bytes"] == [500, 1000] and run["accuracy"] == 0.9


def test_workers_that_went_apart_are_an_error(module):
    replies = [reply([1.0] * 16), reply([1.0] * 16, losses=(0.5, 0.3))]
    with pytest.raises(RuntimeError, match="The workers have different weights"):
        module("sync").of_workers(replies, ())


def run_of(losses, accuracy, sent):
    return {
        "losses": losses,
        "accuracies": [accuracy, accuracy],
        "seconds": [1.0, 2.0],
        "sent_bytes": [sent // 2, sent],
        "sent_bytes_in_all": sent,
        "num_reductions": 16,
        "loss": losses[-1],
        "accuracy": accuracy,
        "step_ms": 125.0,
    }


RUNS = {
    "every_step": [run_of([0.4, 0.1], 0.97, 4_000_000), run_of([0.1, 0.1], 0.98, 4_000_000)],
    "bf16": [run_of([0.4, 0.1], 0.97, 2_000_000), run_of([0.4, 0.1], 0.971, 2_000_000)],
    "powersgd:2": [run_of([0.4, 0.1], 0.97, 240_000), run_of([0.4, 0.3], 0.97, 240_000)],
}


def test_promises_are_judged_by_the_means_over_the_seeds(module):
    results = module("sync")
    figures = results.summarize(RUNS, 0.1)
    bytes_sent = "bytes, over those of `every_step`"
    points = "points of accuracy lost against `every_step`"
    assert results.verdicts(figures) == [
        (f"`bf16`: {bytes_sent}", "0.5000", "at most 0.505", True),
        (f"`powersgd:2`: {bytes_sent}", "0.0600", "at most 0.050", False),
        (f"`bf16`: {points}", "+0.45", "at most 0.5", True),
        (f"`powersgd:2`: {points}", "+0.50", "at most 0.5", True),
    ]


def test_figures_become_a_table(module):
    results = module("sync")
    lines = results.lines_of({"digits_cnn": results.summarize(RUNS, 0.1)}, {"digits_cnn": 16})
    rows = [line for line in lines if line.startswith("| `") and "points" not in line]
    assert rows[-3:] == [
        "| `every_step` | 97.50 (97.00 to 98.00) | 97.50 | 4.00 | 1.0000 | 16 | 16 (8 to 16) "
        "| 2.00 (1.00 to 2.00) | 125.0 |",
        "| `bf16` | 97.05 (97.00 to 97.10) | 97.05 | 2.00 | 0.5000 | 16 | 16 (16 to 16) "
        "| 2.00 (2.00 to 2.00) | 125.0 |",
        "| `powersgd:2` | 97.00 (97.00 to 97.00) | 97.00 | 0.24 | 0.0600 | 16 "
        "| not in 16, 1 of 2 seeds |  | 125.0 |",
    ]
    assert any(line.endswith("| **missed** |") for line in lines)


def test_without_every_step_nothing_is_judged(module):
    results = module("sync")
    figures = results.summarize({"bf16": RUNS["bf16"]}, 0.1)
    assert results.verdicts(figures) == []
    lines = results.lines_of({"digits_cnn": figures}, {"digits_cnn": 16})
    assert not any("promised" in line for line in lines)


def run(*flags):
    return run_python([BENCHMARKS / "sync.py", *flags], timeout=DEADLINE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_steps=20"], "must be a multiple of 16"),
        (["--policy=never"], "invalid choice: 'never'"),
        (["--task=chess"], "invalid choice: 'chess'"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_program_trains_by_each_policy(tmp_path):
    json_path, page_path = tmp_path / "figures.json", tmp_path / "RESULTS.md"
    policies = ["every_step", "local_sgd:8"]
    done = run(
        *("--task=digits_cnn", "--num_seeds=1", "--num_steps=16"),
        *(f"--policy={policy}" for policy in policies),
        *(f"--json={json_path}", f"--write={page_path}"),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(json_path.read_text())["figures"]["digits_cnn"]
    assert list(figures) == policies
    # An average at the end of each epoch of 8 steps, with the optimizer's two slots.
    assert 0.3 < figures["local_sgd:8"]["bytes_over_every_step"] < 0.5
    assert 20 < figures["every_step"]["accuracy"] <= 100
    page = page_path.read_text()
    assert "## Policies: when workers agree" in page and "(sync.png)" in page
    assert (tmp_path / "sync.png").stat().st_size > 10_000
