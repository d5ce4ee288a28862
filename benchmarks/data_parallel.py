"""Times a step of `model.fit`: plain Keras, TensorFlow's MirroredStrategy, and ours.

    .venv/bin/python benchmarks/data_parallel.py
    .venv/bin/python benchmarks/data_parallel.py --workload=dispatch_bound --num_rounds=5 --write=

The first command measures all workloads and writes RESULTS.md beside this file, in three minutes on
two idle cores; the second tries one workload.
"""

import contextlib
import sys
from typing import NamedTuple

import contest
import numpy as np
from contender_process import ContenderProcess

NUM_CORES = 2
NUM_WARM_UP_ROUNDS = 2
CONTENDERS = [("plain", 1), ("stock", 1), ("ours", 1), ("stock", 2), ("ours", 2)]
CONTENDERS += [("plain_xla", 1), ("ours_xla", 2)]


class Plan(NamedTuple):
    """The steps of a round; the first are not timed."""

    num_steps: int
    num_skipped: int


# By the names of `workloads.py`. Rounds are short, so that those of a pair lie close together.
PLANS = {
    "dispatch_bound": Plan(num_steps=200, num_skipped=5),
    "compute_bound": Plan(num_steps=12, num_skipped=2),
}

# Of TensorFlow's allocator and of Python's; a leak of 1 KiB a step would reach it.
MAX_GROWTH_MIB = 1.0
GROWTH_STEPS = 1000
TITLES = {
    "plain_1": "plain Keras, no strategy",
    "stock_1": "Keras under `tf.distribute.MirroredStrategy`, 1 replica",
    "ours_1": "`tfparallel.data_parallel`, 1 replica",
    "stock_2": "Keras under `tf.distribute.MirroredStrategy`, 2 replicas",
    "ours_2": "`tfparallel.data_parallel`, 2 replicas",
    "plain_xla_1": "plain Keras, `jit_compile=True`",
    "ours_xla_2": "`tfparallel.data_parallel`, 2 replicas, `jit_compile=True`",
}
# (numerator, denominator) -> at most, by workload; None without a target.
TARGETS = {
    workload: {
        ("ours_1", "plain_1"): 1.02,
        ("ours_2", "stock_2"): over_stock,
        ("stock_1", "plain_1"): None,
        ("stock_2", "plain_1"): None,
        ("ours_2", "plain_1"): None,
        ("ours_xla_2", "plain_xla_1"): 1.1,
    }
    for workload, over_stock in (("dispatch_bound", 0.80), ("compute_bound", 1.00))
}
HEAD = """\
## Data parallel on one machine

The time of a step of `model.fit`: plain Keras on one device, plain Keras under TensorFlow's
`MirroredStrategy`, and `tfparallel.data_parallel`. Written by `benchmarks/data_parallel.py`.
""".splitlines()
HOW_TO_READ = """
How to read it:

- A step is timed from the end of one to the end of the next, in a callback: the batch, Keras's own
  loop, forward, backward, reduction and update. What a `fit` costs once (its iterator, the first
  prefetch) falls to the first steps of a round, which are left out.
- Each contender is a process that stays alive; they take turns, round by round, forwards and then
  backwards, so that a slow spell of the machine hits them alike. A ratio pairs the medians of one
  round; median, p10 and p90 are over the rounds. Step times are over all steps.
- The replicas are logical devices of one CPU and share its cores and its thread pools: a second
  one brings no core with it. What is measured is what replication costs, not what it gains.
- Processor time disturbs itself little over what else runs on a machine. Where it and the clock
  disagree about two contenders, look at the load average below.
- Losses stand beside each other to show that the same training was timed. In float32 the order
  of a sum differs between one replica and two, and thousands of steps enlarge the difference.
""".splitlines()


def main(arguments):
    options = parse(arguments)
    cores = contest.cores_to_pin(NUM_CORES)
    num_threads = len(cores) or NUM_CORES
    measured, versions = {}, {}
    for workload in options.workload or PLANS:
        measured[workload], versions = measure(workload, options, cores, num_threads)
    versions = {
        "TensorFlow": versions["tensorflow"],
        "Keras": versions["keras"],
        "Threads": f"intra-op {num_threads}, inter-op {num_threads}, in each process",
        "Pinned to cores": ", ".join(map(str, cores)) or "none: this system cannot pin",
    }
    report = {"environment": options.environment | versions, "workloads": measured}
    written = {"figures": figures_of(report), "versions": versions}
    flags = ("workload", "num_rounds", "num_steps")
    contest.publish("data_parallel", page(report), report, options, *flags, **written)


def parse(arguments):
    parser = contest.make_parser(__doc__, num_rounds=9)
    parser.add_argument(
        "--workload", action="append", choices=PLANS, help="measure this one alone; repeatable"
    )
    parser.add_argument(
        "--num_steps", type=contest.positive, help="timed steps a round (195 small, 10 large)"
    )
    return contest.parse(parser, arguments)


def measure(workload, options, cores, num_threads):
    """Returns a workload's results, and the contenders' versions."""
    plan = PLANS[workload]
    num_steps = plan.num_steps if not options.num_steps else options.num_steps + plan.num_skipped
    with contextlib.ExitStack() as stack:
        contenders = []
        for kind, num_replicas in CONTENDERS:
            contender = ContenderProcess(
                workload, kind, num_replicas, cores=cores, num_threads=num_threads
            )
            stack.callback(contender.close)
            contenders.append(contender)
        progress(f"{workload}: starting {len(contenders)} processes")
        descriptions = [contender.wait_until_ready() for contender in contenders]
        first = {contender.name: contender.train(1) for contender in contenders}
        rounds = []
        for index in range(-NUM_WARM_UP_ROUNDS, options.num_rounds):
            turn = contest.in_turn(contenders, index)
            replies = {
                contender.name: contender.train(num_steps, plan.num_skipped) for contender in turn
            }
            rounds.append({contender.name: replies[contender.name] for contender in contenders})
            progress(f"{workload}: {round_title(index, options.num_rounds)}")
    warm_up, timed = rounds[:NUM_WARM_UP_ROUNDS], rounds[NUM_WARM_UP_ROUNDS:]
    result = {
        **{
            key: descriptions[0][key]
            for key in ("description", "num_parameters", "global_batch_size")
        },
        "num_rounds": options.num_rounds,
        "num_steps_a_round": num_steps,
        "num_skipped": plan.num_skipped,
        "num_steps_of_growth": options.num_rounds * num_steps,
        **summarize(workload, timed, first, warm_up[-1]),
    }
    return result, descriptions[0]


def round_title(index, num_rounds):
    if index < 0:
        return f"warm-up {index + NUM_WARM_UP_ROUNDS + 1} of {NUM_WARM_UP_ROUNDS}"
    return f"round {index + 1} of {num_rounds}"


def progress(text):
    print(text, file=sys.stderr, flush=True)


def summarize(workload, rounds, first, before):
    """Reduces a workload's rounds to figures.

    Args:
        workload: Its key.
        rounds: One dictionary a round: contender -> its reply.
        first: The replies to the very first step, which traces.
        before: The replies to the last round of the warm-up.

    Returns:
        A dictionary for JSON, with `contenders` and `ratios`.
    """
    contenders = {}
    for name in rounds[0]:
        replies = [one_round[name] for one_round in rounds]
        steps = 1e3 * np.concatenate([reply["step_seconds"] for reply in replies])
        contenders[name] = {
            **_percentiles(steps, "_ms"),
            "cpu_ms": 1e3 * float(np.median([reply["cpu_seconds_a_step"] for reply in replies])),
            "num_steps": len(steps),
            "round_median_ms": [1e3 * float(np.median(reply["step_seconds"])) for reply in replies],
            "num_traces_first_step": first[name]["num_traces"],
            "num_traces_end": replies[-1]["num_traces"],
            "rss_end_mib": replies[-1]["rss_mib"],
            "rss_growth_mib": replies[-1]["rss_mib"] - before[name]["rss_mib"],
            "loss_first_step": first[name]["loss"],
            "loss_end": replies[-1]["loss"],
        }
    return {
        "contenders": contenders,
        "ratios": [
            _ratio(contenders, pair, target)
            for pair, target in TARGETS[workload].items()
            if set(pair) <= set(contenders)
        ],
    }


def _ratio(contenders, pair, target):
    """Pairs the two medians of each round, which ran within seconds of each other."""
    over, under = (np.array(contenders[name]["round_median_ms"]) for name in pair)
    ratio = {"of": pair[0], "to": pair[1], **_percentiles(over / under), "target": target}
    return ratio | {"reached": None if target is None else ratio["median"] <= target}


def _percentiles(values, unit=""):
    return {f"{name}{unit}": value for name, value in contest.percentiles(values).items()}


def verdicts(results):
    """Returns every target as (what, measured, target, reached); `reached` is None if unmeasured.

    Args:
        results: The figures, as in the file of `--json`.
    """
    rows = []
    for workload, result in results["workloads"].items():
        for ratio in result["ratios"]:
            if ratio["target"] is not None:
                measured = contest.spread(ratio, 3)
                rows.append(
                    (
                        f"{workload}: step of {ratio['of']} / {ratio['to']}",
                        measured,
                        f"at most {ratio['target']:.2f}",
                        ratio["reached"],
                    )
                )
        for name, contender in result["contenders"].items():
            if not name.startswith("ours"):
                continue
            new = contender["num_traces_end"] - contender["num_traces_first_step"]
            rows.append((f"{workload}: {name}, traces after the first step", new, 0, new == 0))
            if result["num_steps_of_growth"] >= GROWTH_STEPS:
                growth = contender["rss_growth_mib"] * GROWTH_STEPS / result["num_steps_of_growth"]
                rows.append(
                    (
                        f"{workload}: {name}, memory growth over {GROWTH_STEPS:,} steps",
                        f"{growth:+.2f} MiB",
                        f"none (below {MAX_GROWTH_MIB} MiB)",
                        growth < MAX_GROWTH_MIB,
                    )
                )
    return rows


def page(results):
    """The lines of RESULTS.md about data parallelism on one machine."""
    words = {True: "reached", False: "**missed**"}
    promises = [(*row, words[reached]) for *row, reached in verdicts(results)]
    lines = [*HEAD, "", *contest.table(("promise", "measured", "promised", "verdict"), *promises)]
    for workload, result in results["workloads"].items():
        contenders = result["contenders"].items()
        growth = f"growth over {result['num_steps_of_growth']:,} steps, MiB"
        lines += [
            "",
            f"### {workload}",
            "",
            f"{result['description']}, {result['num_parameters']:,} parameters, global batch "
            f"{result['global_batch_size']}; {result['num_rounds']} rounds of "
            f"{result['num_steps_a_round']} steps, of which the first {result['num_skipped']} are "
            "not timed. Times in milliseconds a step; processor time is that of all threads.",
            "",
            *contest.table(
                ("contender", "", "median", "p10", "p90", "processor time"),
                *(
                    (f"`{name}`", TITLES[name])
                    + tuple(f"{c[k]:.2f}" for k in ("median_ms", "p10_ms", "p90_ms", "cpu_ms"))
                    for name, c in contenders
                ),
            ),
            "",
            *contest.table(
                ("ratio of step times, by round", "median", "p10", "p90"),
                *(
                    [f"{r['of']} / {r['to']}", *(f"{r[k]:.3f}" for k in ("median", "p10", "p90"))]
                    for r in result["ratios"]
                ),
            ),
            "",
            *contest.table(
                ("contender", "traces, first step", "at the end", "memory, MiB", growth)
                + ("loss, first step", "at the end"),
                *(
                    (f"`{name}`", c["num_traces_first_step"], c["num_traces_end"])
                    + (f"{c['rss_end_mib']:.0f}", f"{c['rss_growth_mib']:+.2f}")
                    + (f"{c['loss_first_step']:.7f}", f"{c['loss_end']:.7f}")
                    for name, c in contenders
                ),
            ),
        ]
    return [*lines, *HOW_TO_READ]


def figures_of(results):
    """Returns the figures for `summary.py`: each ratio of step times, by workload."""
    return {
        workload: {
            f"{ratio['of']}/{ratio['to']}": {k: ratio[k] for k in ("median", "p10", "p90")}
            for ratio in result["ratios"]
        }
        for workload, result in results["workloads"].items()
    }


if __name__ == "__main__":
    contest.run(main)
