"""Trains on digits with 1, 2, 4 and 8 times the batch: does a rule for the learning rate hold?

    .venv/bin/python benchmarks/adascale.py
    .venv/bin/python benchmarks/adascale.py --num_seeds=1 --learning_rate=0.08

The small batch is 16 examples, for `--num_steps` steps of SGD with momentum and a cosine decay. S
times the batch gets a learning rate that is S times as high (linear), √S times (square root), or
follows the gain: `sync="adascale:S"`, until its steps stand for as many of the small batch. That
takes more updates, so the linear rule is tried with as many, too. The gain and the losses do not
depend on the machine; no time is measured.
"""

import functools
import pathlib
import runpy
import sys

import contest
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMALL_BATCH, SCALES = 16, (2, 4, 8)
NUM_STEPS, NUM_SEEDS = 900, 3
# Of 0.01 · 2ᵏ the best for the small batch, as a NumPy twin of the network found; and half of it.
LEARNING_RATES = (0.16, 0.08)
MOMENTUM = 0.9
PICTURE = "adascale.png"
RULES = {
    "linear": "linear",
    "square root": "square root",
    "adascale": "AdaScale",
    "linear, longer": "linear, with the updates of AdaScale",
}
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00")  # Okabe and Ito, 2008.


def main(arguments):
    options = parse(arguments)
    from adascale_run import Study  # Imports TensorFlow, so after the options were checked.

    train, validation = digits()
    study = Study(train, validation, SMALL_BATCH, options.num_steps, MOMENTUM)
    runs = {rate: measure(study, rate, options.num_seeds) for rate in options.learning_rate}
    summaries = {rate: summarize(of_rate) for rate, of_rate in runs.items()}
    if options.write:
        draw(pathlib.Path(options.write).with_name(PICTURE), summaries)
    flags = ("learning_rate", "num_steps", "num_seeds")
    results = {"runs": texts_of(runs), "figures": texts_of(summaries)}
    contest.publish(
        "adascale", page(summaries, options), results, options, *flags, versions=study.versions
    )


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument(
        "--learning_rate",
        action="append",
        type=float,
        help=f"of the small batch; repeatable {LEARNING_RATES}",
    )
    for name, default, words in (
        ("num_steps", NUM_STEPS, "steps of the small batch"),
        ("num_seeds", NUM_SEEDS, "runs of each rule"),
    ):
        parser.add_argument(
            f"--{name}", type=contest.positive, default=default, help=f"{words} ({default})"
        )
    options = contest.parse(parser, arguments)
    options.learning_rate = options.learning_rate or list(LEARNING_RATES)
    return options


def digits():
    """Returns (train, validation): rows of 64 pixels and labels."""
    task = runpy.run_path(str(contest.TOP / "models/digits_cnn.py"))
    return tuple((x.reshape(len(x), -1), y) for x, y in task["load_data"]())


def measure(study, rate, num_seeds):
    """Returns (rule, S) -> a run for each seed."""
    runs = {}
    for seed in range(num_seeds):
        run = functools.partial(study.run, seed)
        of_seed = {("", 1): run(1, rate, study.num_steps)}
        for scale in SCALES:
            few, root = study.num_steps // scale, scale**0.5
            scaled = run(scale, rate)
            more = scaled["num_updates"]
            of_seed["linear", scale] = run(scale, rate * scale, few) | {"gain": scale}
            of_seed["square root", scale] = run(scale, rate * root, few) | {"gain": root}
            of_seed["adascale", scale] = scaled
            of_seed["linear, longer", scale] = run(scale, rate * scale, more) | {"gain": scale}
        for key, result in of_seed.items():
            runs.setdefault(key, []).append(result)
            print(f"rate {rate}, seed {seed}, {key}: {result}", file=sys.stderr, flush=True)
    return runs


def summarize(runs):
    """Returns (rule, S) -> figure -> (mean, least, most) over the seeds."""
    return {
        key: {
            name: tuple(
                float(reduce([run[name] for run in of_seeds]))
                for reduce in (np.mean, np.min, np.max)
            )
            for name in of_seeds[0]
        }
        for key, of_seeds in runs.items()
    }


def texts_of(by_rate):
    """The same with keys that JSON takes."""
    return {
        rate: {f"{rule or 'small batch'}, {scale}": value for (rule, scale), value in of.items()}
        for rate, of in by_rate.items()
    }


def page(summaries, options):
    """The lines of RESULTS.md about rules for the learning rate."""
    lines = [
        "## Learning rates for larger batches",
        "",
        f"A dense network of 64 units on scikit-learn's digits; SGD with momentum {MOMENTUM} and a "
        f"cosine decay over {options.num_steps} steps of {SMALL_BATCH} examples. Means over "
        f"{options.num_seeds} seeds, with the least and the most. Losses are of the last weights. "
        "A batch that is S times as large makes an S-th of the updates under the linear rule and "
        'under the square root; `sync="adascale:S"` ends when its steps stand for those of the '
        "small batch. Examples are relative to those of the small batch.",
        "",
    ]
    for rate, of_rate in summaries.items():
        small = of_rate["", 1]
        rows = [row("small batch", 1, small, options.num_steps)]
        for scale in SCALES:
            rows += [
                row(title, scale, of_rate[rule, scale], options.num_steps)
                for rule, title in RULES.items()
            ]
        head = ("rule", "S", "training loss", "validation loss", "accuracy, %", "updates")
        lines += [f"### Learning rate {rate}", ""]
        lines += [*contest.table((*head, "mean gain", "examples"), *rows), ""]
    if options.write:
        lines += [f"![Training loss and updates by batch size]({PICTURE})", ""]
    return lines[:-1]


def row(title, scale, summary, num_steps):
    cells = [spread(summary[name], 4) for name in ("loss", "validation_loss")]
    cells.append(spread([100 * value for value in summary["accuracy"]], 1))
    updates = summary["num_updates"][0]
    examples = updates * scale / num_steps
    return [title, scale, *cells, f"{updates:.0f}", f"{summary['gain'][0]:.2f}", f"{examples:.2f}"]


def spread(values, digits):
    mean, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{mean} ({least} to {most})"


def draw(path, summaries):
    """Draws, for each rate, the training loss and the updates by S."""
    figure = Figure(figsize=(11, 4 * len(summaries)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(summaries), 2, squeeze=False)
    for (losses, updates), (rate, of_rate) in zip(rows, summaries.items(), strict=True):
        small = of_rate["", 1]
        for colour, (rule, title) in zip(COLOURS, RULES.items(), strict=True):
            of_scales = [small, *(of_rate[rule, scale] for scale in SCALES)]
            mean, least, most = np.transpose([each["loss"] for each in of_scales])
            bars = {"yerr": [mean - least, most - mean], "capsize": 3}
            style = {"color": colour, "marker": "o", "linewidth": 1.4, "label": title}
            losses.errorbar((1, *SCALES), mean, **bars, **style)
            if rule != "linear, longer":
                updates.plot((1, *SCALES), [each["num_updates"][0] for each in of_scales], **style)
        losses.axhline(small["loss"][0], color="#999999", linewidth=0.8, linestyle=":")
        losses.set(ylabel="training loss", yscale="log", title=f"learning rate {rate}")
        updates.set(ylabel="updates", ylim=(0, None))
        for axes in (losses, updates):
            axes.set(xlabel="S, times the small batch", xscale="log")
            axes.set_xticks((1, *SCALES), (1, *SCALES))
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.grid(alpha=0.25)
    rows[0][0].legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    contest.run(main)
