"""What is being done, said where it takes long."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from tfparallel.activity import Activity
with Activity("counting", patience_seconds=0.3) as activity:
    time.sleep(0.7)
    activity.say("adding")
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
def test_quick_work_prints_nothing_to_a_file():
    program = PROGRAM.replace("=0.3", "=30")
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stderr.splitlines() == ["a line of another", "done"]
