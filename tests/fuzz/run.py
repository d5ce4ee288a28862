"""Random programs, one after another, until the time is over.

    python -m tests.fuzz.run --minutes=30 --seed=7
    python -m tests.fuzz.run --forms=sequence,shard=parameters
    make fuzz FUZZ_MINUTES=30 FUZZ_SEED=7

Each program is trained on one device and under every form; what several workers make of it is
seen for `BATCH` programs at a time, in one job. A finding is made smaller and printed, as a
program that runs by itself, the first time that its family is met. The exit code is 1 if there
was one that `known` does not name.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
import warnings

import tfparallel

from . import known, workers
from .generator import drawn
from .judge import (
    CRASH,
    FORMS,
    REFUSED,
    SHARED_OPTIMIZER,
    SHARED_PARAMETERS,
    Discarded,
    OneDevice,
    Outcome,
    fits,
    judge,
)
from .program import Program
from .report import report, summary
from .shrink import shrink

REPLICATED = ("data_parallel", "MirroredStrategy")
SHARED = (SHARED_OPTIMIZER, SHARED_PARAMETERS)
BATCH = 12  # Programs for one job of workers.


@dataclasses.dataclass
class Finding:
    """A family of findings: the smallest program that shows it, and how often it was met."""

    program: Program
    outcome: Outcome
    count: int = 1

    def has(self, program: Program, outcome: Outcome) -> bool:
        """Whether another finding looks like this one: the same words, or more of the same."""
        if outcome.family != self.outcome.family:
            return False
        if outcome.verdict == CRASH:
            return True
        forms = {outcome.form, self.outcome.form}
        alike = len(forms) == 1 or forms <= {*REPLICATED, workers.NAME}
        alike = alike or forms <= {*SHARED, *map(workers.name_of, workers.SHARED[1:])}
        return alike and known.traits(self.program) <= known.traits(program)


class Session:
    """What a run has seen."""

    def __init__(self, seed: str, log: str = "", shrink_seconds: float = 120.0):
        self.seed, self.log, self.shrink_seconds = seed, log, shrink_seconds
        self.pairs: collections.Counter = collections.Counter()
        self.refusals: collections.Counter = collections.Counter()
        self.discarded: collections.Counter = collections.Counter()
        self.num_known: collections.Counter = collections.Counter()
        self.findings: list[Finding] = []

    def run(self, index: int, forms: tuple[str, ...] = ()) -> OneDevice | None:
        """Trains the program of an index; returns what workers need to train it too.

        The two forms that replicate are one engine: they take turns, unless `forms` says more; so
        do those whose replicas share out.
        """
        out_of_turn = REPLICATED[index % 2], SHARED[index % 2]
        forms = forms or tuple(form for form in FORMS if form not in out_of_turn)
        left_out = known.LAYERS if index % 4 else frozenset()
        program, choices = drawn(f"{self.seed}/{index}", left_out)
        forms = tuple(form for form in forms if fits(form, program))
        if not forms:
            return None
        try:
            one_device = OneDevice.train(program)
        except Discarded as error:
            self.discarded[str(error)] += 1
            self.write(index, program, [])
            return None
        outcomes = [judge(form, one_device) for form in forms]
        self.write(index, program, outcomes)
        for outcome in outcomes:
            self.count(program, outcome, choices, left_out)
        return one_device

    def run_workers(self, batch: list[OneDevice], shard: str = "") -> None:
        """Has several workers train what `run` returned."""
        outcomes = workers.judge_all(batch, shard=shard)
        for one_device, outcome in zip(batch, outcomes, strict=True):
            self.write(-1, one_device.program, [outcome])
            self.count(one_device.program, outcome)

    def count(
        self,
        program: Program,
        outcome: Outcome,
        choices: list[int] | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        """Counts an outcome; a finding of a new family is made smaller by its choices."""
        self.pairs[outcome.form, outcome.verdict] += 1
        if outcome.verdict == REFUSED:
            self.refusals[outcome.form, outcome.detail] += 1
        if not outcome.is_finding:
            return
        if family := known.family_of(program, outcome):
            self.num_known[family] += 1
            return
        for finding in self.findings:
            if finding.has(program, outcome):
                finding.count += 1
                return
        print(f"\n{outcome.form}: {outcome.verdict}. {outcome.detail}\nMaking it smaller …")
        if choices is not None:
            try:
                program, outcome = shrink(choices, outcome, left_out, self.shrink_seconds)
            except RuntimeError as error:
                print(error)
        self.findings.append(Finding(program, outcome))
        print(report(program, outcome), flush=True)

    def write(self, index: int, program: Program, outcomes: list[Outcome]) -> None:
        if self.log:
            line = {
                "index": index,
                "program": json.loads(program.to_json()),
                "outcomes": [dataclasses.astuple(outcome) for outcome in outcomes],
            }
            with open(self.log, "a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on")
    parser.add_argument("--seed", default="0", help="of the programs: the same ones again")
    parser.add_argument("--start", type=int, default=0, help="the index of the first program")
    parser.add_argument("--log", default="", help="a file for each program and what was seen")
    parser.add_argument("--forms", default="", help=f"these alone, of {','.join(FORMS)}")
    parser.add_argument("--no_workers", action="store_true", help="leave out several workers")
    arguments = parser.parse_args()
    tfparallel.devices.split_cpu(4)
    warnings.simplefilter("ignore")
    gc.freeze()  # What the imports made is not looked at after each program.
    forms = tuple(filter(None, arguments.forms.split(",")))
    if set(forms) - set(FORMS):
        parser.error(f"--forms takes {', '.join(FORMS)}. Received: {arguments.forms}")
    session = Session(arguments.seed, arguments.log)
    until = time.monotonic() + 60 * arguments.minutes
    index, batch, shares = arguments.start, [], itertools.cycle(workers.SHARED)
    while time.monotonic() < until:
        seen = session.run(index, forms)
        index += 1
        if seen is not None:
            batch.append(seen)
        if len(batch) == BATCH and not arguments.no_workers:
            session.run_workers(batch, next(shares))
            batch = []
        if index % 10 == 0:
            print(f"[{index} programs, {sum(session.pairs.values())} pairs]", flush=True)
    if batch and not arguments.no_workers:
        session.run_workers(batch, next(shares))
    print(summary(session), flush=True)
    return 1 if session.findings else 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.exit(main())
