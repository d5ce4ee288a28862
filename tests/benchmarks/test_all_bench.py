"""`make bench`: one program after another, real processes, without what they measure."""

import contextlib
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
DEADLINE_SECONDS = 60
DRIVER = """\
import pathlib, sys
sys.path.insert(0, {folder!r})
import all as benchmarks
benchmarks.FOLDER = pathlib.Path({programs!r})
benchmarks.BENCHMARKS = {{name: [name + ".py"] for name in ("first", "second", "third")}}
benchmarks.contest.run(benchmarks.main)
"""


# A benchmark that has started a process, which it ends when it ends itself.
WITH_A_CHILD = """\
import os, pathlib, subprocess, sys, time
sys.path.insert(0, {folder!r})
import contest

def main(arguments):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        pathlib.Path("{pids}.new").write_text(f"{{os.getpid()}} {{child.pid}}")
        os.rename("{pids}.new", "{pids}")
        time.sleep(600)
    finally:
        time.sleep(1)  # As long as some take.
        child.kill()
        child.wait()

contest.run(main)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the runner on small programs of the test's own."""
    started = []

    def start(*names, **programs):
        for name, text in {"summary": "print('summed up')", **programs}.items():
            (tmp_path / f"{name}.py").write_text(text)
        driver = DRIVER.format(folder=str(BENCHMARKS), programs=str(tmp_path))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(
            [sys.executable, "-c", driver, *names],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_SECONDS)


def test_every_program_exists_and_the_makefile_names_those_beside_torch(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("all")
    assert all((BENCHMARKS / program).is_file() for program, *_ in module.BENCHMARKS.values())
    assert (BENCHMARKS / module.SUMMARY[0]).is_file()
    makefile = (BENCHMARKS.parent / "Makefile").read_text(encoding="utf-8")
    assert " ".join(n for n in module.BENCHMARKS if n in module.BESIDE_TORCH) in makefile


def test_one_that_fails_does_not_hold_up_the_others(start):
    process = start(first="raise SystemExit(3)", second="print('measured')", third="")
    text, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1
    assert "measured" in text and "summed up" in text
    assert text.splitlines()[-1].endswith("failed: first")


def test_only_those_that_are_named_run(start):
    process = start("third", first="print('one')", second="print('two')", third="print('three')")
    text, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert "three" in text and "one" not in text and "two" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send", "code"),
    [(signal.SIGTERM, os.kill, 143), (signal.SIGINT, os.killpg, 130)],
    ids=["SIGTERM to the runner", "Ctrl-C to all"],
)
def test_nothing_outlives_the_runner(start, tmp_path, number, send, code):
    pids = tmp_path / "pids"
    process = start(first=WITH_A_CHILD.format(folder=str(BENCHMARKS), pids=pids))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not pids.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    send(process.pid, number)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code
    survivors = []
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            survivors.append(pid)
    assert not survivors
