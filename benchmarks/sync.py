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
import environment
import sync_plot
import sync_results
from policies import POLICIES, steps_that_trace
from sync_contender import EVALUATED_EVERY, TASKS

from tfparallel.cluster.environment import ALL_REDUCE

PROGRAM = str(pathlib.Path(__file__).with_name("sync_contender.py"))
NUM_WORKERS = 2
NUM_SEEDS, NUM_EPOCHS = 3, 2
PICTURE = "sync.png"


def main(arguments):
    options = parse(arguments)
    cores = environment.cores_to_pin(NUM_WORKERS)
    described = environment.describe()
    reply, runs = measure(options, cores)
    summaries = {
        task: sync_results.summarize(of_policies, sync_results.TARGET_LOSSES[task])
        for task, of_policies in runs.items()
    }
    if options.write:
        sync_plot.draw(pathlib.Path(options.write).with_name(PICTURE), runs)
    figures = sync_results.figures_of(summaries, described["Date"])
    lines = page(summaries, reply, described, options)
    contest.publish("sync", lines, {"runs": runs, "figures": summaries}, options, figures)


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
            run = sync_results.of_workers(replies, steps_that_trace(policy))
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


def page(summaries, reply, described, options):
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
        *sync_results.lines_of(
            summaries, {task: options.num_steps or TASKS[task].num_steps for task in summaries}
        ),
    ]
    if options.write:
        lines += [f"![Validation loss over steps, and over what was sent]({PICTURE})", ""]
    lines.pop()
    versions = {key: reply[key] for key in ("tensorflow", "keras")}
    return lines + contest.footer("sync", described | versions, options, "num_seeds")


if __name__ == "__main__":
    contest.run(main)
