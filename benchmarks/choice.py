"""Measures how well `all_reduce="auto"` chooses, and how well the cost model predicts.

    .venv/bin/python benchmarks/choice.py

2, 4 and 8 ranks, first as devices of one process and then as processes, are swept twice each, by
`tfparallel bench all_reduce` in new processes. The first sweep is the profile: the algorithm that
`auto` chooses by it at each size is timed by the second, beside the best one there and the default.

The cost model is fitted to the first sweeps of all numbers of ranks except one, at every other
size. It predicts the second sweep of that one at the sizes between: neither were used in the fit.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import contest

from tfparallel.bench.cost_fit import modelled_as
from tfparallel.collectives.cost_model import Measurement, fit
from tfparallel.collectives.profile import seconds_at

NUM_RANKS = (2, 4, 8)
PLACES = {
    "devices of one process": ("--num_devices", "tf_reduce_to_one"),
    "processes": ("--nproc_per_node", "ring_tuned"),
}
DEADLINE_SECONDS = 900
MAX_ERROR = 0.15


def main(arguments):
    options = parse(arguments)
    results = {
        place: {n: [sweep(flag, n, options) for _ in range(2)] for n in NUM_RANKS}
        for place, (flag, _) in PLACES.items()
    }
    versions = {"tensorflow": results["processes"][NUM_RANKS[0]][0]["versions"]["tensorflow"]}
    flags = ("iters", "max_bytes")
    contest.publish("choice", page(results), results, options, *flags, versions=versions)


def parse(arguments):
    parser = contest.make_parser(__doc__)
    parser.add_argument(
        "--iters", type=contest.positive, default=20, help="timed calls of each algorithm (20)"
    )
    parser.add_argument("--max_bytes", default="16M", help="the largest size (16M)")
    return contest.parse(parser, arguments)


def sweep(flag, num_ranks, options):
    """Returns the rows of one sweep, and its profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "rows.json")
        command = [sys.executable, "-m", "tfparallel", "bench", "all_reduce", f"{flag}={num_ranks}"]
        command += [f"--iters={options.iters}", f"--max_bytes={options.max_bytes}"]
        command += ["--save_profile", f"--json={path}"]
        print(" ".join(command[2:]), file=sys.stderr)
        done = subprocess.run(
            command,
            cwd=contest.TOP,
            env=os.environ | {"TFPARALLEL_PROFILES": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"a sweep failed, exit code {done.returncode}:\n{done.stdout}")
        (profile,) = pathlib.Path(folder).glob("all_reduce_*.json")
        content = json.loads(path.read_text())
        return {
            "versions": content["environment"]["versions"],
            "rows": content["rows"],
            "profile": json.loads(profile.read_text())["seconds"],
        }


def choices(sweeps, default):
    """Returns the choice of `auto` at each size by the first sweep, and its time in the second."""
    # Loads TensorFlow; the sweeps load it in their own processes.
    from tfparallel.collectives import cross_device
    from tfparallel.collectives.algorithm_selection import fastest

    profile, rows = sweeps[0]["profile"], sweeps[1]["rows"]
    rows_by_size = []
    for size in sorted({row["size"] for row in rows}):
        seconds = {
            name: seconds_at(times, size)
            for name, times in profile.items()
            if name not in cross_device.NOT_IN_LOOPS
        }
        taken = fastest(seconds, default, "profile", "").algorithm
        times = {row["algorithm"]: row["time"] for row in rows if row["size"] == size}
        best = min(times, key=times.get)
        rows_by_size.append(
            {
                "size": size,
                "taken": taken,
                "us": times[taken],
                "best": best,
                "over_best": times[taken] / times[best],
                "over_default": times[taken] / times[default],
            }
        )
    return rows_by_size


def errors(by_ranks, shared):
    """The cost model's relative errors, by transport and by the number of ranks left out."""
    sizes = sorted({row["size"] for row in by_ranks[NUM_RANKS[0]][0]["rows"]})
    fitted_sizes = set(sizes[::2])
    by_transport = {}
    for left_out in NUM_RANKS:
        to_fit = {}
        for num_ranks in NUM_RANKS:
            if num_ranks != left_out:
                for transport, one in _measurements(by_ranks[num_ranks][0]["rows"], shared):
                    if one.size_bytes in fitted_sizes:
                        to_fit.setdefault(transport, []).append(one)
        kind = "shared" if shared else "wire"
        models = {name: fit(ones, kind, os.cpu_count()) for name, ones in to_fit.items()}
        for transport, one in _measurements(by_ranks[left_out][1]["rows"], shared):
            if one.size_bytes not in fitted_sizes:
                predicted = models[transport].seconds(one.algorithm, one.num_ranks, one.size_bytes)
                errors_of = by_transport.setdefault(transport, {}).setdefault(left_out, [])
                errors_of.append(abs(predicted / one.seconds - 1))
    return by_transport


def _measurements(rows, shared):
    for row in rows:
        modelled = modelled_as(row["algorithm"], shared)
        if modelled is not None:
            transport, algorithm = modelled
            seconds = row["time"] * 1e-6
            yield transport, Measurement(algorithm, row["num_ranks"], row["size"], seconds)


def page(results):
    """The lines of RESULTS.md about the choice and the model."""
    lines = [
        "## `auto`, and the cost model",
        "",
        "What `auto` takes by one sweep, timed by another one of other processes: its median in "
        "us, and that over the medians of the best and of the default.",
    ]
    for place, (_, default) in PLACES.items():
        for num_ranks, sweeps in results[place].items():
            lines += ["", f"### {num_ranks} {place}, default `{default}`", ""]
            rows = choices(sweeps, default)
            lines += contest.table(
                ("bytes", "`auto` takes", "us", "best", "over the best", "over the default"),
                *(
                    (row["size"], f"`{row['taken']}`", f"{row['us']:.0f}", f"`{row['best']}`")
                    + (f"{row['over_best']:.2f}", f"{row['over_default']:.2f}")
                    for row in rows
                ),
            )
            worst = max(row["over_best"] for row in rows)
            slower = max(row["over_default"] for row in rows)
            lines += ["", f"At most {worst:.2f} times the best, {slower:.2f} times the default."]
    lines += [
        "",
        "### The cost model's predictions",
        "",
        "Median of |prediction / measurement − 1| at ranks and sizes that were not fitted; at most "
        f"{MAX_ERROR:.0%} is to be reached.",
        "",
    ]
    head, rows = ["transport", *(f"{n} ranks, by the others" for n in NUM_RANKS), "all"], []
    for place in PLACES:
        for transport, by_ranks in errors(results[place], place == next(iter(PLACES))).items():
            every = [error for errors_of in by_ranks.values() for error in errors_of]
            cells = [statistics.median(by_ranks[n]) for n in NUM_RANKS] + [statistics.median(every)]
            rows.append([transport, *(f"{error:.0%}" for error in cells)])
    return lines + contest.table(head, *rows)


if __name__ == "__main__":
    contest.run(main)
