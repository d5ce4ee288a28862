"""The driver of a job of `faults.py --on=ray`: each worker runs `tfparallel train`.

ray_driver.py NUM_WORKERS MAX_FAILURES ARGUMENTS OF train
"""

import sys

import tfparallel
from tfparallel.commands.main import main as tfparallel_command
from tfparallel.ray.options import parse_num_workers


def train(arguments):
    """What each worker calls."""
    if code := tfparallel_command(["train", *arguments]):
        sys.exit(code)


def main(num_workers, max_failures, *arguments):
    tfparallel.ray.fit(
        train,
        parse_num_workers(num_workers),
        args=[arguments],
        max_failures=int(max_failures),
        grace_seconds=20.0,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
