"""The cases under several workers: real processes that train each case together.

    python -m tests.parity.workers 2 1 "gan" "vae with add_loss"

trains those cases on 2 workers of 1 device each and prints a JSON line for each. All workers
train it under the form; worker 0 also trains it on one device and judges. A job is started once
for many cases; if one of them breaks it, the others go on in a new job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from tests.workers.jobs import run_job


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a job saw of a case: a verdict as `judge` returns it, or the failure's text."""

    verdict: str
    detail: float | str
    failure: str = ""


def run_cases(names: Sequence[str], num_workers: int, num_devices: int) -> dict[str, Seen]:
    """Trains cases on workers of this machine.

    Returns:
        For each name what was seen.
    """
    seen: dict[str, Seen] = {}
    remaining = list(names)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "seen.jsonl")
            environment = {"TFPARALLEL_PARITY_WORKERS": path}
            seconds = 60 + 120 * len(remaining)
            failure = run_job(main, [num_devices, remaining], num_workers, seconds, environment)
            lines = open(path).read().splitlines() if os.path.exists(path) else []
        done = [json.loads(line) for line in lines]
        seen |= {name: Seen(verdict, detail, failure) for name, verdict, detail, failure in done}
        remaining = remaining[len(done) :]
        if remaining:
            seen[remaining.pop(0)] = Seen("", "", failure or "The job ended early.")
    return seen


def main(num_devices: int, names: Sequence[str]) -> None:
    import tfparallel

    tfparallel.devices.split_cpu(num_devices)
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    from .case import Plain, compare
    from .cases import ALL

    class Workers(Plain):
        """`tfparallel.data_parallel` over the workers of this job."""

        name = "workers"

        def make(self, build, compile=None):
            model = tfparallel.data_parallel(build, strategy, **self.builder_options)
            if compile is not None:
                compile(model)
            return model

        @contextlib.contextmanager
        def directory(self):
            with super().directory() as local_folder:
                yield strategy.workers.exchange(local_folder, "a case")[0]
                self.wait_for_all()

        def wait_for_all(self):
            strategy.workers.exchange(None, "a case")

    cases = {case.name: case for case in ALL}
    for name in names:
        line = _judge(cases[name], Workers(), strategy.workers, compare)
        if strategy.workers.worker_index == 0:
            text = json.dumps([name, *line])
            print(text, flush=True)
            if path := os.environ.get("TFPARALLEL_PARITY_WORKERS"):
                with open(path, "a") as file:
                    file.write(text + "\n")


def _judge(case, form, workers, compare):
    """As `test_parity.judge`, by worker 0; the others train with it."""
    from .case import EXACT, REFUSED, on_one_device, run

    seen, error, verdict, detail, failure = None, None, "", "", ""
    try:
        seen = run(case, form)
    except (ValueError, RuntimeError, NotImplementedError) as refusal:
        error = refusal
    if error is None and form.name in case.refused:
        failure = f"Trained, though the case says that it is refused: {case.refused[form.name]}"
    elif workers.worker_index == 0 and error is None:
        differences = compare(on_one_device(case), seen)
        if differences[0].relative <= case.limit:
            verdict, detail = EXACT, differences[0].relative
        else:
            failure = ", ".join(f"{d.name}: {d.relative:.1e}" for d in differences[:6])
    elif error is not None and case.expects(form.name, error):
        verdict, detail = REFUSED, str(error)
    elif error is not None:
        failure = "".join(traceback.format_exception(error))
    return verdict, detail, failure


if __name__ == "__main__":
    for name, seen in run_cases(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2])).items():
        print(name, seen)
