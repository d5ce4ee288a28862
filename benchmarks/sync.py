"""Trains two tasks by each policy of synchronization and compression, on 2 workers, a core each.

    .venv/bin/python benchmarks/sync.py
    .venv/bin/python benchmarks/sync.py --task=digits_cnn --policy=every_step --policy=bf16

For each policy and seed: the accuracy in the end, the steps and seconds to a fixed validation loss,
and what was sent. Tasks are those of `models/`: scikit-learn's digits, and the text of Python's own
documentation. From a seed all policies start with the same weights, and see the same batches.
Learning rates are those of the task files; none is tuned for a policy. Policies take turns, a run
each, now forwards, now backwards; only the one whose turn it is runs.
"""

import contextlib
import pathlib
import sys

import contest
import environment
import sync_plot
import sync_results
from policies import POLICIES, steps_that_trace
from sync_contender import EVALUATED_EVERY, TASKS

from tfparallel.cluster.environment import ALL_REDUCE

PROGRAM = str(pathlib.Path(__file__).with_name("sync_contender.py"))
NUM_WORKERS = 2
NUM_SEEDS, NUM_STEPS, NUM_EPOCHS = 3, 320, 2
PICTURE = "sync.png"


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_WORKERS)
    described = environment.describe()
    told, runs = measure(options, cores)
    found = {
        task: sync_results.summarize(of_policies, sync_results.TARGET_LOSSES[task])
        for task, of_policies in runs.items()
    }
    if options.write:
        sync_plot.draw(pathlib.Path(options.write).with_name(PICTURE), runs)
    figures = sync_results.figures_of(found, described["Date"])
    lines = page(found, told, described, options)
    contest.publish("sync", lines, {"runs": runs, "figures": found}, options, figures)


def parse(arguments):
    parser = contest.make_parser(__doc__)
    for name, default, what in (
        ("num_seeds", NUM_SEEDS, "seeds of a task"),
        ("num_steps", NUM_STEPS, f"steps of a run, a multiple of {EVALUATED_EVERY * NUM_EPOCHS}"),
    ):
        parser.add_argument(
            f"--{name}", type=contest.positive, default=default, help=f"{what} ({default})"
        )
    for name, choices in (("task", TASKS), ("policy", POLICIES)):
        parser.add_argument(
            f"--{name}", action="append", choices=choices, help="repeatable; all if left out"
        )
    options = contest.parse(parser, arguments)
    if options.num_steps % (EVALUATED_EVERY * NUM_EPOCHS):
        parser.error(
            f"--num_steps must be a multiple of {EVALUATED_EVERY * NUM_EPOCHS}, so that each of "
            f"{NUM_EPOCHS} epochs ends where weights are evaluated. Received: {options.num_steps}"
        )
    return options


def measure(options, cores):
    """Returns what a contender tells of itself, and the runs: task -> policy -> by seed."""
    names, policies = options.task or list(TASKS), options.policy or list(POLICIES)
    with contextlib.ExitStack() as stack:
        groups = {policy: start(policy, stack, cores) for policy in policies}
        told = [group.wait_until_ready()[0] for group in groups.values()][0]
        runs = {task: {policy: [] for policy in policies} for task in names}
        for seed in range(options.num_seeds):
            for task in names:
                for policy in contest.in_turn(policies, seed):
                    replies = groups[policy].ask(
                        task=task, seed=seed, num_steps=options.num_steps, num_epochs=NUM_EPOCHS
                    )
                    run = sync_results.of_workers(replies, steps_that_trace(policy))
                    runs[task][policy].append(run)
                    print(
                        f"{task}, seed {seed}, {policy}: accuracy {run['accuracy']:.4f}, "
                        f"{run['sent_bytes_in_all'] / 1e6:.2f} MB, {run['step_ms']:.1f} ms a step",
                        file=sys.stderr,
                    )
    return told, runs


def start(policy, stack, cores):
    """Starts the workers of a policy, joined as those of several hosts are."""
    variables = [
        each | {ALL_REDUCE: "tensorflow"} for each in contest.job_environments(NUM_WORKERS)
    ]
    return contest.Group(
        stack, "sync", policy, variables, cores=cores, program=(sys.executable, PROGRAM)
    )


def page(found, told, described, options):
    """The lines of RESULTS.md about policies."""
    lines = [
        "## Policies: when workers agree, and what they send",
        "",
        f"{options.num_steps} steps of `fit` in {NUM_EPOCHS} epochs on 2 workers, joined by "
        f"TensorFlow's ring; means over {options.num_seeds} seeds, with the least and the most. "
        "From a seed all policies start with the same weights and see the same batches, at the "
        "task file's learning rate, which is tuned for none of them. Bytes are those that one "
        "worker hands to the others in the whole run; losses and accuracy are of examples that "
        f"were held out, looked at after every {EVALUATED_EVERY} steps. Seconds are of steps alone,"
        " of the slower worker, without those that trace: they depend on what else the machine "
        "does, bytes and accuracy do not.",
        "",
        *sync_results.lines_of(found, options.num_steps),
    ]
    if options.write:
        lines += [f"![Validation loss over steps, and over what was sent]({PICTURE})", ""]
    lines.pop()
    versions = {key: told[key] for key in ("tensorflow", "keras")}
    return lines + contest.footer("sync", described | versions, options, "num_seeds", "num_steps")


if __name__ == "__main__":
    contest.run(main)
