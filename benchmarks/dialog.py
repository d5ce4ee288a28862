"""How a contender talks to its benchmark: one JSON object per line, on stdin and stdout.

The first line is the order: workload, kind, number of processes, cores. The contender answers once
it is ready, and then answers each request. This module needs only Python, whatever the contender is
built on.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # Of <linux/prctl.h>.


def begin():
    """Returns the order, and `reply(**fields)`; pins this process to its cores.

    Call it before TensorFlow or PyTorch creates its threads.
    """
    end_with_parent(int(sys.argv[1]))
    # Standard output is reserved for replies; all other output goes to the log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**fields):
        print(json.dumps(fields), file=channel, flush=True)

    order = json.loads(sys.stdin.readline())
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    return order, reply


def requests():
    """Yields each request, until the benchmark ends."""
    return map(json.loads, sys.stdin)


def step_seconds(ends, skip):
    """Returns the seconds from the end of each step to the next, without the first `skip`.

    That is the whole cost of a step, with the loop and the batch; the one-time costs of a `fit`
    fall into the skipped steps.
    """
    ends = ends[max(skip - 1, 0) :]
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def serve_steps(reply, step):
    """Answers each request by that many calls of `step(index)`, which returns the loss."""
    for request in requests():
        ends, total = [], 0.0
        for index in range(request["steps"]):
            total += step(index)
            ends.append(time.perf_counter())
        reply(
            step_seconds=step_seconds(ends, request["skip"]),
            loss=total / request["steps"],
            peak_mib=peak_mib(),
        )


def peak_mib():
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def end_with_parent(parent):
    """Ends this process when its parent ends, even one that was killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("The parent has ended already.")
