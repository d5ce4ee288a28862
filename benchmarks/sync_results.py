"""Reduces the runs of `sync.py` to figures of each policy, verdicts, and the page."""

import numpy as np
from sync_contender import EVALUATED_EVERY

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
        lines += ["| promise, on digits | measured | promised | verdict |"]
        lines += ["| --- | --- | --- | --- |"]
        words = {True: "reached", False: "**missed**"}
        lines += [f"| {' | '.join(row)} | {words[is_met]} |" for *row, is_met in rows]
        lines.append("")
    for task, of_policies in figures.items():
        target = TARGET_LOSSES[task]
        lines += [
            f"### {TITLES[task]}, {num_steps[task]} steps",
            "",
            f"| policy | accuracy in the end, % | of the last {NUM_LAST_LOOKS} looks | MB sent "
            f"| over `{PLAIN}` | sums | steps to a loss of {target:.2f} | seconds to it "
            "| ms a step |",
            f"|{' --- |' * 9}",
        ]
        lines += [_row(policy, summary, num_steps[task]) for policy, summary in of_policies.items()]
        lines.append("")
    return lines


def _row(policy, summary, num_steps):
    low, high = summary["least_accuracy"], summary["most_accuracy"]
    share = summary.get("bytes_over_every_step")
    steps, seconds = _until(summary["reached"], num_steps)
    cells = [
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
    return f"| {' | '.join(cells)} |"


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


def figures_of(figures, date):
    """Returns the figures for other programs: shares of bytes, points of accuracy."""
    keys = ("accuracy", "last_accuracy", "bytes_over_every_step", "points_lost", "step_ms")
    return {"date": date} | {
        task: {
            policy: {key: summary[key] for key in keys if key in summary}
            for policy, summary in of_policies.items()
        }
        for task, of_policies in figures.items()
    }
