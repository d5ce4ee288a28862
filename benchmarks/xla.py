"""Counts the XLA programs of a step, and times compiling and training, on one device and on two.

    .venv/bin/python benchmarks/xla.py --kind=GPU --report=xla.jsonl
    .venv/bin/python benchmarks/xla.py resnet50 --ways=plain,one --precision=mixed_bfloat16
    .venv/bin/python benchmarks/xla.py --kind=GPU --together --memory_mib=5000

Two devices are the halves of one, so two replicas do twice the work of one on it. Each way runs in
its own process with a deadline, one after the other. With `--together`, which saves time, all
compile side by side, and then train one after the other while nothing else runs. On CPUs the
networks are small, since only the programs are counted there.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import contest

PROGRAM = contest.PAGE.with_name("xla_run.py")
NETWORKS = {
    "resnet50": ("plain", "one", "two_own", "two", "two_uncompiled", "mirrored"),
    "transformer": (
        *("plain", "one", "two", "two_uncompiled", "mirrored"),
        *("model", "tensor", "pipeline"),
    ),
}
TITLES = {
    "plain": "plain Keras",
    "one": "`MirroredStrategy` of ours, one device",
    "two": "`data_parallel`, two replicas",
    "two_own": "`data_parallel`, two replicas, own moments",
    "two_uncompiled": "`data_parallel`, two replicas, without XLA",
    "mirrored": "`tf.distribute.MirroredStrategy`, without XLA",
    "model": "`model_parallel`",
    "tensor": "`tensor_parallel`",
    "pipeline": "`pipeline_parallel`, M = 2",
}
TRAINING_SECONDS = 120
COLUMNS = (
    "",
    "XLA programs",
    "first step, s",
    "its processor time, s",
    "step, ms",
    "over plain",
    "peak memory, MiB",
    "first losses",
)


def main(arguments):
    options = parse(arguments)
    end = time.monotonic() + options.total_seconds
    rows = []
    for network in options.networks:
        ways = [way for way in options.ways or NETWORKS[network] if way in NETWORKS[network]]
        for index in range(options.repeat):
            in_order = ways if index % 2 == 0 else ways[::-1]
            for group in [in_order] if options.together else [[way] for way in in_order]:
                for row in measured(network, group, options, end):
                    rows.append(row | {"round": index + 1, "kind": options.kind})
                    print(json.dumps(rows[-1]), flush=True)
                    if options.report:
                        with open(options.report, "a") as file:
                            print(json.dumps(rows[-1]), file=file)
    print("\n".join(page(rows)))
    return int(any("error" in row for row in rows))


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=" or ".join(NETWORKS))
    parser.add_argument("--kind", choices=("GPU", "CPU"), default="CPU", help="of device")
    parser.add_argument(
        "--ways", type=lambda text: text.split(","), help=f"of {', '.join(TITLES)}; by default all"
    )
    parser.add_argument(
        "--precision", choices=("float32", "mixed_bfloat16"), default="float32", help="float32"
    )
    parser.add_argument("--steps", type=contest.positive, default=20, help="timed ones (20)")
    parser.add_argument("--warm_steps", type=contest.positive, default=5, help="before them (5)")
    parser.add_argument("--repeat", type=contest.positive, default=1, help="rounds (1)")
    parser.add_argument("--together", action="store_true", help="compile side by side")
    parser.add_argument(
        "--memory_mib", type=contest.positive, default=0, help="of each part of a GPU; all of it"
    )
    parser.add_argument("--seconds", type=float, default=300, help="to compile in (300)")
    parser.add_argument("--total_seconds", type=float, default=3600, help="for all (3600)")
    parser.add_argument("--report", metavar="PATH", help="append a line of JSON for each")
    options = parser.parse_args(arguments)
    options.networks = options.networks or list(NETWORKS)
    for what, allowed, received in (
        ("network", NETWORKS, options.networks),
        ("way", TITLES, options.ways or ()),
    ):
        if unknown := [name for name in received if name not in allowed]:
            parser.error(
                f"each {what} must be one of {', '.join(allowed)}. Received: {', '.join(unknown)}"
            )
    if options.report and not pathlib.Path(options.report).resolve().parent.is_dir():
        parser.error(f"the folder of a file to write must exist. Received: {options.report}")
    return options


def measured(network, ways, options, end):
    """Yields the results of each way: all, or those known when it failed or ran out of time."""
    with contextlib.ExitStack() as stack:
        running = [Run(stack, network, way, options) for way in ways]
        compiled_by = min(end, time.monotonic() + options.seconds)
        for run in running:
            run.wait_until_compiled(compiled_by)
        for run in running:
            run.train(min(end, time.monotonic() + TRAINING_SECONDS))
            yield run.row()


class Run:
    """A process of `xla_run.py`.

    Args:
        stack: An `ExitStack`, which ends it.
        network: Key of `NETWORKS`.
        way: Key of `TITLES`.
        options: What `parse` returned.
    """

    def __init__(self, stack, network, way, options):
        self._settings = {"network": network, "way": way, "precision": options.precision}
        self._output, self._log = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        # Measures this checkout, not an installed package.
        folders = filter(None, [str(contest.TOP), os.environ.get("PYTHONPATH")])
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
        if options.kind == "CPU":
            variables |= {"CUDA_VISIBLE_DEVICES": "-1"}
        words = (network, way, options.kind, options.precision, options.memory_mib)
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, (*words, options.warm_steps, options.steps))],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._log,
            env=variables,
        )
        stack.callback(self._end)
        self._error = None

    def wait_until_compiled(self, end):
        """Waits for the process's line after its first step; stops it at the deadline."""
        while not self._printed() and self._process.poll() is None:
            if time.monotonic() > end:
                self._error = "not compiled when its time was over"
                self._end()
            time.sleep(0.05)

    def train(self, end):
        """Lets the process train, and waits for it to end."""
        try:
            self._process.communicate(b"go\n", max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._error = "stopped while it trained"
            self._end()
        if self._process.returncode and not self._error:
            lines = read(self._log).strip().splitlines()
            self._error = f"exit code {self._process.returncode}: " + "\n".join(lines[-5:])[-600:]

    def row(self):
        """Returns the last line that it printed, and the reason of a failure."""
        row = json.loads(self._printed()[-1]) if self._printed() else self._settings
        return row | ({"error": self._error} if self._error else {})

    def _printed(self):
        return [line for line in read(self._output).splitlines() if line.startswith('{"network"')]

    def _end(self):
        self._process.kill()
        self._process.wait()


def read(file):
    """Returns the whole lines that another process has written so far."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), size, 0).decode(errors="replace")
    return text[: text.rfind("\n") + 1]


def page(results):
    """The lines of a table for each network; times over `plain` of the same round."""
    lines = []
    for network in dict.fromkeys(row["network"] for row in results):
        rows = [row for row in results if row["network"] == network]
        plain = {row["round"]: row.get("step_ms") for row in rows if row["way"] == "plain"}
        lines += ["", f"### {network}, {rows[0]['precision']}, {rows[0]['kind']}", ""]
        lines += contest.table(COLUMNS, *(cells(row, plain.get(row["round"])) for row in rows))
    return lines


def cells(row, plain_ms):
    def by_device(counts):
        return ", ".join(f"{name} {number}" for name, number in counts.items()) or "none"

    step_ms, title = row.get("step_ms"), TITLES[row["way"]]
    if "error" in row:
        title += f": {row['error'].splitlines()[-1][:160]}"
    return [
        title,
        by_device(row["programs"]) if "programs" in row else "",
        str(row.get("first_seconds", "")),
        str(row.get("first_cpu_seconds", "")),
        f"{step_ms:.1f}" if step_ms else "",
        f"{step_ms / plain_ms:.2f}" if step_ms and plain_ms else "",
        by_device(row["peak_mib"]) if "peak_mib" in row else "",
        ", ".join(f"{loss:.5f}" for loss in row.get("losses", ())),
    ]


if __name__ == "__main__":
    contest.run(main)
