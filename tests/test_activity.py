"""What is being done, at a terminal and in a file."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, time
from tfparallel.activity import Activity
with Activity("counting", patience_seconds=0.3) as activity:
    time.sleep(0.7)
    activity.say("adding")
    with Activity.paused():
        print("a line of another", file=sys.stderr, flush=True)
    time.sleep(0.7)
print("done", file=sys.stderr)
"""


@pytest.mark.slow
def test_in_a_file_each_is_one_line():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stderr.splitlines() == ["counting ...", "a line of another", "adding ...", "done"]


@pytest.mark.slow
def test_what_is_quick_says_nothing_in_a_file():
    program = PROGRAM.replace("=0.3", "=30")
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stderr.splitlines() == ["a line of another", "done"]


@pytest.mark.slow
def test_at_a_terminal_the_line_changes_and_goes():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # The other end is closed.
            break
    assert process.wait(timeout=60) == 0
    os.close(ours)
    text = shown.decode()
    assert re.search(r"\r\x1b\[K/ counting \.\.\. 0 s\r", text) and "adding ... " in text
    # What is left at the terminal: of each line what stands behind the last return.
    left = [line.rpartition("\r\x1b[K")[2] for line in text.replace("\r\n", "\n").split("\n")]
    assert left == ["a line of another", "done", ""]
