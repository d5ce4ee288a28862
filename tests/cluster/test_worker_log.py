"""A worker's log goes on where it was, and a full disk costs what has no room."""

import os
import re

import pytest

from tfparallel.cluster.launcher.output import WorkerLog


def test_it_goes_on_where_it_was(tmp_path):
    """Story: a job that Slurm had put back into its queue began its logs anew."""
    errors = []
    for text in (b"one\n", b"two\n"):
        with WorkerLog(tmp_path / "a.log", errors.append) as log:
            log.write(text)
    content = (tmp_path / "a.log").read_text()
    assert re.fullmatch(r"one\n\n--- started again, \S+ \S+ ---\ntwo\n", content) and not errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_is_told_once():
    errors = []
    with WorkerLog("/dev/full", errors.append) as log:
        for _ in range(3):
            log.write(b"text\n")
    assert [error.strerror for error in errors] == ["No space left on device"]


class Disk:
    """A file that takes `room` more bytes."""

    def __init__(self, room):
        self.room, self.content = room, b""

    def write(self, text):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = text[: self.room]
        self.room -= len(taken)
        self.content += taken
        return len(taken)

    def close(self):
        pass


def test_it_says_how_much_is_missing_once_there_is_room(tmp_path):
    log = WorkerLog(tmp_path / "a.log", lambda error: None)
    log._file.close()
    log._file = disk = Disk(room=4)
    for text in (b"first\n", b"second\n"):
        log.write(text)
    disk.room = 1000
    log.write(b"third\n")
    assert disk.content == b"firs\n--- 9 bytes had no room here ---\nthird\n"


def test_a_file_that_cannot_be_made_keeps_nothing(tmp_path):
    errors = []
    with WorkerLog(tmp_path / "none" / "a.log", errors.append) as log:
        log.write(b"text")
    assert len(errors) == 1
