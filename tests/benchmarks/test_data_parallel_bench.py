"""The benchmark runs, says what it should, and leaves no process behind. Times are not judged."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest

from tests.forked import run_python

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PROGRAM = BENCHMARKS / "data_parallel.py"
CONTENDERS = ["plain_1", "stock_1", "ours_1", "stock_2", "ours_2", "plain_xla_1", "ours_xla_2"]
DEADLINE_SECONDS = 600
FIELDS = {
    *("median_ms", "p10_ms", "p90_ms", "cpu_ms", "num_steps", "round_median_ms"),
    *("num_traces_first_step", "num_traces_end", "rss_end_mib", "rss_growth_mib"),
    *("loss_first_step", "loss_end"),
}


@pytest.fixture
def module(monkeypatch):
    """Imports a module that lies beside the program."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(*flags):
    return run_python([PROGRAM, *flags], timeout=DEADLINE_SECONDS)


def reply(step_seconds, rss_mib=100.0, num_traces=3):
    return {
        "step_seconds": step_seconds,
        "cpu_seconds_a_step": 0.001,
        "loss": 1.0,
        "num_traces": num_traces,
        "rss_mib": rss_mib,
    }


def summarized(module, rounds, **of_workload):
    first = {name: reply([]) for name in rounds[0]}
    result = module("data_parallel").summarize("dispatch_bound", rounds, first, first)
    return {"workloads": {"dispatch_bound": {"num_steps_of_growth": 2000, **of_workload, **result}}}


def test_a_ratio_pairs_the_medians_of_each_round(module):
    # The machine slows down from round to round; the ratio does not see it.
    rounds = [
        {"plain_1": reply([t, t, 9 * t]), "ours_1": reply([1.01 * t, 1.01 * t, 0.0])}
        for t in (0.001, 0.002, 0.004)
    ]
    result = summarized(module, rounds)["workloads"]["dispatch_bound"]
    (ratio,) = result["ratios"]
    assert (ratio["of"], ratio["to"], ratio["target"]) == ("ours_1", "plain_1", 1.02)
    assert ratio["median"] == pytest.approx(1.01)
    assert ratio["p90"] == pytest.approx(1.01)
    assert ratio["reached"]
    assert result["contenders"]["plain_1"]["median_ms"] == pytest.approx(4.0)
    assert result["contenders"]["plain_1"]["num_steps"] == 9


@pytest.mark.parametrize(
    ("slower", "num_traces", "rss_mib", "missed"),
    [
        (1.0, 3, 101.0, []),  # 1 MiB over 2,000 steps
        (1.04, 3, 100.0, ["step of ours_1 / plain_1"]),
        (1.0, 4, 100.0, ["ours_1, traces after the first step"]),
        (1.0, 3, 103.0, ["ours_1, memory growth over 1,000 steps"]),
    ],
)
def test_a_promise_can_be_missed(module, slower, num_traces, rss_mib, missed):
    rounds = [{"plain_1": reply([1.0, 1.0]), "ours_1": reply([slower] * 2, rss_mib, num_traces)}]
    verdicts = module("data_parallel").verdicts(summarized(module, rounds))
    assert len(verdicts) == 3
    assert [what for what, *_, reached in verdicts if not reached] == [
        f"dispatch_bound: {what}" for what in missed
    ]


def test_growth_over_fewer_steps_than_promised_is_no_verdict(module):
    rounds = [{"plain_1": reply([1.0, 1.0]), "ours_1": reply([1.0, 1.0], rss_mib=500.0)}]
    summary = summarized(module, rounds, num_steps_of_growth=999)
    assert not any("memory" in what for what, *_ in module("data_parallel").verdicts(summary))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_rounds=0"], "must be at least 1. Received: 0"),
        (["--workload=huge"], "invalid choice: 'huge'"),
        (["--json=/nowhere/a.json"], "must exist. Received: /nowhere/a.json"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_measured(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_program_measures_every_contender(module, tmp_path):
    json_path, page_path = tmp_path / "figures.json", tmp_path / "RESULTS.md"
    done = run(
        "--workload=dispatch_bound",
        "--num_rounds=2",
        "--num_steps=4",
        f"--json={json_path}",
        f"--write={page_path}",
    )
    assert done.returncode == 0, done.stderr
    assert "round 2 of 2" in done.stderr

    text = json_path.read_text()
    report = json.loads(text)
    assert set(report) == {"environment", "workloads"}
    workload = report["workloads"]["dispatch_bound"]
    assert list(workload["contenders"]) == CONTENDERS
    for contender in workload["contenders"].values():
        assert set(contender) == FIELDS
        assert contender["num_steps"] == 2 * 4
        assert contender["p10_ms"] <= contender["median_ms"] <= contender["p90_ms"]
        assert contender["num_traces_end"] == contender["num_traces_first_step"] > 0
    # The same training, whoever runs it.
    (loss,) = {round(c["loss_end"], 4) for c in workload["contenders"].values()}
    assert loss > 0
    assert [(r["of"], r["to"]) for r in workload["ratios"] if r["target"]] == [
        ("ours_1", "plain_1"),
        ("ours_2", "stock_2"),
        ("ours_xla_2", "plain_xla_1"),
    ]

    page = page_path.read_text()
    parts = [line for line in page.splitlines() if line.startswith("## ")]
    assert parts == ["## Data parallel on one machine"]
    (figures,) = module("contest").read_figures(page_path).values()
    assert figures["dispatch_bound"]["ours_1/plain_1"]["median"] > 0
    assert figures["date"] == report["environment"]["Date"]
    assert "data_parallel.py --workload=dispatch_bound --num_rounds=2 --num_steps=4`" in page
    for written in (text, page):
        assert os.uname().nodename not in written.split()
        assert str(tmp_path) not in written and str(BENCHMARKS.parent) not in written


@pytest.mark.slow
def test_a_contender_that_fails_shows_the_end_of_its_log(module):
    contender = module("contender_process").ContenderProcess(
        "no_such_workload", "plain", 1, cores=[], num_threads=1
    )
    try:
        with pytest.raises(RuntimeError, match="plain_1 has ended before its time") as caught:
            contender.wait_until_ready()
        assert "KeyError: 'no_such_workload'" in str(caught.value)
    finally:
        contender.close()


@pytest.mark.slow
def test_no_contender_outlives_a_parent_that_was_killed():
    parent = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--workload=dispatch_bound", "--write="],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert f"starting {len(CONTENDERS)} processes" in parent.stderr.readline()
        contenders = psutil.Process(parent.pid).children()
        assert len(contenders) == len(CONTENDERS)
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()
    deadline = time.monotonic() + 60
    while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in contenders):
        assert time.monotonic() < deadline, "a contender is still running"
        time.sleep(0.1)
