"""`tfparallel.spawn`: functions travel, results come back, failures are told, nothing is left."""

import linecache
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from tests.cluster.processes import STUBBORN_FAMILY, family, survivors, wait_for
from tests.cluster.spawnable import fail_in_worker_1, place
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.launcher.spawn import spawn

TOP = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT_SECONDS = 60

def spawned(function, num_workers=2, **options):
    """Spawns, never for ever."""
    return spawn(function, num_workers, **{"timeout_seconds": TIMEOUT_SECONDS, **options})


def test_the_chiefs_result_comes_back_from_another_process():
    (worker, num_workers, pid), args, kwargs = spawned(
        place, 3, args=(1, "two"), kwargs={"three": 3}
    )
    assert (worker, num_workers) == (0, 3)
    assert pid != os.getpid() and not psutil.pid_exists(pid)
    assert (args, kwargs) == ((1, "two"), {"three": 3})


@pytest.mark.slow
def test_a_function_inside_a_function_takes_along_what_it_uses():
    offset = np.arange(3.0)

    class Local:
        def __init__(self, value):
            self.value = value

    result = spawned(lambda factor: Local(offset * factor), args=(2,))
    assert type(result) is Local
    assert result.value.tolist() == [0, 2, 4]


def test_a_large_result():
    result = spawned(lambda: np.ones((6000, 1000)), 1)
    assert result.nbytes == 48_000_000 and result.min() == 1


def script(text, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", text, *map(str, arguments)],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_scripts_own_function_and_class_without_a_guard():
    process = script(
        "import sys, tfparallel\n"
        "class Answer:\n"
        "    def __init__(self, text): self.text = text\n"
        "def ask(): print('asked'); return Answer(f'{sys.argv[1]} {NAME}')\n"
        "NAME = 'world'\n"
        "answer = tfparallel.spawn(ask)\n"
        "print(type(answer) is Answer, answer.text)\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy') if name in sys.modules])",
        "hello",
    )
    shown, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert errors == ""
    *lines, answer, loaded = shown.splitlines()
    assert sorted(lines) == ["[0] asked", "[1] asked"]
    assert (answer, loaded) == ("True hello world", "[]")


def test_the_module_path_and_the_folder_are_the_callers(tmp_path, monkeypatch):
    (tmp_path / "beside_the_caller.py").write_text("import os\nwhere = lambda: os.getcwd()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    import beside_the_caller

    assert spawned(beside_the_caller.where) == str(tmp_path)


def test_output_goes_where_sys_stdout_goes(capsys):
    spawned(lambda: print("größer", Cluster.from_env().worker_index))
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] größer 0", "[1] größer 1"]
    assert shown.err == ""


def test_the_source_of_a_cell_is_there_for_tf_function():
    """A notebook's cell is no file; IPython keeps its text in the line cache."""
    source = "def cell(x):\n    import inspect\n    return inspect.getsource(cell)\n"
    name = "/no/such/folder/cell.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    assert spawned(namespace["cell"], 1, args=(1,)) == source


@pytest.mark.slow
def test_a_failure_names_the_worker_and_stops_the_others(capfd):
    with pytest.raises(RuntimeError) as caught:
        spawned(fail_in_worker_1, 3)
    text = str(caught.value)
    assert text.startswith("Worker 1 exited with code 1 after ")
    assert "KeyError: 'gone'\nStopped workers 0, 2." in text
    # From the user's frame on.
    first_frame = text.splitlines()[2]
    assert "spawnable.py" in first_frame and "fail_in_worker_1" in first_frame
    shown = capfd.readouterr().err
    assert "[1] KeyError: 'gone'\n" in shown


def test_death_by_signal():
    with pytest.raises(RuntimeError, match="Worker 0 was killed by SIGKILL .*memory ran out"):
        spawned(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


@pytest.mark.slow
def test_a_restart_that_succeeds(capsys):
    def fail_once():
        attempt = os.environ["TFPARALLEL_RESTART_COUNT"]
        if attempt == "0":
            sys.exit(3)
        return attempt

    assert spawned(fail_once, max_restarts=2) == "1"
    assert "exited with code 3 after " in (error := capsys.readouterr().err)
    assert error.endswith("; restarting all workers (1 of 2)\n")


@pytest.mark.slow
def test_the_time_is_over():
    def wait():
        print("waiting")
        if Cluster.from_env().worker_index == 1:
            time.sleep(600)

    with pytest.raises(RuntimeError) as caught:
        spawn(wait, timeout_seconds=5)
    assert str(caught.value) == (
        "The workers did not finish in time; 1 was still running and had to be stopped. "
        "Received: timeout_seconds=5. The last lines:\n    [1] waiting"
    )


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path):
    process = script(
        "import tfparallel\n"
        f"CODE = {STUBBORN_FAMILY!r}\n"
        "def stay(): exec(CODE, {})\n"
        "try: tfparallel.spawn(stay)\n"
        "except KeyboardInterrupt: print('interrupted')",
        tmp_path,
    )
    processes = family(tmp_path, num_processes=6)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert shown.endswith("interrupted\n")
    assert survivors(processes) == []


def test_a_killed_caller_leaves_nothing(tmp_path):
    process = script(
        f"import tfparallel\nCODE = {STUBBORN_FAMILY!r}\n"
        "tfparallel.spawn(lambda: exec(CODE, {}))",
        tmp_path,
    )
    processes = family(tmp_path, num_processes=6)
    process.kill()
    process.communicate(timeout=TIMEOUT_SECONDS)
    wait_for(lambda: not survivors(processes), "the workers to end")


@pytest.mark.parametrize(
    "arguments, problems",
    [
        ({"function_or_task_file": 3}, ["a function or the path of a task file is required"]),
        ({"function_or_task_file": "no.py"}, ["the task file does not exist"]),
        (
            {"function_or_task_file": __file__, "args": (1,), "kwargs": {"num_workers": 3}},
            ["takes no args", "num_workers must be an argument of spawn"],
        ),
        (
            {"num_workers": 0, "num_devices": True, "max_restarts": -1, "timeout_seconds": 0},
            ["num_workers must be", "num_devices must be", "max_restarts must be",
             "timeout_seconds must be positive", "Received: .*num_workers=0"],
        ),
        ({"device_type": "tpu", "args": "ab"}, ["one of auto, cpu, gpu", "args must be a seq"]),
    ],
)  # fmt: skip
def test_all_mistakes_in_one_error(arguments, problems):
    with pytest.raises(ValueError) as caught:
        spawn(**{"function_or_task_file": place, **arguments})
    for problem in problems:
        assert caught.match(problem)


def test_a_function_that_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="Received: .*cannot pickle '_thread.lock'.*Open files"):
        spawned(lambda: lock)


def test_a_result_that_cannot_be_sent():
    with pytest.raises(RuntimeError, match="Received: a lock .*cannot pickle '_thread.lock'"):
        spawned(lambda: threading.Lock(), 1)


def test_a_function_that_does_not_return():
    with pytest.raises(RuntimeError, match="exited without a result"):
        spawned(lambda: sys.exit(0), 1)


def test_a_worker_may_not_spawn():
    with pytest.raises(RuntimeError, match="already one of 2 workers.*worker [01] from TF_CONFIG"):
        spawned(lambda: spawn(place))


@pytest.mark.slow
def test_each_worker_has_its_devices():
    def devices():
        import tfparallel

        return tfparallel.devices.list_devices()

    assert spawned(devices, num_devices=3, device_type="cpu") == ["CPU:0", "CPU:1", "CPU:2"]


@pytest.mark.slow
def test_a_task_file_is_trained_and_reported(tmp_path):
    report = spawned(
        TOP / "tests" / "tasks" / "blobs.py",
        kwargs={
            "epochs": 2, "seed": 7, "stop_on_nan": True, "save": tmp_path / "m.keras",
            "steps_per_epoch": None,
        },
        device_type="cpu",
    )  # fmt: skip
    assert report["num_workers"] == 2
    assert len(report["history"]["loss"]) == 2
    assert report["configuration"]["stop_on_nan"] is True
    assert "report" not in report["configuration"]
    assert (tmp_path / "m.keras").stat().st_size > 0


def test_a_flag_that_the_task_refuses():
    with pytest.raises(ValueError, match="epohcs"):
        spawned(TOP / "tests" / "tasks" / "blobs.py", kwargs={"epohcs": 2})
