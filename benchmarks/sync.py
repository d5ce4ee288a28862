"""Trains two tasks by each policy of synchronization and compression, on 2 workers, a core each.

    .venv/bin/python benchmarks/sync.py
    .venv/bin/python benchmarks/sync.py --task=digits_cnn --policy=every_step --policy=bf16

For each policy and seed: the final accuracy, the steps and seconds to a fixed validation loss, and
the bytes sent. The tasks are from `models/`: scikit-learn's digits, and the text of Python's own
documentation. With one seed all policies start with the same weights, and see the same batches.
Learning rates are those of the task files; none is tuned for a policy. Policies take turns, one run
each, in alternating order; the others idle meanwhile.
"""

import contextlib
import pathlib
import sys

import contest
import numpy as np
from contender import POLICIES, steps_that_trace
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sync_contender import EVALUATED_EVERY, TASKS

from tfparallel.cluster.environment import ALL_REDUCE

PROGRAM = str(pathlib.Path(__file__).with_name("sync_contender.py"))
NUM_WORKERS = 2
NUM_SEEDS, NUM_EPOCHS = 3, 2
PICTURE = "sync.png"
# Validation losses up to which steps and seconds are counted.
TARGET_LOSSES = {"digits_cnn": 0.10, "transformer": 2.80}
TITLES = {
    "digits_cnn": "Digits: the CNN of `models/digits_cnn.py`, 64 examples a step",
    "transformer": "Text: the transformer of `models/transformer.py`, 32 sequences of 64 a step",
}
PLAIN = "every_step"
JUDGED = "digits_cnn"  # The task whose figures have targets.
# Policy -> at most this share of the bytes of `every_step`.
BYTES_TARGETS = {
    "bf16": 0.505,  # Half, plus the data sent beside the gradients.
    "topk:0.01": 0.03,
    "powersgd:2": 0.05,
    "local_sgd:8": 1 / 7,
}
# Points of accuracy that a policy may lose against `every_step`: of the mean over the last looks of
# all seeds, as one example of 359 is 0.28 points, and the last steps move several of them.
NUM_LAST_LOOKS = 5
ACCURACY_TARGETS = dict.fromkeys(["bf16", "fp16", "topk:0.01", "powersgd:2", "local_sgd:8"], 0.5)
# Colours that color-blind readers can tell apart (Okabe and Ito, 2008).
COLOURS = (
    *("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73"),
    *("#CC79A7", "#882255", "#E69F00", "#999933"),
)


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_WORKERS)
    reply, runs = measure(options, cores)
    summaries = {
        task: summarize(of_policies, TARGET_LOSSES[task]) for task, of_policies in runs.items()
    }
    if options.write:
        draw(pathlib.Path(options.write).with_name(PICTURE), runs)
    written = {"figures": figures_of(summaries), "versions": contest.versions_of([reply])}
    results = {"runs": runs, "figures": summaries}
    contest.publish("sync", page(summaries, options), results, options, "num_seeds", **written)


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument(
        "--num_seeds", type=contest.positive, default=NUM_SEEDS, help=f"({NUM_SEEDS})"
    )
    multiple = EVALUATED_EVERY * NUM_EPOCHS
    parser.add_argument(
        "--num_steps", type=contest.positive, help=f"of a run, a multiple of {multiple}"
    )
    for name, choices in (("task", TASKS), ("policy", POLICIES)):
        parser.add_argument(
            f"--{name}", action="append", choices=choices, help="repeatable; all if left out"
        )
    options = contest.parse(parser, arguments)
    if options.num_steps is not None and options.num_steps % multiple:
        parser.error(
            f"--num_steps must be a multiple of {multiple}, so that each of {NUM_EPOCHS} epochs "
            f"ends where weights are evaluated. Received: {options.num_steps}"
        )
    return options


def measure(options, cores):
    """Returns a contender's description of itself, and the runs: task -> policy -> by seed."""
    reply, runs = {}, {}
    for task in options.task or TASKS:
        # New processes for each task: trained models stay in memory.
        with contextlib.ExitStack() as stack:
            groups = {name: start(name, stack, cores) for name in options.policy or POLICIES}
            reply = [group.wait_until_ready()[0] for group in groups.values()][0]
            runs[task] = measure_task(task, groups, options)
    return reply, runs


def measure_task(task, groups, options):
    """Returns the runs of a task: policy -> by seed."""
    num_steps = options.num_steps or TASKS[task].num_steps
    runs = {policy: [] for policy in groups}
    for seed in range(options.num_seeds):
        for policy in contest.in_turn(list(groups), seed):
            replies = groups[policy].ask(
                task=task, seed=seed, num_steps=num_steps, num_epochs=NUM_EPOCHS
            )
            run = of_workers(replies, steps_that_trace(policy))
            runs[policy].append(run)
            print(
                f"{task}, seed {seed}, {policy}: accuracy {run['accuracy']:.4f}, "
                f"{run['sent_bytes_in_all'] / 1e6:.2f} MB, {run['step_ms']:.1f} ms a step",
                file=sys.stderr,
            )
    return runs


def start(policy, stack, cores):
    """Starts the workers of a policy, connected like those of several hosts."""
    variables = [
        each | {ALL_REDUCE: "tensorflow"} for each in contest.job_environments(NUM_WORKERS)
    ]
    return contest.Group(
        stack, "sync", policy, variables, cores=cores, program=(sys.executable, PROGRAM)
    )


def of_workers(replies, skipped):
    """Reduces the replies of a job's workers to one run.

    Args:
        replies: One a worker, as `sync_contender.train` returns them.
        skipped: Steps, from 0, that are not timed.

    Returns:
        A dictionary: `losses`, `accuracies`, `seconds` and `sent_bytes` of each point that was
        evaluated, the figures of the end, and `step_ms`.

    Raises:
        RuntimeError: If the workers ended with other weights, or were ever evaluated to others.
    """
    first, *others = replies
    for other in others:
        if any(other[key] != first[key] for key in ("losses", "loss", "accuracy")):
            raise RuntimeError(f"The workers have different weights. Received: {replies}")
    steps = np.array([reply["seconds"] for reply in replies])
    steps[:, [step for step in skipped if step < steps.shape[1]]] = 0.0
    # Of the slower worker, up to each point.
    clock = np.max(np.cumsum(steps, axis=1), axis=0)
    num_timed = np.count_nonzero(steps[0])
    keys = ("losses", "accuracies", "sent_bytes")
    keys += ("sent_bytes_in_all", "num_reductions", "loss", "accuracy")
    return {key: first[key] for key in keys} | {
        "seconds": clock[EVALUATED_EVERY - 1 :: EVALUATED_EVERY].tolist(),
        "step_ms": 1e3 * float(clock[-1]) / max(num_timed, 1),
    }


def reached(run, target):
    """Returns (steps, seconds) until the validation loss is at most `target`; None if never."""
    for index, loss in enumerate(run["losses"]):
        if loss <= target:
            return (index + 1) * EVALUATED_EVERY, run["seconds"][index]
    return None


def summarize(runs, target):
    """Reduces a task's runs to figures by policy.

    Args:
        runs: Policy -> a run for each seed.
        target: The loss to reach.
    """
    plain = runs.get(PLAIN)
    return {policy: _of_policy(of_seeds, plain, target) for policy, of_seeds in runs.items()}


def _of_policy(of_seeds, plain, target):
    accuracies = [100 * run["accuracy"] for run in of_seeds]
    summary = {
        "accuracy": float(np.mean(accuracies)),
        "least_accuracy": min(accuracies),
        "most_accuracy": max(accuracies),
        "last_accuracy": _last_accuracy(of_seeds),
        "loss": float(np.mean([run["loss"] for run in of_seeds])),
        "sent_mb": float(np.mean([run["sent_bytes_in_all"] for run in of_seeds])) / 1e6,
        "num_reductions": max(run["num_reductions"] for run in of_seeds),
        "step_ms": float(np.median([run["step_ms"] for run in of_seeds])),
        "reached": [reached(run, target) for run in of_seeds],
    }
    if plain is not None:
        plain_mb = float(np.mean([run["sent_bytes_in_all"] for run in plain])) / 1e6
        summary["bytes_over_every_step"] = summary["sent_mb"] / plain_mb
        summary["points_lost"] = _last_accuracy(plain) - summary["last_accuracy"]
    return summary


def _last_accuracy(of_seeds):
    return 100 * float(np.mean([run["accuracies"][-NUM_LAST_LOOKS:] for run in of_seeds]))


def verdicts(figures):
    """Returns every target as (what, measured, target, reached).

    Args:
        figures: What `summarize` returns of `JUDGED`; policies that did not run are left out.
    """
    if PLAIN not in figures:
        return []
    rows = []
    for policy, share in BYTES_TARGETS.items():
        if policy in figures:
            measured = figures[policy]["bytes_over_every_step"]
            row = (f"{measured:.4f}", f"at most {share:.3f}", measured <= share)
            rows.append((f"`{policy}`: bytes, over those of `{PLAIN}`", *row))
    for policy, points in ACCURACY_TARGETS.items():
        if policy in figures:
            lost = figures[policy]["points_lost"]
            row = (f"{lost:+.2f}", f"at most {points}", lost <= points)
            rows.append((f"`{policy}`: points of accuracy lost against `{PLAIN}`", *row))
    return rows


def lines_of(figures, num_steps):
    """The page's lines for all tasks: targets, and a table each.

    Args:
        figures: Task -> what `summarize` returns.
        num_steps: Task -> steps of a run.
    """
    lines = []
    if rows := verdicts(figures.get(JUDGED, {})):
        words = {True: "reached", False: "**missed**"}
        judged = [(*row, words[is_met]) for *row, is_met in rows]
        head = ("promise, on digits", "measured", "promised", "verdict")
        lines += [*contest.table(head, *judged), ""]
    for task, of_policies in figures.items():
        target = TARGET_LOSSES[task]
        head = ("policy", "accuracy in the end, %", f"of the last {NUM_LAST_LOOKS} looks")
        head += ("MB sent", f"over `{PLAIN}`", "sums", f"steps to a loss of {target:.2f}")
        rows = [_row(*of_policy, num_steps[task]) for of_policy in of_policies.items()]
        lines += [f"### {TITLES[task]}, {num_steps[task]} steps", ""]
        lines += [*contest.table((*head, "seconds to it", "ms a step"), *rows), ""]
    return lines


def _row(policy, summary, num_steps):
    low, high = summary["least_accuracy"], summary["most_accuracy"]
    share = summary.get("bytes_over_every_step")
    steps, seconds = _until(summary["reached"], num_steps)
    return [
        f"`{policy}`",
        f"{summary['accuracy']:.2f} ({low:.2f} to {high:.2f})",
        f"{summary['last_accuracy']:.2f}",
        f"{summary['sent_mb']:,.2f}",
        "" if share is None else f"{share:.4f}",
        f"{summary['num_reductions']:,}",
        steps,
        seconds,
        f"{summary['step_ms']:.1f}",
    ]


def _until(reached_by_seed, num_steps):
    """The two cells about the loss to reach: medians over the seeds, and their range."""
    there = [pair for pair in reached_by_seed if pair is not None]
    missing = len(reached_by_seed) - len(there)
    if missing:
        return f"not in {num_steps}, {missing} of {len(reached_by_seed)} seeds", ""
    steps, seconds = (sorted(values) for values in zip(*there, strict=True))
    middle = len(steps) // 2
    return (
        f"{steps[middle]} ({steps[0]} to {steps[-1]})",
        f"{seconds[middle]:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})",
    )


def figures_of(figures):
    """Returns the figures for other programs: shares of bytes, points of accuracy."""
    keys = ("accuracy", "last_accuracy", "bytes_over_every_step", "points_lost", "step_ms")
    return {
        task: {
            policy: {key: summary[key] for key in keys if key in summary}
            for policy, summary in of_policies.items()
        }
        for task, of_policies in figures.items()
    }


def draw(path, runs):
    """Draws a row of two axes for each task: means over the seeds.

    Args:
        path: Where the PNG goes.
        runs: Task -> policy -> a run for each seed, as `of_workers` returns them.
    """
    figure = Figure(figsize=(12, 4.5 * len(runs)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 2, sharey="row", squeeze=False)
    for (over_steps, over_bytes), (task, of_policies) in zip(rows, runs.items(), strict=True):
        for colour, (policy, of_seeds) in zip(COLOURS, of_policies.items(), strict=False):
            losses = np.mean([run["losses"] for run in of_seeds], axis=0)
            sent = np.mean([run["sent_bytes"] for run in of_seeds], axis=0) / 1e6
            steps = EVALUATED_EVERY * np.arange(1, len(losses) + 1)
            style = {"color": colour, "linewidth": 1.4, "label": policy}
            over_steps.plot(steps, losses, **style)
            over_bytes.plot(sent, losses, **style)
        over_steps.set(xlabel="steps", ylabel="validation loss, mean of the seeds")
        over_bytes.set(xlabel="MB that a worker has sent", xscale="log")
        over_steps.set_title(TITLES[task].partition(":")[0])
        over_steps.set_yscale("log")
        for axes in (over_steps, over_bytes):
            axes.axhline(TARGET_LOSSES[task], color="#999999", linewidth=0.8, linestyle=":")
            axes.grid(alpha=0.25)
    rows[0][1].legend(fontsize=8)
    figure.savefig(path)


def page(summaries, options):
    """The lines of RESULTS.md about policies."""
    lines = [
        "## Policies: when workers agree, and what they send",
        "",
        f"`fit` in {NUM_EPOCHS} epochs on 2 workers, joined by TensorFlow's ring; means over "
        f"{options.num_seeds} seeds, with the least and the most. "
        "From a seed all policies start with the same weights and see the same batches, at the "
        "task file's learning rate, which is tuned for none of them. Bytes are those that one "
        "worker hands to the others in the whole run; losses and accuracy are of examples that "
        f"were held out, looked at after every {EVALUATED_EVERY} steps. Seconds are of steps alone,"
        " of the slower worker, without those that trace: they depend on what else the machine "
        "does, bytes and accuracy do not.",
        "",
        *lines_of(
            summaries, {task: options.num_steps or TASKS[task].num_steps for task in summaries}
        ),
    ]
    if options.write:
        lines += [f"![Validation loss over steps, and over what was sent]({PICTURE})", ""]
    return lines[:-1]


if __name__ == "__main__":
    contest.run(main)
