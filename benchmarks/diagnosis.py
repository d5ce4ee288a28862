"""Slows a job down in ten ways, and checks whether `bench train` names each cause.

    .venv/bin/python benchmarks/diagnosis.py

`models/digits_cnn.py` on 2 workers, one thread each: a worker that waits in each step, data that is
slow to read, batches that are too small, a core that other programs use too, and a slow link (two
network namespaces, which need root, and are skipped otherwise). The verdict is that of
`bench train`.
"""

import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile

import contest
import two_hosts

sys.path.insert(0, str(contest.TOP))
from tfparallel.flight.diagnosis import verdict  # noqa: E402
from tfparallel.flight.job import Split  # noqa: E402

DIGITS = "models/digits_cnn.py"
READING = "benchmarks/slow_reading_task.py"
SLOW = "--inject=slow:worker="
SPIN = "while True: pass"
DEADLINE_SECONDS = 300.0
_PORT = 29_788

CASES = [
    # The disturbance, the expected verdict, the task, its flags, environment variables.
    ("worker 0 waits 30 ms a step", "worker 0 is slow", DIGITS, [f"{SLOW}0,ms=30"], {}),
    ("worker 1 waits 30 ms a step", "worker 1 is slow", DIGITS, [f"{SLOW}1,ms=30"], {}),
    ("worker 1 waits 9 ms a step", "worker 1 is slow", DIGITS, [f"{SLOW}1,ms=9"], {}),
    ("an example takes 0.5 ms to read", "input-bound", READING, [], {"READING_MS": "0.5"}),
    ("an example takes 2 ms to read", "input-bound", READING, [], {"READING_MS": "2"}),
    (
        *("an example takes worker 1 0.5 ms to read", "input-bound on worker 1", READING, []),
        {"READING_MS": "0.5", "READING_WORKER": "1"},
    ),
    ("4 rows a step", "batch too small", DIGITS, ["--global_batch_size=4"], {}),
    ("three others on worker 1's core", "worker 1 is slow", DIGITS, [], {"SPINNERS": "3"}),
    ("a link of 100 Mbit/s", "the link carries", DIGITS, [], {"LINK": "100"}),
    ("a link of 30 Mbit/s", "the link carries", DIGITS, [], {"LINK": "30"}),
]


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__), arguments)
    rows = []
    for what, expected, task, flags, variables in CASES:
        if "LINK" in variables and os.geteuid() != 0:
            continue
        said = said_of(task, flags, variables)
        rows.append((what, expected, said, said.startswith(expected)))
        print(f"{what}: {said}", file=sys.stderr, flush=True)
    names = ("what", "expected", "said", "is_right")
    results = [dict(zip(names, row, strict=True)) for row in rows]
    contest.publish("diagnosis", page(rows), results, options)
    return 0 if all(row[3] for row in rows) else 1


def said_of(task, flags, variables):
    """Trains, and returns the verdict."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = folder / "report.json"
        tfparallel = [sys.executable, "-m", "tfparallel"]
        train = [*tfparallel, "train", task, "--parallel=data", "--num_devices=1", "--epochs=1"]
        train += ["--steps_per_epoch=80", f"--report={report}", "--device_type=cpu", *flags]
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        env = os.environ | dict.fromkeys(threads, "1") | variables
        env.setdefault("TFPARALLEL_JOB_TOKEN", secrets.token_hex(16))
        link = float(variables.get("LINK", 0)) * 1e6 or None
        launches = [[*tfparallel, "launch", "--nproc_per_node=2", "--bind_cores"]]
        if link:
            names = stack.enter_context(two_hosts.linked(f"{variables['LINK']}mbit"))
            meet = ["--nnodes=2", f"--rdzv_endpoint={two_hosts.ADDRESSES[0]}:{_PORT}"]
            launches = [
                [*two_hosts.on_host(name), *tfparallel, "launch", *meet, f"--node_rank={index}"]
                for index, name in enumerate(names)
            ]
        for _ in range(int(variables.get("SPINNERS", 0))):
            core = max(os.sched_getaffinity(0))
            spinner = subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", SPIN])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        output = stack.enter_context(open(folder / "output", "w+b"))
        jobs = []
        for launch in launches:
            command = [*launch, "--", *train]
            out = {"stdout": output, "stderr": output}
            jobs.append(subprocess.Popen(command, cwd=contest.TOP, env=env, **out))
            stack.callback(jobs[-1].wait)
            stack.callback(jobs[-1].terminate)
        if any([job.wait(DEADLINE_SECONDS) for job in jobs]):
            output.seek(0)
            raise RuntimeError(f"A job failed:\n{output.read().decode()[-3000:]}")
        figures = json.loads(report.read_text())
    splits = [Split(**each) for each in figures["time_of_a_step_seconds"]]
    sent = sum(figures["sent_bytes_in_a_step"].values())
    return verdict(splits, sent_bytes=sent, link_bits=link)


def page(rows):
    right = sum(row[3] for row in rows)
    return [
        "## Diagnosis: what holds a job up",
        "",
        "`models/digits_cnn.py` on 2 workers, a thread each; the verdict is that of `tfparallel "
        "bench train`.",
        "",
        *contest.table(
            ("what was done", f"what was said: {right} of {len(rows)} right", ""),
            *((what, said, "yes" if ok else "**no**") for what, _, said, ok in rows),
        ),
    ]


if __name__ == "__main__":
    contest.run(main)
