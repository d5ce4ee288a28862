"""Runs all benchmarks, or those that you name, one after another.

    .venv/bin/python benchmarks/all.py --torch=PYTHON_WITH_TORCH
    .venv/bin/python benchmarks/all.py faults sync

Each writes its block of RESULTS.md; the summary at the top is written last. A failure does not stop
the others. Exits with code 1 if any failed.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import time

import contest

FOLDER = pathlib.Path(__file__).parent
# In the order in which they run; a part that needs root says so, and is skipped without it.
BENCHMARKS = {
    "data_parallel": ["data_parallel.py"],
    "all_reduce": ["all_reduce.py"],
    "scaling": ["scaling.py"],
    "first_epoch": ["first_epoch.py"],
    "model_parallel": ["model_parallel.py"],
    "meshes": ["meshes.py"],
    "pipeline": ["pipeline.py"],
    "sharded": ["sharded.py"],
    "sharded_memory": ["sharded_memory.py"],
    "restarts": ["restarts.py"],
    "restarts_standby": ["restarts.py", "--standby", "--num_kills=5"],
    "ray_elastic": ["ray_elastic.py"],
    "faults": ["faults.py"],
    "diagnosis": ["diagnosis.py"],
    "asynchronous": ["asynchronous.py"],
    "sync": ["sync.py"],
    "adascale": ["adascale.py"],
    "compressed_sums": ["compressed_sums.py"],
    "slow_link": ["slow_link.py"],
    "choice": ["choice.py"],
    "long_sequences": ["long_sequences.py"],
}
BESIDE_TORCH = {"all_reduce", "scaling", "pipeline", "sharded", "slow_link"}
SUMMARY = ["summary.py"]
SECONDS_TO_END = 60


def main(arguments):
    options = parse(arguments)
    names = [name for name in BENCHMARKS if name in (options.names or BENCHMARKS)]
    minutes, failed = {}, []
    for index, name in enumerate(names, 1):
        print(f"\n== {name}, {index} of {len(names)}", flush=True)
        torch = options.torch and name in BESIDE_TORCH
        started = time.monotonic()
        code = call([*BENCHMARKS[name], *([f"--torch={options.torch}"] if torch else [])])
        minutes[name] = (time.monotonic() - started) / 60
        if code:
            failed.append(name)
    if call(SUMMARY):
        failed.append("summary")
    print()
    for name, taken in minutes.items():
        print(f"{name:<17}{taken:6.1f} min  {'failed' if name in failed else 'ok'}")
    sys.stdout.flush()  # Before what stderr says.
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all if left out; of {', '.join(BENCHMARKS)}"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(
            f"each name must be one of {', '.join(BENCHMARKS)}. Received: {', '.join(unknown)}"
        )
    return options


def call(command):
    """Runs a program of this folder, stops it if this one ends, and returns its exit code."""
    print("benchmarks/" + " ".join(command), flush=True)
    program, *flags = command
    process = subprocess.Popen([sys.executable, FOLDER / program, *flags])
    try:
        return process.wait()
    except KeyboardInterrupt:  # It also received the Ctrl-C, and ends its own processes.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    contest.run(main)
