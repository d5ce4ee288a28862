"""A folder of checkpoints has one writer, and whoever comes second is told who that is."""

import contextlib
import fcntl
import json
import os
import platform
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from tfparallel.checkpoint import writer_lock
from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.checkpoint.stored import CheckpointError, ForeignCheckpointError

HOLDER = """
import sys, time
from tfparallel.checkpoint.folder import CheckpointFolder
CheckpointFolder(sys.argv[1], 2).prepare()
print("held", flush=True)
time.sleep(60)
"""
# One that another program, which reads data, was forked from.
FORKING = HOLDER.replace("print", "import os; os.fork() or time.sleep(60); print", 1)


@contextlib.contextmanager
def process_of(program, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def in_a_second(monkeypatch):
    """A holder on another host has one second."""
    monkeypatch.setattr(writer_lock, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(writer_lock, "_QUIET_SECONDS", 0.5)
    monkeypatch.setattr(writer_lock, "_LOOK_SECONDS", 0.1)


def test_the_second_is_refused_and_told_who_the_first_is(tmp_path):
    folder = CheckpointFolder(str(tmp_path), 2)
    with process_of(HOLDER, tmp_path) as process:
        with warnings.catch_warnings(), pytest.raises(ForeignCheckpointError) as caught:
            warnings.simplefilter("error")  # It does not wait, which it would say.
            folder.prepare()
        holder = f"process {process.pid} on {platform.node()}, since 20"
        assert holder in str(caught.value) and "choose another folder" in str(caught.value)
        process.kill()
        process.wait(30)
        folder.prepare()  # At once.
    folder.prepare()
    folder.release()
    assert list(tmp_path.iterdir()) == []


# Its own copy of the folder makes the kernel drop its lock.
COPYING = HOLDER.replace("print", "import shutil; shutil.copytree(*sys.argv[1:]); print", 1)


def test_a_holder_that_copied_the_folder_still_holds(tmp_path):
    folder, path = tmp_path / "a", str(tmp_path / "a")
    with process_of(COPYING, folder, tmp_path / "b") as process:
        assert writer_lock.take(path).startswith(f"process {process.pid} on")
        process.kill()
        wait_until_dead(process)  # Nobody has waited for it: a zombie writes nothing.
        assert writer_lock.take(path) is None
        writer_lock.release(path)


def wait_until_dead(process):
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_another_owners_word_in_the_file_means_that_the_lock_is_lost(tmp_path):
    path = str(tmp_path)
    assert writer_lock.take(path) is None and not writer_lock.is_lost(path)
    about = json.loads((tmp_path / ".writer").read_bytes())
    (tmp_path / ".writer").write_text(json.dumps(about | {"word": "another"}))
    assert writer_lock.is_lost(path)
    writer_lock.release(path)
    assert (tmp_path / ".writer").exists()


def test_a_child_of_a_killed_holder_does_not_hold(tmp_path):
    with process_of(FORKING, tmp_path) as process:
        assert writer_lock.take(str(tmp_path)) is not None
        process.kill()
        process.wait(30)
        assert writer_lock.take(str(tmp_path)) is None
        writer_lock.release(str(tmp_path))


# What a host is seen as from another: its lock, and its name of the machine.
FAR = """
import fcntl, json, os, sys, time
from tfparallel.checkpoint import writer_lock
folder, beats = sys.argv[1], float(sys.argv[2])
writer_lock._machine = lambda: "another"
writer_lock._BEAT_SECONDS = beats
assert writer_lock.take(folder) is None
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_holder_on_another_host_is_waited_for(tmp_path, in_a_second, monkeypatch):
    # In which it touches the file, however busy the machine is.
    monkeypatch.setattr(writer_lock, "_PATIENCE_SECONDS", 3.0)
    with process_of(FAR, tmp_path, 0.1), pytest.warns(UserWarning, match="Waiting up to 3 s"):
        assert writer_lock.take(str(tmp_path)).startswith("process ")
    with process_of(FAR, tmp_path, 0.2) as process, pytest.warns(UserWarning):
        threading.Timer(0.3, process.kill).start()
        assert writer_lock.take(str(tmp_path)) is None
    writer_lock.release(str(tmp_path))


@pytest.mark.slow
def test_a_host_that_is_gone_leaves_no_lock_and_finds_another_writer(tmp_path, in_a_second):
    """Its lock is still there, as an NFS server keeps it, and nobody touches the file."""
    with process_of(FAR, tmp_path, 60), pytest.warns(UserWarning, match="Waiting"):
        assert writer_lock.take(str(tmp_path)) is None
    assert not writer_lock.is_lost(str(tmp_path))
    writer_lock.release(str(tmp_path))


def test_who_has_lost_the_folder_writes_nothing_more(tmp_path):
    folder = CheckpointFolder(str(tmp_path), 2)
    folder.prepare()
    folder.write(1, [], [], {"step": 1})
    os.rename(tmp_path / ".writer", tmp_path / "old")
    (tmp_path / ".writer").touch()  # Another one's.
    (tmp_path / "unfinished_of_another").mkdir()

    def arrays():
        yield np.zeros(1)
        raise AssertionError("it began to write")

    with pytest.raises(CheckpointError, match="Another run took over"):
        folder.write(2, [], arrays(), {})
    folder.release()
    file_names = sorted(path.name for path in tmp_path.iterdir())
    assert file_names == [".writer", "old", "step_00000001", "unfinished_of_another"]


@pytest.mark.slow
def test_where_there_are_no_locks_who_touches_the_file_holds(tmp_path, in_a_second, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(writer_lock, "_BEAT_SECONDS", 0.2)
    path = tmp_path / ".writer"
    assert writer_lock.take(str(tmp_path)) is None and not writer_lock.is_lost(str(tmp_path))
    hold = writer_lock._holds.pop(os.path.realpath(tmp_path))  # As another process's.
    with pytest.warns(UserWarning, match="Waiting"):
        assert writer_lock.take(str(tmp_path)).startswith(f"process {os.getpid()} on")
    hold.ends.set()
    with pytest.warns(UserWarning, match="Waiting"):
        assert writer_lock.take(str(tmp_path)) is None
    assert not hold.is_in_place()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    os.close(hold.descriptor)
    writer_lock.release(str(tmp_path))
    assert not path.exists()
