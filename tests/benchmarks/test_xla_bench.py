"""What `benchmarks/xla.py` makes of its processes and of what they told; no TensorFlow."""

import importlib
import pathlib
import time

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PROCESS = """\
import json, sys, time
way = sys.argv[2]
row = {"network": sys.argv[1], "way": way, "first_seconds": 0.5}
if way == "two":
    time.sleep(60)
print(json.dumps(row), flush=True)
sys.stdin.readline()
if way == "mirrored":
    sys.exit("no such device")
print("not JSON")
print(json.dumps(row | {"step_ms": 2.0, "trained": time.time()}), flush=True)
"""


@pytest.fixture
def xla(monkeypatch, tmp_path):
    """The program, as a module; its processes are small."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("xla")
    (tmp_path / "process.py").write_text(PROCESS)
    monkeypatch.setattr(module, "PROGRAM", tmp_path / "process.py")
    return module


@pytest.mark.slow
def test_processes_train_one_by_one_and_those_that_fail_or_hang_tell_what_they_knew(xla):
    options = xla.parse(["transformer", "--together", "--seconds=4"])
    rows = list(
        xla.measured(
            "transformer", ["plain", "two", "mirrored", "one"], options, time.monotonic() + 60
        )
    )
    plain, stopped, failed, one = rows
    assert plain["trained"] < one["trained"] and plain["step_ms"] == one["step_ms"] == 2.0
    assert stopped["error"] == "not compiled when its time was over"
    assert "first_seconds" not in stopped and stopped["way"] == "two"
    assert failed["error"] == "exit code 1: no such device" and failed["first_seconds"] == 0.5


def test_a_row_of_the_table_has_what_is_known(xla):
    row = {"network": "resnet50", "precision": "float32", "kind": "GPU", "round": 1}
    lines = xla.page(
        [
            row | {"way": "plain", "step_ms": 20.0, "programs": {"GPU:0": 1}, "losses": [7.0]},
            row | {"way": "plain", "round": 2, "step_ms": 40.0},
            row | {"way": "two", "step_ms": 50.0, "peak_mib": {"GPU:0": 5, "GPU:1": 6}},
            row | {"way": "two_own", "error": "not compiled when its time was over"},
        ]
    )
    assert lines[1] == "### resnet50, float32, GPU"
    plain, again, two, stopped = lines[-4:]
    assert plain == "| plain Keras | GPU:0 1 |  |  | 20.0 | 1.00 |  | 7.00000 |"
    assert "| 40.0 | 1.00 |" in again  # Over plain Keras of its own round.
    assert two.endswith("| 50.0 | 2.50 | GPU:0 5, GPU:1 6 |  |")
    assert "own moments: not compiled when its time was over |" in stopped


def test_a_way_that_is_not_known_is_a_usage_error(xla, capsys):
    with pytest.raises(SystemExit):
        xla.parse(["resnet50", "--ways=plain,fast"])
    assert "Received: fast" in capsys.readouterr().err
