"""Times asynchronous steps against two unconnected processes, and kills a worker.

    .venv/bin/python benchmarks/asynchronous.py

`models/digits_cnn.py`, 2 workers and 1 server of `tfparallel launch --num_ps=1`, 1,000 updates of
32 examples. A worker's step is twice the total time divided by the number of updates. For two plain
processes that run at once it is the median step of the slower one. The same job measures what a
step needs to read the weights from the server and to send and apply the gradients: both workers do
so at once, without the network's passes. The contenders take turns, one round each.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import contest
import numpy as np
import psutil
from contender import make_clock

TOP = pathlib.Path(__file__).parents[1]
NUM_WORKERS, NUM_UPDATES, ROWS = 2, 1000, 32
TARGET = 1.10
DEADLINE_SECONDS = 600.0
ROLE = "--role"  # How this file is started as a contender.


def main(arguments):
    if arguments[:1] == [ROLE]:
        return contender(*arguments[1:])
    options = contest.parse(contest.make_parser(__doc__, num_rounds=3), arguments)
    rounds = []
    for index in range(options.num_rounds):
        turns = contest.in_turn([unjoined, asynchronous], index)
        results = {measure.__name__: measure() for measure in turns}
        rounds.append(results)
        print(f"round {index + 1}: {results}", file=sys.stderr)
    killed = asynchronous(kills=True)
    results = summarized(rounds, killed)
    contest.publish("asynchronous", page(results), results, options, "num_rounds")
    return 0


def start(command, **variables):
    variables = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", **variables}
    return subprocess.Popen(
        [*map(str, command)], cwd=TOP, env={**os.environ, "PYTHONPATH": str(TOP), **variables}
    )


def unjoined():
    """The median step, in ms, of the slower of two plain processes that run at once."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{index}.json" for index in range(NUM_WORKERS)]
        processes = [start([sys.executable, __file__, ROLE, "plain", path]) for path in paths]
        for process in processes:
            if process.wait(DEADLINE_SECONDS):
                raise RuntimeError(f"A plain process ended with {process.returncode}.")
        return max(json.loads(pathlib.Path(path).read_text())["step_ms"] for path in paths)


def asynchronous(*, kills=False):
    """Runs a job, and returns the chief's results.

    Args:
        kills: Whether worker 1 gets SIGKILL once training has begun.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "found.json")
        launch = [sys.executable, "-m", "tfparallel", "launch", f"--nproc_per_node={NUM_WORKERS}"]
        job = start([*launch, "--num_ps=1", "--", sys.executable, __file__, ROLE, "async", path])
        try:
            if kills:
                kill_worker(job, pathlib.Path(f"{path}.begun"))
            if job.wait(DEADLINE_SECONDS):
                raise RuntimeError(f"The job ended with {job.returncode}.")
        finally:
            job.terminate()  # Ends its processes too; no effect on a job that has ended.
        return json.loads(path.read_text())


def kill_worker(job, begun):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not begun.exists():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("The job ended, or was too slow, before it trained.")
        time.sleep(0.05)
    time.sleep(1.0)
    for process in psutil.Process(job.pid).children(recursive=True):
        task = json.loads(process.environ().get("TF_CONFIG", "{}")).get("task")
        is_own = process.cmdline()[1:3] == [__file__, ROLE]
        if is_own and task == {"type": "worker", "index": 1}:
            os.kill(process.pid, signal.SIGKILL)


def contender(kind, path):
    """Trains as a plain process or as a process of the job, and writes the results."""
    import tfparallel

    tfparallel.devices.hide_gpus()
    import keras

    sys.path.insert(0, str(TOP / "models"))
    import digits_cnn

    (x, y), _ = digits_cnn.load_data()
    keras.utils.set_random_seed(0)
    is_plain = kind == "plain"
    build = digits_cnn.build_model
    model = build() if is_plain else tfparallel.data_parallel(build, sync="async")
    digits_cnn.compile_model(model)

    def batches(number):
        order = np.random.default_rng(0).integers(0, len(x), (number, ROWS))
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x[order], y[order]))

    model.fit(batches(40), verbose=0)  # Traces, and warms up.
    figures = {}
    if is_plain:
        clock = make_clock()
        model.fit(batches(NUM_UPDATES // NUM_WORKERS), verbose=0, callbacks=[clock])
        figures["step_ms"] = 1e3 * float(np.median(np.diff(clock.readings)))
    else:
        pathlib.Path(f"{path}.begun").touch()
        started, used = time.perf_counter(), time.process_time()
        history = model.fit(batches(NUM_UPDATES), verbose=0).history
        figures["step_ms"] = 1e3 * NUM_WORKERS * (time.perf_counter() - started) / NUM_UPDATES
        # The chief, which assigns batches, uses this much processor time per worker's step.
        figures["chief_ms"] = 1e3 * NUM_WORKERS * (time.process_time() - used) / NUM_UPDATES
        figures |= {"loss": history["loss"][-1], **model.staleness, **wires(model)}
    pathlib.Path(path).write_text(json.dumps(figures))
    return 0


def wires(model, number=100):
    """Milliseconds that a worker needs to read the weights, and to have its gradients applied."""
    import tensorflow as tf

    servers, weights = model._servers, model.trainable_variables

    @tf.function
    def pull():
        return tf.add_n([tf.reduce_sum(tf.identity(weight.value)) for weight in model.variables])

    @tf.function
    def push(value):
        gradients = [tf.fill(weight.shape, value) for weight in weights]
        with tf.control_dependencies(gradients), tf.device(servers.device):
            model.optimizer.apply(gradients, weights)
            return tf.constant(0.0)

    times_ms = {}
    for name, function, arguments in (("pull", pull, ()), ("push", push, (tf.constant(0.0),))):
        function = function.get_concrete_function(*arguments)  # Outside the servers' scope.
        for repeats in (10, number):
            started = time.perf_counter()
            for _ in range(repeats):
                servers.coordinator.schedule(function, args=arguments)
            servers.coordinator.join()
            seconds = time.perf_counter() - started
        times_ms[f"{name}_ms"] = 1e3 * NUM_WORKERS * seconds / number
    return times_ms


def summarized(rounds, killed):
    def median(values):
        return float(np.median(list(values)))

    ours = [result["asynchronous"] for result in rounds]
    step, plain = (median(values) for values in (
        (each["step_ms"] for each in ours), (result["unjoined"] for result in rounds)
    ))  # fmt: skip
    pull, push = (median(each[f"{name}_ms"] for each in ours) for name in ("pull", "push"))
    return {
        "step_ms": step,
        "unjoined_ms": plain,
        "pull_ms": pull,
        "push_ms": push,
        "over_allowed": median(
            each["step_ms"] / (result["unjoined"] + each["pull_ms"] + each["push_ms"])
            for each, result in zip(ours, rounds, strict=True)
        ),
        "chief_ms": median(each["chief_ms"] for each in ours),
        "mean_staleness": median(each["mean"] for each in ours),
        "largest_staleness": max(each["largest"] for each in ours),
        "bound": ours[0]["bound"],
        "killed_step_ms": killed["step_ms"],
        "killed_updates": killed["updates"],
    }


def page(results):
    verdict = "reached" if results["over_allowed"] <= TARGET else "missed"
    return [
        "## Asynchronous steps: 2 workers, 1 server",
        "",
        f"`models/digits_cnn.py`, {NUM_UPDATES} updates of {ROWS} examples; milliseconds of a "
        "worker's step, medians of the rounds. All processes, the chief and the server too, share "
        f"{os.cpu_count()} cores.",
        "",
        *contest.table(
            ["", "ms"],
            ["a step of two processes that are not joined", f"{results['unjoined_ms']:.1f}"],
            ["to read the weights (pull)", f"{results['pull_ms']:.1f}"],
            ["to hand over gradients, and their update (push)", f"{results['push_ms']:.1f}"],
            ["**an asynchronous step**", f"**{results['step_ms']:.1f}**"],
        ),
        "",
        f"In such a step the chief computes for {results['chief_ms']:.1f} ms, on the same cores.",
        "",
        f"Over the sum of the first three: {results['over_allowed']:.2f} (at most {TARGET:.2f}: "
        f"{verdict}). Staleness: {results['mean_staleness']:.2f} on average, at most "
        f"{results['largest_staleness']}; the bound is {results['bound']}.",
        "",
        f"With worker 1 killed a second after the start: {results['killed_updates'] - 40} updates "
        f"of {NUM_UPDATES} were done, by the other one, in "
        f"{results['killed_step_ms'] / 2:.1f} ms each.",
    ]


if __name__ == "__main__":
    contest.run(main)
