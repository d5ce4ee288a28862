"""A worker that makes no progress ends itself, and says where it hangs."""


import pytest

from tests.forked import run_python
from tfparallel.cluster.preemption import TRY_AGAIN

pytestmark = pytest.mark.slow

PROGRAM = """
import threading, time
from tfparallel.callbacks.stall import StallGuard

before = threading.active_count()
with StallGuard(timeout_seconds=0.4, worker_index=3) as guard:
    {body}
print("ended well", flush=True)
"""


def run(body):
    return run_python(["-c", PROGRAM.format(body=body)], timeout=100)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("time.sleep(60)", "may take at most 0 s. Received: no step has started for longer"),
        ("guard.on_train_batch_begin(0); time.sleep(60)", "a step has taken longer"),
        ("guard.on_predict_batch_begin(0); time.sleep(60)", "a step has taken longer"),
        ("guard.on_test_batch_begin(0); guard.on_test_batch_end(0); time.sleep(60)",
         "no step has started for longer"),
    ],
    ids=["pause", "step", "prediction", "pause behind a step"],
)  # fmt: skip
def test_a_worker_that_hangs_ends(body, message):
    done = run(body)
    assert done.returncode == TRY_AGAIN
    assert "Worker 3 makes no progress" in done.stderr and message in done.stderr
    assert 'File "<string>", line 7' in done.stderr  # Where it hangs.
    assert "ended well" not in done.stdout


def test_steps_that_go_on_are_left_alone():
    """Two seconds of steps and pauses, each a tenth of a second."""
    step = "(guard.on_train_batch_begin(0), time.sleep(0.1), guard.on_train_batch_end(0))"
    done = run(f"[({step}, time.sleep(0.1)) for _ in range(10)]")
    assert done.returncode == 0, done.stderr
    assert "ended well" in done.stdout


def test_the_watch_ends_with_its_block():
    done = run("pass")
    assert done.returncode == 0, done.stderr


def test_nested_waits_run_on_one_deadline():
    """A standing guard times nothing but waits, and a wait within another goes on with that."""
    body = (
        "guard = StallGuard(timeout_seconds=0.4, worker_index=3); guard.start(); time.sleep(0.6)\n"
        "    with guard.waiting():\n"
        "        with guard.waiting(): pass\n"
        "        time.sleep(60)"
    )
    block = "with StallGuard(timeout_seconds=0.4, worker_index=3) as guard:"
    program = PROGRAM.replace(block, "if True:").format(body=body)
    done = run_python(["-c", program], timeout=100)
    assert done.returncode == TRY_AGAIN and "a step has taken longer" in done.stderr
