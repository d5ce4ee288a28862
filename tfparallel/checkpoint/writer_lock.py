"""Ensures that a folder has a single writer, and identifies it to other processes.

The writer holds a lock on a file in the folder. The kernel releases it when the process dies for
any reason, and a network file system shares it between hosts. Some problems remain:

* a host that loses power may leave its lock behind, for a minute or forever;
* some file systems do not support locks, or only within a host;
* the holder loses its own lock when it opens and closes the file again, for example in a callback
  that copies the folder.

So the file also names the writer, which touches it every two seconds as a heartbeat. A free lock
counts only if the named process has ended or its heartbeat has stopped. After half a minute without
a heartbeat the holder is considered gone, and a new file replaces the old one. A writer that was
only disconnected notices before its next write that the file is no longer its own, because each
acquisition stores a new random word.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import secrets
import threading
import time
import warnings
from typing import Any

_FILE = ".writer"
_BEAT_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0  # For a holder on another host.
_QUIET_SECONDS = 8.0  # For a holder without a lock: four missed heartbeats.
_LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class _Hold:
    """The lock that this process holds on a folder."""

    path: str
    descriptor: int
    process: int
    word: str
    ends: threading.Event
    beats: threading.Thread

    def is_in_place(self) -> bool:
        try:
            in_place = os.stat(self.path)
        except FileNotFoundError:
            os.stat(os.path.dirname(self.path))  # Raises if the folder itself is gone.
            return False
        try:
            # Use the existing descriptor: closing another one would release the lock.
            is_same = os.path.samestat(in_place, os.fstat(self.descriptor))
            return is_same and _read(self.descriptor).get("word") == self.word
        except OSError:  # ESTALE: the server has a different file in its place.
            return False


_holds: dict[str, _Hold] = {}  # By folder.


def take(directory: str) -> str | None:
    """Makes this process the folder's writer, unless another process is.

    A writer on another host has half a minute to end: it may be the job's former chief.

    Returns:
        None if this process is the writer now; else a description of the other writer.

    Raises:
        OSError: If the folder cannot be written to.
    """
    path = os.path.join(directory, _FILE)
    hold = _holds.get(os.path.realpath(directory))
    if hold is not None and hold.process == os.getpid() and hold.is_in_place():
        return None
    release(directory)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    first_beat = free_beat = None
    quiet = 0.0
    while True:
        descriptor = _opened(path)
        is_free = _lock(descriptor)
        holder, beat = _read(descriptor), os.fstat(descriptor).st_mtime_ns
        if is_free:
            if not _is_at(path, descriptor):
                os.close(descriptor)  # Its holder has removed it in the meantime.
                continue
            lives = _is_alive(holder)
            if lives is None and free_beat is None:
                free_beat, quiet = beat, time.monotonic() + _QUIET_SECONDS
            elif lives is None:
                lives = beat != free_beat or (None if time.monotonic() < quiet else False)
            if lives is False:
                _keep(directory, path, descriptor)
                return None
            if lives:
                os.close(descriptor)
                return _description(holder)  # It lives, but has lost its lock.
        os.close(descriptor)
        if is_free is None and holder == {}:
            break  # No lock support, and the file is new or its holder died immediately.
        if is_free is False and holder.get("machine") == _machine():
            return _description(holder)  # The local kernel guarantees that it lives.
        if first_beat is None:
            first_beat = beat
            warnings.warn(
                f"The checkpoint folder {directory} has a writer: {_description(holder)}. Waiting "
                f"up to {_PATIENCE_SECONDS:g} s for it to exit, or to show that it is alive.",
                stacklevel=2,
            )
        if not is_free and time.monotonic() > deadline:
            if beat != first_beat:
                return _description(holder)
            break
        time.sleep(_LOOK_SECONDS)
    # Replace the file: the lock of a lost host stays with the old one.
    new_path = f"{path}.{secrets.token_hex(4)}"
    descriptor = _opened(new_path)
    _lock(descriptor)
    os.rename(new_path, path)
    _keep(directory, path, descriptor)
    return None


def is_lost(directory: str) -> bool:
    """Whether another process has replaced this one as the folder's writer.

    Raises:
        OSError: If the folder cannot be examined.
    """
    hold = _holds.get(os.path.realpath(directory))
    return hold is not None and hold.process == os.getpid() and not hold.is_in_place()


def release(directory: str) -> None:
    """Gives up the folder; does nothing if this process is not its writer."""
    hold = _holds.pop(os.path.realpath(directory), None)
    if hold is None:
        return
    hold.ends.set()
    hold.beats.join(_BEAT_SECONDS)
    if hold.process == os.getpid():  # A forked child does not own the lock.
        with contextlib.suppress(OSError):
            if hold.is_in_place():
                os.unlink(hold.path)
    if not hold.beats.is_alive():  # If it hangs with its server, it still uses the descriptor.
        os.close(hold.descriptor)


def _keep(directory: str, path: str, descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    word = secrets.token_hex(8)
    about = {"host": platform.node(), "pid": os.getpid(), "since": since, "machine": _machine()}
    about |= {"word": word, "process": _process(os.getpid())}
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(about).encode(), 0)
    os.fsync(descriptor)  # Makes it visible to other hosts.
    ends = threading.Event()
    beats = threading.Thread(
        target=_beat, args=(descriptor, ends), name="checkpoint_writer", daemon=True
    )
    hold = _Hold(path, descriptor, os.getpid(), word, ends, beats)
    _holds[os.path.realpath(directory)] = hold
    beats.start()


def _beat(descriptor: int, ends: threading.Event) -> None:
    while not ends.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):  # The server may be temporarily unavailable.
            os.utime(descriptor)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)  # Another user's file in a shared folder.


def _lock(descriptor: int) -> bool | None:
    """Tries to lock the file; returns None if the file system does not support locks.

    It does not use `flock`: a forked data-loading process would keep the lock of a dead parent.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _description(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _machine() -> str:
    """Identifies this boot of this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def _process(pid: int) -> list[str] | None:
    """Identifies a live process beyond its pid; None if there is no such process.

    Pids are reused, and containers have their own.
    """
    try:
        space = os.readlink("/proc/self/ns/pid")
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else [space, fields[19]]


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Whether the process named in the file is alive; None if only its heartbeat can tell."""
    if not holder or (holder.get("machine"), holder.get("pid")) == (_machine(), os.getpid()):
        return False
    own_process, named = _process(os.getpid()), holder.get("process")
    if (
        holder.get("machine") != _machine()
        or not own_process
        or not named
        or own_process[0] != named[0]
    ):
        return None
    return _process(holder["pid"]) == named
