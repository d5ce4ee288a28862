"""Writes the targets, each beside the measured figure, at the top of RESULTS.md.

    .venv/bin/python benchmarks/summary.py

It measures nothing itself: it reads the figures that the other programs left in RESULTS.md, and
counts the lines of the package. `benchmarks/all.py` runs it last.
"""

import datetime
import pathlib
from typing import NamedTuple

import contest
import data_parallel
import first_epoch
import pipeline
import scaling

PACKAGE = contest.TOP / "tfparallel"
# The package's lines before all parallelisms shared one step.
LINES_BEFORE = 28_700
UNJOINED = "two plain processes at once that are not joined"


class Row(NamedTuple):
    """A figure and its target.

    Attributes:
        what: The figure, for people.
        path: Its place among the figures of RESULTS.md: block, and keys within it.
        target: The value to reach.
        is_least: Whether the target is a lower bound.
        forms: The formats of the figure and its target; the figure has a digit more, so that a
            value close to the target can be told from it.
    """

    what: str
    path: tuple[str, ...]
    target: float
    is_least: bool = False
    forms: tuple[str, str] = ("{:.3f}", "{:.2f}")


def of_language_model(what, key, target, **options):
    path = ("scaling", scaling.LANGUAGE_MODEL, key)
    return Row(f"language model, 2 workers: {what}", path, target, **options)


def of_network(what, workload):
    return Row(
        f"{what} a worker: step of the unjoined over ours",
        ("scaling", workload, "unjoined_over_step"),
        scaling.TARGETS[workload],
        is_least=True,
    )


def of_replicas(what, workload, pair):
    return Row(
        f"{what}, {workload.replace('_', '-')}: step of ours over theirs",
        ("data_parallel", workload, "/".join(pair)),
        data_parallel.TARGETS[workload][pair],
    )


ONE, TWO = ("ours_1", "plain_1"), ("ours_2", "stock_2")
ROWS = [
    of_language_model("step over the unjoined", "step_over_unjoined", scaling.STEP_TARGET),
    of_language_model("memory over the unjoined", "memory_over_unjoined", scaling.MEMORY_TARGET),
    of_language_model(
        "sent by a worker beyond its gradients",
        "sent_beyond_gradients_kib",
        scaling.SENT_TARGET_KIB,
        forms=("{:,.1f} KiB", "{:,.0f} KiB"),
    ),
    of_network("CNN of 1.2 M parameters, 32 examples", "cnn_32"),
    of_network("CNN of 1.2 M parameters, 128 examples", "cnn_128"),
    of_network("CNN of 9.5 M parameters, 32 examples", "wide_cnn_32"),
    of_replicas("1 replica against plain Keras", "dispatch_bound", ONE),
    of_replicas("1 replica against plain Keras", "compute_bound", ONE),
    of_replicas("2 replicas against `MirroredStrategy`", "dispatch_bound", TWO),
    of_replicas("2 replicas against `MirroredStrategy`", "compute_bound", TWO),
    Row(
        "first epoch of MobileNetV2, 2 replicas: over plain Keras's",
        ("first_epoch", "mobilenet_v2", "epoch_over_plain"),
        first_epoch.EPOCH_TARGET,
    ),
    Row(
        "pipeline of 10.8 M parameters, M = 8: time to trace",
        ("first_epoch", "transformer", "tracing_seconds"),
        first_epoch.TRACING_TARGET_SECONDS,
        forms=("{:.2f} s", "{:.0f} s"),
    ),
    Row(
        "pipeline of 10.8 M parameters, M = 8: step over PyTorch's",
        ("pipeline", "m_8", "ours_over_torch"),
        pipeline.OVER_TORCH,
    ),
]


def main(arguments):
    options = contest.parse(contest.make_parser(__doc__), arguments)
    figures = contest.read_figures(pathlib.Path(options.write)) if options.write else {}
    num_lines = count_lines(PACKAGE)
    today = datetime.date.today().isoformat()
    report = {"figures": figures, "num_lines": num_lines}
    contest.publish("summary", page(figures, num_lines, today), report, options)


def count_lines(folder):
    """Returns the number of lines of the Python files below a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def page(figures, num_lines, today):
    """The lines of RESULTS.md that show the targets.

    Args:
        figures: What `contest.read_figures` returns.
        num_lines: Lines of the package.
        today: The date on which they were counted.
    """
    lines = [
        "## Figures to reach",
        "",
        f"Medians, with the 10th and 90th percentile of the rounds. Unjoined: {UNJOINED}, each on "
        "its own rows.",
        "",
        "| what | measured | to reach | verdict |",
        "| --- | --- | --- | --- |",
        *[row_of(row, figures) for row in ROWS],
        f"| lines in `tfparallel/` | {num_lines:,} "
        f"| below {LINES_BEFORE:,} | {verdict(num_lines < LINES_BEFORE)} |",
        "",
    ]
    names = dict.fromkeys(row.path[0] for row in ROWS)
    dates = [f"{n}, measured on {figures[n]['date']}" for n in names if n in figures]
    read = f"Read from the blocks below: {'; '.join(dates)}. " if dates else ""
    return [*lines, f"{read}Lines counted on {today}."]


def row_of(row, figures):
    """Returns a row of the table; the row of a benchmark that has not run says so."""
    value = figures
    for key in row.path:
        value = value.get(key) if value is not None else None
    form, target_form = row.forms
    target = f"at {'least' if row.is_least else 'most'} {target_form.format(row.target)}"
    if value is None:
        return f"| {row.what} | not run: `benchmarks/{row.path[0]}.py` | {target} | |"
    median = value["median"] if isinstance(value, dict) else value
    measured = form.format(median)
    if isinstance(value, dict):
        p10, p90 = (form.format(value[key]) for key in ("p10", "p90"))
        measured += f" ({p10} to {p90})"
    reached = median >= row.target if row.is_least else median <= row.target
    return f"| {row.what} | {measured} | {target} | {verdict(reached)} |"


def verdict(reached):
    return "reached" if reached else "**missed**"


if __name__ == "__main__":
    contest.run(main)
