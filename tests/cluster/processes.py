"""Small programs as workers, and whether anything of them is left."""

import pathlib
import time

import psutil

DEADLINE_SECONDS = 20

# A worker that survives SIGTERM, with a child that does, and one more in a session of its
# own; all three write their process ids into the folder that is the first argument.
STUBBORN_FAMILY = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
children = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=new)
    for new in (False, True)
]
for pid in [os.getpid(), *(child.pid for child in children)]:
    pathlib.Path(sys.argv[1], str(pid)).touch()
print("ready", flush=True)
time.sleep(600)
"""


def wait_for(condition, what):
    """Waits until `condition()` holds and returns its value."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for {what}"
        time.sleep(0.01)
    return value


def family(folder, num_processes=3):
    """The processes that wrote their ids into the folder, once all are there."""

    def all_there():
        pids = [int(path.name) for path in pathlib.Path(folder).iterdir()]
        return len(pids) >= num_processes and [psutil.Process(pid) for pid in pids]

    return wait_for(all_there, f"{num_processes} processes to start")


def is_running(process):
    # psutil compares the start time too: another process may have the id by now.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(processes):
    return [process for process in processes if is_running(process)]
