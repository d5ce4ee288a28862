"""`make bench`: one program after another, real processes, without what they measure."""

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


@pytest.fixture
def start(tmp_path):
    """Starts the runner on small programs of the test's own."""

    def start(*names, **programs):
        for name, text in {"summary": "print('summed up')", **programs}.items():
            (tmp_path / f"{name}.py").write_text(text)
        driver = DRIVER.format(folder=str(BENCHMARKS), programs=str(tmp_path))
        return subprocess.Popen(
            [sys.executable, "-c", driver, *names],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


def test_every_program_exists_and_is_named_in_the_makefile(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("all")
    assert all((BENCHMARKS / program).is_file() for program, *_ in module.BENCHMARKS.values())
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


def test_a_program_does_not_outlive_the_runner(start, tmp_path):
    write = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    process = start(first=write.replace("'pid'", repr(str(tmp_path / "pid"))))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
