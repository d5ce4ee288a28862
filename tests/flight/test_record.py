"""A record keeps what was written last, whatever becomes of the process."""

import os
import signal
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tfparallel.flight.record import Event, FlightRecord, path_of, read_record

ABOUT = {"worker": 1, "num_workers": 2, "host": "here", "attempt": 0}


@pytest.fixture(name="record")
def new_record(tmp_path):
    record = FlightRecord(tmp_path / "worker_1.flight", ABOUT)
    yield record
    record.close()


def test_what_is_written_is_read(record):
    record.name_marks(["input", "forward"])
    record.now("in a step", 7, 10.0)
    record.alive(12.5)
    record.stands_at("a.py:1, in f\nb.py:2, in g")
    record.add([("step", 6, 8.0, 9.5)])
    read = read_record(record.path)
    assert (read.about, read.worker) == (ABOUT, 1)
    assert read.now == Event("in a step", 7, 10.0, 12.5)
    assert read.stack.splitlines() == ["a.py:1, in f", "b.py:2, in g"]
    assert read.events == (Event("step", 6, 8.0, 9.5),)
    assert list(read.marks) == ["input", "forward"]


def test_the_newest_events_take_the_place_of_the_oldest(record):
    for step in range(10_000):
        record.add([("step", step, step, step + 0.5)])
    steps = [event.step for event in read_record(record.path).events]
    assert steps == list(range(10_000 - len(steps), 10_000)) and len(steps) > 8000


def test_an_end_is_kept_and_taken_back(record):
    record.end("ValueError: no")
    assert read_record(record.path).about["ended"] == "ValueError: no"
    record.begin()
    assert "ended" not in read_record(record.path).about


def test_what_is_too_long_is_cut(record):
    record.now("x" * 1000, 0, 0.0)
    record.stands_at("y" * 100_000)
    record.add([("z" * 1000, 0, 0.0, 1.0)])
    record.name_marks(["long " * 100] * 100)
    read = read_record(record.path)
    assert len(read.now.what) == 256 and read.events[0].what == "z" * 52
    assert set(read.stack) == {"y"} and read.about == ABOUT
    assert list(read.marks) == ["long " * 100]  # All have this name; as many as have room.


def test_it_outlives_a_process_that_is_killed(tmp_path):
    path = path_of(tmp_path, 1, 2)
    program = (
        "import os, signal, sys\nfrom tfparallel.flight.record import FlightRecord\n"
        "record = FlightRecord(sys.argv[1], {'worker': 1})\n"
        "record.add([('step', 3, 1.0, 2.0)])\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, path])
    assert done.returncode == -signal.SIGKILL
    assert os.path.basename(path) == "worker_1.restart_2.flight"
    assert read_record(path).events == (Event("step", 3, 1.0, 2.0),)


@pytest.mark.parametrize("content", [b"", b"something else", b"tfparallel flight 1\n"])
def test_a_file_that_is_no_flight_record_raises(tmp_path, content):
    (tmp_path / "a.flight").write_bytes(content)
    with pytest.raises(ValueError, match="Not a flight record, .* bytes are required"):
        read_record(tmp_path / "a.flight")


def test_a_disk_that_is_full_gives_an_error_and_no_signal(tmp_path):
    """A file with holes would end the process when it is written to."""
    program = (
        "import resource, signal, sys\nfrom tfparallel.flight.record import FlightRecord\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    FlightRecord(sys.argv[1], {})\nexcept OSError:\n    print('refused')"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "a.flight")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


FULL = """
import os, resource, sys
from tfparallel.flight.record import FlightRecord
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    FlightRecord(sys.argv[1] + "/worker_0.flight", {})
except OSError:
    print(os.listdir(sys.argv[1]))
"""


def test_a_record_that_has_no_room_leaves_nothing(tmp_path):
    """Story: half a record, and `trace` refused the whole folder."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "head", [b"[" * 4000, b"[1]", b'{"worker": "a"}', b'{"worker": 1, "ended": 3}']
)
def test_a_damaged_head_is_refused(record, head):
    record.close()
    with open(record.path, "r+b") as file:
        file.seek(32)
        file.write(head + b"\0")
    with pytest.raises(ValueError, match="is damaged"):
        read_record(record.path)
