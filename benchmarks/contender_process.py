"""Starts contenders, talks to them, and ends them with the benchmark."""

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

PROGRAM = pathlib.Path(__file__).with_name("contender.py")
TOP = PROGRAM.parents[1]
START_DEADLINE_SECONDS = 300.0
# Far more than a slow machine needs; it catches processes that hang.
STEP_DEADLINE_SECONDS = 10.0
NUM_LOG_LINES = 20


class ContenderProcess:
    """A contender: its process, kept between rounds.

    Args:
        workload: Key of `workloads.WORKLOADS`.
        kind: `"plain"`, `"stock"` or `"ours"`, or a kind of `program`.
        num_replicas: Logical CPU devices, one replica each, over all workers.
        cores: Cores to pin the process to; empty for no pinning.
        num_threads: Size of TensorFlow's intra-op and of its inter-op thread pool.
        environment: Further variables, such as a worker's TF_CONFIG.
        program: Another Python and program in place of this one and `contender.py`.

    Raises:
        RuntimeError: From every method, if the process has failed or hangs; with its log's end.
    """

    def __init__(
        self,
        workload,
        kind,
        num_replicas,
        *,
        cores,
        num_threads,
        environment=None,
        program=(sys.executable, str(PROGRAM)),
    ):
        self.kind = kind
        self.num_replicas = num_replicas
        # Not a pipe: nobody would read it, and a full pipe stops the writer.
        self._log = tempfile.TemporaryFile()
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        variables = {
            **inherited,
            "TF_NUM_INTRAOP_THREADS": str(num_threads),
            "TF_NUM_INTEROP_THREADS": str(num_threads),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_BACKEND": "tensorflow",
            # All contenders train on the CPU, even if the machine has a GPU.
            "CUDA_VISIBLE_DEVICES": "-1",
            # Measures this checkout, not an installed package.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")])),
            **(environment or {}),
        }
        self._process = subprocess.Popen(
            [*program, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
        )
        self._received = b""
        self._send(
            {"workload": workload, "kind": kind, "num_replicas": num_replicas, "cores": cores}
        )

    @property
    def name(self):
        return f"{self.kind}_{self.num_replicas}"

    def wait_until_ready(self):
        """Returns the contender's description of itself once its model is built."""
        return self._receive(START_DEADLINE_SECONDS)

    def train(self, num_steps, skip=0):
        """Trains, and returns the measurements; the first `skip` steps are not timed."""
        self.ask(steps=num_steps, skip=skip)
        return self.answer(num_steps)

    def ask(self, **request):
        """Sends a request that the contender's program defines, without waiting for the reply."""
        self._send(request)

    def answer(self, num_steps=0):
        """Returns the reply to `ask`; it may take longer by the time of that many steps."""
        return self._receive(START_DEADLINE_SECONDS + num_steps * STEP_DEADLINE_SECONDS)

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _send(self, message):
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("has ended before its time")

    def _receive(self, deadline_seconds):
        deadline = time.monotonic() + deadline_seconds
        output = self._process.stdout.fileno()
        while b"\n" not in self._received:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0 or not select.select([output], [], [], remaining_seconds)[0]:
                self._fail(f"has not answered within {deadline_seconds:.0f} s")
            block = os.read(output, 2**16)
            if not block:
                self._fail("has ended before its time")
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _fail(self, what):
        self._process.kill()
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
        raise RuntimeError(
            f"Contender {self.name} {what} (exit code {code}). The end of its log:\n"
            + "\n".join(f"    {line}" for line in tail or ["(empty)"])
        )
