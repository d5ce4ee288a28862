"""Programs in forked processes run as in a new interpreter."""

import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from tests import forked
from tests.cluster.processes import wait_for
from tests.forked import run_python

PROGRAM = """
import atexit, os, sys
atexit.register(print, "the end")
print(__name__, sys.argv, os.getcwd(), os.environ["WORD"])
print("an error", file=sys.stderr)
raise {error}
"""


def test_the_server_has_imported_tensorflow_and_started_nothing():
    """Of a process with threads, a child would have all locks and none of the threads."""
    program = (
        "import os, sys; print('tensorflow' in sys.modules, os.getppid())\n"
        "from tensorflow.python.eager import context; print(context.context()._initialized)"
    )
    loaded, server, started = run_python(["-c", program], timeout=60).stdout.split()
    assert (loaded, started) == ("True", "False")
    # NumPy's OpenBLAS has one for each core, and makes them anew in a child.
    assert len([*pathlib.Path("/proc", server, "task").iterdir()]) <= os.cpu_count()


@pytest.mark.parametrize("is_new", [False, True], ids=["forked", "new"])
@pytest.mark.parametrize(
    ("error", "code"), [("SystemExit(3)", 3), ("SystemExit", 0), ("ValueError('x')", 1)]
)
@pytest.mark.parametrize("kind", ["text", "script", "module"])
def test_it_ends_as_a_program_does(kind, error, code, is_new, tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "_state", {"starts_afresh": is_new})
    text = PROGRAM.format(error=error)
    (tmp_path / "program.py").write_text(text)
    first = {"text": ["-c", text], "script": ["program.py"], "module": ["-m", "program"]}[kind]
    done = run_python([*first, "a"], cwd=tmp_path, env=os.environ | {"WORD": "w"}, timeout=60)
    assert done.returncode == code
    name = {"text": "-c", "script": "program.py", "module": str(tmp_path / "program.py")}[kind]
    assert done.stdout == f"__main__ {[name, 'a']} {tmp_path} w\nthe end\n"
    assert done.stderr.startswith("an error\n")
    assert done.stderr.endswith("ValueError: x\n") == (code == 1)


@pytest.mark.slow
def test_one_that_is_late_is_killed(tmp_path):
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", program + "time.sleep(100)"], timeout=2)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_none_outlives_the_process_that_asked_for_it(tmp_path):
    program = tmp_path / "asks.py"
    program.write_text(
        "import os\n"
        "from tests import forked\n"
        "forked._context.set_forkserver_preload([])\n"  # This test needs no TensorFlow.
        "if __name__ == '__main__':\n"
        "    inner = \"import os, time; print(os.getpid(), flush=True); time.sleep(100)\"\n"
        f"    with forked.Forked(forked._run_program, [['-c', inner]], {str(tmp_path)!r}):\n"
        "        while not open('stdout').read(): pass\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, program], cwd=tmp_path, timeout=60, check=False)
    pid = int((tmp_path / "stdout").read_text())
    wait_for(lambda: not psutil.pid_exists(pid), "the process to end")
