"""Reduces the rounds to step times, ratios and verdicts; as JSON and as a page."""

import contest
import numpy as np

# Of TensorFlow's allocator and of Python's; a leak of 1 KiB a step would reach it.
MAX_GROWTH_MIB = 1.0
GROWTH_STEPS = 1000

CONTENDER_TITLES = {
    "plain_1": "plain Keras, no strategy",
    "stock_1": "Keras under `tf.distribute.MirroredStrategy`, 1 replica",
    "ours_1": "`tfparallel.data_parallel`, 1 replica",
    "stock_2": "Keras under `tf.distribute.MirroredStrategy`, 2 replicas",
    "ours_2": "`tfparallel.data_parallel`, 2 replicas",
    "plain_xla_1": "plain Keras, `jit_compile=True`",
    "ours_xla_2": "`tfparallel.data_parallel`, 2 replicas, `jit_compile=True`",
}

# (numerator, denominator) -> at most; None without a target.
TARGETS = {
    "dispatch_bound": {
        ("ours_1", "plain_1"): 1.02,
        ("ours_2", "stock_2"): 0.80,
        ("stock_1", "plain_1"): None,
        ("stock_2", "plain_1"): None,
        ("ours_2", "plain_1"): None,
        ("ours_xla_2", "plain_xla_1"): 1.1,
    },
    "compute_bound": {
        ("ours_1", "plain_1"): 1.02,
        ("ours_2", "stock_2"): 1.00,
        ("stock_1", "plain_1"): None,
        ("stock_2", "plain_1"): None,
        ("ours_2", "plain_1"): None,
        ("ours_xla_2", "plain_xla_1"): 1.1,
    },
}


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
            "round_median_ms": [1e3 * _median(reply["step_seconds"]) for reply in replies],
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


def _median(values):
    return float(np.median(values))


def verdicts(results):
    """Returns every target as (what, measured, target, reached); `reached` is None if unmeasured.

    Args:
        results: What `data_parallel.py` writes as JSON.
    """
    rows = []
    for workload, result in results["workloads"].items():
        for ratio in result["ratios"]:
            if ratio["target"] is not None:
                measured = f"{ratio['median']:.3f} ({ratio['p10']:.3f} to {ratio['p90']:.3f})"
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


def tables(results):
    """Returns the results as Markdown, which a terminal shows as well."""
    blocks = [_table(["promise", "measured", "promised", "verdict"], _verdict_rows(results))]
    for workload, result in results["workloads"].items():
        contenders = result["contenders"]
        blocks.append(
            f"### {workload}\n\n"
            f"{result['description']}, {result['num_parameters']:,} parameters, global batch "
            f"{result['global_batch_size']}; {result['num_rounds']} rounds of "
            f"{result['num_steps_a_round']} steps, of which the first {result['num_skipped']} are "
            "not timed. Times in milliseconds a step; processor time is that of all threads."
        )
        blocks.append(
            _table(
                ["contender", "", "median", "p10", "p90", "processor time"],
                [
                    [
                        f"`{name}`",
                        CONTENDER_TITLES[name],
                        *[f"{c[k]:.2f}" for k in ("median_ms", "p10_ms", "p90_ms", "cpu_ms")],
                    ]
                    for name, c in contenders.items()
                ],
            )
        )
        blocks.append(
            _table(
                ["ratio of step times, by round", "median", "p10", "p90"],
                [
                    [f"{r['of']} / {r['to']}", *[f"{r[k]:.3f}" for k in ("median", "p10", "p90")]]
                    for r in result["ratios"]
                ],
            )
        )
        growth = f"growth over {result['num_steps_of_growth']:,} steps, MiB"
        blocks.append(
            _table(
                [
                    "contender",
                    "traces, first step",
                    "at the end",
                    "memory, MiB",
                    growth,
                    "loss, first step",
                    "at the end",
                ],
                [
                    [
                        f"`{name}`",
                        c["num_traces_first_step"],
                        c["num_traces_end"],
                        f"{c['rss_end_mib']:.0f}",
                        f"{c['rss_growth_mib']:+.2f}",
                        f"{c['loss_first_step']:.7f}",
                        f"{c['loss_end']:.7f}",
                    ]
                    for name, c in contenders.items()
                ],
            )
        )
    return "\n\n".join(blocks)


def _verdict_rows(results):
    words = {True: "reached", False: "**missed**"}
    return [
        [what, measured, promised, words[reached]]
        for what, measured, promised, reached in verdicts(results)
    ]


def _table(header, rows):
    """A Markdown table, its columns padded so that it can be read as it stands."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


_PAGE = """\
## Data parallel on one machine

The time of a step of `model.fit`: plain Keras on one device, plain Keras under TensorFlow's
`MirroredStrategy`, and `tfparallel.data_parallel`. Written by `benchmarks/data_parallel.py`.

{tables}

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

### Environment

{environment}

### To reproduce

On an idle machine, from the top of the repository:

    make setup
    {command}"""


def page(results):
    """Returns the lines of RESULTS.md about data parallelism on one machine."""
    environment = "\n".join(f"- {key}: {value}" for key, value in results["environment"].items())
    text = _PAGE.format(tables=tables(results), environment=environment, command=results["command"])
    return text.splitlines()


def figures(results):
    """Returns the figures for `summary.py`: each ratio of step times, by workload."""
    return {"date": results["environment"]["Date"]} | {
        workload: {
            f"{ratio['of']}/{ratio['to']}": {k: ratio[k] for k in ("median", "p10", "p90")}
            for ratio in result["ratios"]
        }
        for workload, result in results["workloads"].items()
    }
