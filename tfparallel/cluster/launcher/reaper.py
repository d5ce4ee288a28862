"""The process between the launcher and one worker; ensures that nothing outlives the launcher.

    launcher ──socket──> (second ──>) reaper ──> worker ──> the worker's own children

A launcher killed by SIGKILL cannot clean up, but the kernel closes its end of the socket. The
reaper sees that, and kills the worker with all its descendants. PR_SET_PDEATHSIG alone would kill
the worker but not its children; it also needs a `preexec_fn`, which may deadlock in a launcher with
threads. A process group alone has no process left to signal it, and misses children that create
their own group (as `timeout` does). Instead the reaper is a child subreaper: orphaned descendants
become its children. If the reaper itself is killed, the kernel kills the worker, and the rest
become children of the second reaper, which kills them.

The socket is standard input. A byte from the launcher is the number of a signal for the worker; end
of file means kill. The reaper sends the lines `started PID REAPER'S_PID` and
`ended RETURNCODE TIME`, with the return code of `subprocess` (negative for a signal) and the time
of the monotonic clock, which all processes of a host share.

The file is run by its path in an isolated interpreter (about 10 ms), and so imports nothing from
this package. On systems other than Linux there is no reaper: only the worker's process group is
killed.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import time

_CONTROL = 0
# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Processes left by a worker may end on their own, as the resource tracker of `multiprocessing`
# does after it removes shared memory.
_LEFTOVER_SECONDS = 1.0
# A process in an uninterruptible kernel wait cannot be killed: give up.
_KILL_SECONDS = 5.0
_CANNOT_RUN = 127  # As in a shell.


def main(cores: str, command: list[str]) -> None:
    """Runs `command` on `cores` ("0,1", or "" for all) until it or the launcher ends."""
    # Slurm signals every process of a job. The worker reacts to it; the reaper stays until the
    # worker or the launcher ends.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    first = _fork(command)
    if first != 0:
        _second(first)
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # Without a handler SIGCHLD would not be written to the pipe.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    reaper = os.getpid()
    worker = _fork(command)
    if worker == 0:
        _become_worker(reaper, cores, command)
    _close_output()
    _say(f"started {worker} {reaper}")
    returncode = _watch(worker, woken)
    if returncode is not None:
        _say(f"ended {returncode} {time.monotonic()}")
        _wait_for_leftovers()
    returncode_when_killed = _kill_all(worker, returncode)
    if returncode is None:
        _say(f"ended {returncode_when_killed} {time.monotonic()}")


def refusal(command: list[str], error: OSError) -> str:
    """Returns the message for a worker whose processes the system refuses to create."""
    text = f"Cannot start {command[0]!r}: {error.strerror}."
    if error.errno == errno.EAGAIN:
        text += (
            " Each worker needs three processes, and the user or the container has too many. End "
            "some, or raise the limit (`ulimit -u`, or the pids limit of the container or of its "
            "control group)."
        )
    return text


def _fork(command):
    """Forks; if the system refuses, reports that the worker cannot run, and exits."""
    try:
        return os.fork()
    except OSError as error:
        os.write(2, f"{refusal(command, error)}\n".encode())
        _say(f"ended {_CANNOT_RUN} {time.monotonic()}")
        sys.exit()


def _second(first):
    """Waits for the reaper, and kills its remaining children, if it was killed."""
    _close_output()
    status = None
    while status is None:
        pid, ended = os.waitpid(-1, 0)
        status = ended if pid == first else None
    _kill_all(None)
    if os.WIFSIGNALED(status):
        _say(f"ended {-signal.SIGKILL} {time.monotonic()}")


def _become_worker(reaper, cores, command):
    """Turns the forked child into the worker; never returns."""
    try:
        # If the reaper is killed, the kernel kills the worker.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        os.setsid()
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        _to_null(0, os.O_RDONLY)
        # Python ignores these two, and exec would inherit that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"Cannot run {command[0]!r}: {error.strerror}.\n".encode())
    finally:
        os._exit(_CANNOT_RUN)


def _watch(worker, woken):
    """Forwards signals until the worker ends; None if the launcher orders its death."""
    while True:
        ready, _, _ = select.select([_CONTROL, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            returncode = _reap(worker)
            if returncode is not None:
                return returncode
        if _CONTROL in ready:
            signals = _hear()
            if not signals:
                return None
            for signum in signals:
                _signal_group(worker, signum)


def _wait_for_leftovers():
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while _has_children() and time.monotonic() < deadline:
        _reap()
        time.sleep(0.01)


def _kill_all(worker, returncode=None):
    """Kills the worker and its descendants; returns its return code, None if not collected."""
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        children = _children()
        if worker is not None and returncode is None:
            _signal_group(worker, signal.SIGKILL)
        elif worker is not None and children is None:
            # Its number may be another process's by now; that of its group is not, while it lives.
            with contextlib.suppress(OSError):
                os.killpg(worker, signal.SIGKILL)
        # Children of a killed process become the reaper's, and are killed in the next round.
        for child in children or ():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        reaped = _reap(worker)
        returncode = reaped if returncode is None else returncode
        if not _has_children() or time.monotonic() > deadline:
            return returncode
        time.sleep(0.005)


def _signal_group(worker, signum):
    try:
        os.killpg(worker, signum)
    except ProcessLookupError:
        # It has ended, or has not started its session yet.
        with contextlib.suppress(OSError):
            os.kill(worker, signum)
    except OSError:
        # The worker changed its user.
        pass


def _reap(worker=None):
    """Collects all ended children; returns the worker's return code if it is among them."""
    returncode = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                returncode = os.waitstatus_to_exitcode(status)
    return returncode


def _has_children():
    try:
        # WNOWAIT leaves the child to be collected later.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return False
    return True


def _children():
    """Returns the process ids of all children; None if the system does not list them."""
    with contextlib.suppress(OSError), open("/proc/thread-self/children") as file:
        return [int(pid) for pid in file.read().split()]
    return None


def _hear():
    try:
        return os.read(_CONTROL, 64)
    except OSError:
        return b""


def _say(line):
    # If the launcher is gone, the reaper still cleans up.
    with contextlib.suppress(OSError):
        os.write(_CONTROL, line.encode() + b"\n")


def _close_output():
    # Otherwise the launcher would never see the end of the worker's output.
    _to_null(1, os.O_WRONLY)
    _to_null(2, os.O_WRONLY)


def _to_null(descriptor, flags):
    null = os.open(os.devnull, flags)
    os.dup2(null, descriptor)
    os.close(null)


def _prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
