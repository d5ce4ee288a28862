"""The parts that the benchmarks share: options, the environment, groups of processes, and pages.

A page, RESULTS.md, has a block for each benchmark, between the block's own marks. A block may end
in a comment that is not shown: its figures, in JSON, for `summary.py`.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import sys

import numpy as np
from contender_process import ContenderProcess

TOP = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(TOP))
from tfparallel.cluster.launcher.local_workers import worker_environment  # noqa: E402
from tfparallel.cluster.ports import free_ports  # noqa: E402
from tfparallel.cluster.rendezvous import Rendezvous  # noqa: E402

PAGE = pathlib.Path(__file__).with_name("RESULTS.md")
HEAD = """\
# Results

What the programs of this folder measured. Each writes a block, with the machine and the day it ran
on; `make bench` runs them all.
"""
FIRST = "summary"  # The first block of the page.
FIGURES = re.compile(r"^<!-- figures: (.*) -->$", re.MULTILINE)


def job_environments(num_processes, hosts=None):
    """Returns the variables that `launch` would give each process of a job.

    Args:
        num_processes: How many processes.
        hosts: An address for each, if each has its own host; by default all are on this host.
    """
    first, *ports = free_ports(num_processes + 1)
    names = hosts or ["127.0.0.1"] * num_processes
    addresses = [f"{name}:{port}" for name, port in zip(names, ports, strict=True)]
    master = f"{names[0]}:{first}"
    by_node = [[address] for address in addresses] if hosts else [addresses]
    return [
        worker_environment(
            {"PATH": os.environ["PATH"]},
            Rendezvous(by_node, master, "bench", node=node),
            local_rank,
        )
        for node, ranks in enumerate(by_node)
        for local_rank in range(len(ranks))
    ]


class Group:
    """The processes of one contender, a core each, which work together.

    Args:
        stack: An `ExitStack`, which ends the processes.
        workload: The workload, by the name that their program knows.
        kind: The contender's kind, by the name that their program knows.
        environments: The variables of each process, added to this one's own.
        cores: A core for each process; empty for no pinning.
        program: A Python and a program that uses `dialog.py`.
        num_speaking: The number of processes that answer, the first ones; by default all.

    Attributes:
        peak_mib: The highest peak memory of one of them, if they report it.
        sent_bytes: The most bytes that one of them sent in a step, if they report it.
    """

    peak_mib = 0.0
    sent_bytes = 0.0

    def __init__(self, stack, workload, kind, environments, *, cores, program, num_speaking=None):
        self.processes = []
        for index, variables in enumerate(environments):
            process = ContenderProcess(
                workload,
                kind,
                len(environments),
                cores=cores[index : index + 1],
                num_threads=1,
                environment=variables,
                program=program,
            )
            stack.callback(process.close)
            self.processes.append(process)
        self.speaking = self.processes[:num_speaking]

    def wait_until_ready(self):
        """Returns each process's description of itself."""
        return [process.wait_until_ready() for process in self.speaking]

    def ask(self, num_steps=0, /, **request):
        """Sends the same request to all, which train together, and returns their answers."""
        for process in self.speaking:
            process.ask(**request)
        return [process.answer(num_steps) for process in self.speaking]

    def train(self, num_steps, skip):
        """Returns the median step in milliseconds: of the slowest process, step by step."""
        replies = self.ask(num_steps, steps=num_steps, skip=skip)
        self.peak_mib = max([self.peak_mib, *(reply.get("peak_mib", 0.0) for reply in replies)])
        self.sent_bytes = max(reply.get("sent_bytes_a_step", 0.0) for reply in replies)
        return 1e3 * float(np.median(np.max([r["step_seconds"] for r in replies], axis=0)))


def in_turn(names, index):
    """The order of round `index`, which alternates so that none always follows the same one."""
    return names if index % 2 else names[::-1]


def rounds_in_turn(contenders, options, num_warm_up, num_steps, skip, name=""):
    """Trains each contender in each round; returns the median step of every round.

    Args:
        contenders: Groups, by their name in the result.
        options: The command line's options.
        num_warm_up: Rounds that do not count.
        num_steps: Steps of each round.
        skip: First steps of a round, which are not timed.
        name: Printed on stderr before each round.
    """
    rounds = []
    for index in range(-num_warm_up, options.num_rounds):
        order = in_turn(list(contenders), index)
        rounds.append({kind: contenders[kind].train(num_steps, skip) for kind in order})
        print(f"{name}round {index + 1}: {rounds[-1]}", file=sys.stderr)
    return rounds[num_warm_up:]


def percentiles(values):
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def spread(value, digits):
    """Returns `percentiles` as text."""
    median, p10, p90 = (f"{value[key]:.{digits}f}" for key in ("median", "p10", "p90"))
    return f"{median} ({p10} to {p90})"


def make_parser(doc, num_rounds=None, *, torch=False):
    """Returns a parser of `--write`, and on request of `--num_rounds` and `--torch`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if num_rounds is not None:
        parser.add_argument(
            "--num_rounds", type=positive, default=num_rounds, help=f"timed rounds ({num_rounds})"
        )
    if torch:
        parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="PATH", help="write every figure here")
    parser.add_argument(
        "--write", metavar="PATH", default=PAGE, help="the page to renew; empty for none"
    )
    return parser


def parse(parser, arguments):
    """Parses; a file that cannot be written is an error now, not after the measurement.

    Returns:
        The options, and the `environment` before anything raises the load.
    """
    options = parser.parse_args(arguments)
    options.program, options.environment = parser.prog, describe()
    for path in filter(None, [options.json, options.write]):
        if not pathlib.Path(path).resolve().parent.is_dir():
            parser.error(f"the folder of a file to write must exist. Received: {path}")
    return options


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def publish(name, lines, results, options, *flags, figures=None, versions=None):
    """Prints a benchmark's lines, and writes them and its figures where the options say.

    Args:
        name: The block of the page.
        lines: What the page shows. The environment follows, and the command that measures again.
        results: Every figure, for `--json`.
        options: What `parse` returned.
        *flags: Names of the options that the command repeats.
        figures: The figures for `summary.py`; the date is added.
        versions: Of what was measured.
    """
    if name != FIRST:
        lines = [*lines, *footer(options, flags, versions or {})]
    print("\n".join(lines))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    if options.write:
        if figures is not None:
            figures = {"date": options.environment["Date"]} | figures
        write_block(pathlib.Path(options.write), name, lines, figures)


def footer(options, flags, versions):
    words = [
        f"--{name}{f'={value}' * (value is not True)}"
        for name in flags
        for value in np.atleast_1d(getattr(options, name)).tolist()
        if value is not None and value is not False
    ]
    words += ["--torch=PYTHON_WITH_TORCH"] if getattr(options, "torch", None) else []
    described = (options.environment | versions).items()
    return [
        "",
        "Environment: " + "; ".join(f"{key}: {value}" for key, value in described) + ".",
        "",
        f"To reproduce: `{' '.join(['.venv/bin/python', f'benchmarks/{options.program}', *words])}`"
        ", on two idle cores.",
    ]


def table(head, *rows):
    """Returns the lines of a Markdown table; cells are texts or numbers."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def versions_of(replies):
    """Returns the versions in what contenders tell of themselves."""
    names = ("tensorflow", "keras", "torch")
    return {key: value for reply in replies for key, value in reply.items() if key in names}


def write_block(path, name, lines, figures=None):
    """Writes the lines between the marks of `name`, or at the end of the page.

    Args:
        path: The page; created if there is none.
        name: The block's name.
        lines: What the page shows.
        figures: What `read_figures` returns of this block: dictionaries, numbers and text. Four
            decimals are kept, more than any of them is accurate to.
    """
    text = path.read_text() if path.exists() else HEAD
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    hidden = []
    if figures is not None:
        rounded = json.loads(json.dumps(figures), parse_float=lambda text: round(float(text), 4))
        hidden = ["", f"<!-- figures: {json.dumps(rounded)} -->"]
    block = "\n".join([begin, *lines, *hidden, end]) + "\n"
    pattern = re.compile(f"{begin}.*?{end}\n", re.DOTALL)
    first = re.search(r"^<!-- \w+: begin -->$", text, re.MULTILINE)
    if pattern.search(text):
        text = pattern.sub(lambda _: block, text)
    elif name == FIRST and first:
        text = f"{text[: first.start()]}{block}\n{text[first.start() :]}"
    else:
        text = f"{text}\n{block}"
    path.write_text(text)


def read_figures(path):
    """Returns the figures by block, of those blocks that have any."""
    text = path.read_text() if path.exists() else ""
    blocks = re.finditer(r"<!-- (\w+): begin -->.*?<!-- \1: end -->\n", text, re.DOTALL)
    figures = {block[1]: FIGURES.search(block[0]) for block in blocks}
    return {name: json.loads(match[1]) for name, match in figures.items() if match}


def describe():
    """Returns the machine, the system and the day, in texts; nothing that identifies the host."""
    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "Logical cores": str(os.cpu_count()),
        "Memory": f"{int(memory.split()[0]) / 2**20:.0f} GiB" if memory else "unknown",
        "System": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "Python": platform.python_version(),
        "Date": datetime.date.today().isoformat(),
        # Near 0 on an idle machine.
        "Load average before the start": f"{os.getloadavg()[0]:.2f}",
    }


def _field(path, name):
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def cores_to_pin(num_cores):
    """Returns the first cores that this process may use; none if the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))[:num_cores]


def run(main):
    """Runs a benchmark's `main`; an expected failure prints one line instead of a traceback.

    SIGTERM ends it like Ctrl-C, with every process that it has started.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
