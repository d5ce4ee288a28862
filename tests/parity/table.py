"""docs/parity.md: what the parity tests saw, written by them and held against them.

    python -m tests.parity.table --write                 runs every pair and writes the page anew
    python -m tests.parity.table --write --rows=Dropout  those of rows that match; keeps the others
    pytest -m parity                                     runs every pair and compares

The first two run the pairs in two processes, which leave what they saw in one file of JSON lines.

`make test` runs a sample of the pairs (tests/suites.py). Every pair that a session runs
must be no worse than its cell says. The page prints no digits that another machine would not
print: a difference is rounded up to a power of ten, never below 1e-12, and is stale only when
it is seen a hundred times larger.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from . import upstream, workers
from .case import EXACT, FORMS, HYBRID, ONE_DEVICE_FOLDER, REFUSED, Case

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
RENEW = "Run `python -m tests.parity.table --write` (or `make parity`) and commit docs/parity.md."

# "write" in a session that writes the page.
MODE = os.environ.get("TFPARALLEL_PARITY", "")

# The forms that this process can run, and the one that takes several.
WORKERS = "workers"
COLUMNS = (*FORMS, HYBRID, WORKERS)
UNITS = {WORKERS: "", HYBRID: ""} | dict.fromkeys(
    ("model_parallel", "tensor_parallel", "pipeline_parallel"), " devices"
)
# Workers, and devices of each.
JOBS = {"2": (2, 1), "3": (3, 1), "2 x 2": (2, 2)}

# Where every process of a session that writes appends what it saw.
SEEN_FILE = "TFPARALLEL_PARITY_SEEN"
# A regular expression of the rows that a session runs; all of them if empty.
ROWS = "TFPARALLEL_PARITY_ROWS"

SMALLEST = 1e-12  # Differences below are rounding noise of one step.
SLACK = 100.0  # Between machines, noise differs by less than this.
# What Keras puts before the message of an error in a layer's call, and the bold type that it sets.
_AS_KERAS_WRAPS = re.compile(r"^Exception encountered when calling \S+\.\s*|\x1b\[\d+m")
_OR = "” or “"  # Between the refusals of a row's cases.
# Before the features of a group that are exact in all columns, and between them.
EVERYWHERE = "Exact under every parallelism: "
_AND = " · "
SEVERITY = (EXACT, REFUSED)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a form did with a feature: the worst over its cases and replica counts."""

    verdict: str
    largest: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        if self.verdict == REFUSED:
            return f"refused: “{self.message}”"
        if self.largest <= SMALLEST:
            return EXACT
        return f"exact, ≤ {self.largest:.0e}"

    @classmethod
    def parse(cls, text: str, notes: Mapping[str, str]) -> Cell | None:
        """What a cell of the page says, with the footnotes of the page by number."""
        text = text.strip()
        if text == EXACT:
            return cls(EXACT, SMALLEST)
        if match := re.fullmatch(r"exact, ≤ (\S+)", text):
            return cls(EXACT, float(match[1]))
        if text.startswith(REFUSED):
            said = [notes[number] for number in re.findall(r"\[\^(\d+)\]", text)]
            return cls(REFUSED, message=_OR.join(said))
        return None

    def allows(self, seen: Cell) -> bool:
        """Whether seeing `seen` leaves this cell true."""
        if seen.verdict == EXACT and self.verdict == EXACT:
            return seen.largest <= self.largest * SLACK
        if seen.verdict == REFUSED and self.verdict == REFUSED:
            return seen.message in self.message.split(_OR)
        return SEVERITY.index(seen.verdict) <= SEVERITY.index(self.verdict)


def cell(verdict: str, detail: float | str) -> Cell:
    """The cell of one run: its difference rounded up, its message cut to a sentence."""
    if verdict == REFUSED:
        return Cell(REFUSED, message=first_sentence(str(detail)))
    return Cell(verdict, 10.0 ** math.ceil(math.log10(max(float(detail), SMALLEST)) - 1e-9))


def worst(cells: list[Cell]) -> Cell:
    """The cell that is true of all of them; of different refusals it names each."""
    result = max(cells, key=lambda c: (SEVERITY.index(c.verdict), c.largest))
    if result.verdict != REFUSED:
        return result
    said = {c.message for c in cells if c.verdict == REFUSED}
    return Cell(REFUSED, message=_OR.join(sorted(said)))


def first_sentence(message: str) -> str:
    """The first sentence of a message, the same for any number of replicas."""
    message = _AS_KERAS_WRAPS.sub("", message)
    text = re.sub(r"\b[234] replicas", "N replicas", " ".join(message.split()))
    sentence = re.split(r"(?<=[.:]) (?=[A-Z0-9])", text)[0]
    return sentence.replace("|", "\\|").strip()


SEEN: dict[tuple[str, str, str, int | str], Cell] = {}


def is_asked_for(feature: str) -> bool:
    """Whether this session runs a row."""
    return re.search(os.environ.get(ROWS, ""), feature) is not None


def record(
    case: Case, form: str, replicas: int | str, verdict: str, detail: float | str
) -> None:
    """Keeps what a test saw, for the page."""
    seen = cell(verdict, detail)
    SEEN[case.feature, case.name, form, replicas] = seen
    if SEEN_FILE in os.environ:
        line = json.dumps([case.feature, case.name, form, replicas, dataclasses.astuple(seen)])
        with open(os.environ[SEEN_FILE], "a") as file:
            file.write(line + "\n")


def read_seen() -> None:
    """Takes what this session's processes, or a session that broke off, left in their file."""
    path = os.environ.get(SEEN_FILE, "")
    if not os.path.exists(path):
        return
    with open(path) as file:
        for line in file:
            feature, name, form, replicas, seen = json.loads(line)
            SEEN[feature, name, form, replicas] = Cell(*seen)


def refuse_stale(case: Case, form: str, replicas: int | str) -> None:
    """Fails if the page's cell does not allow what this session saw of a pair."""
    seen = SEEN[case.feature, case.name, form, replicas]
    page = PAGE.read_text()
    if form not in columns_of(page):
        return  # A page from before there was this form; `--write` gives it the column.
    written = parse(page).get((case.feature, form))
    if written is None or not written.allows(seen):
        raise AssertionError(
            f"docs/parity.md is stale. {case.feature}, {form}: the page says “{written}”; "
            f"'{case.name}' on {replicas} replicas: {seen}. {RENEW}"
        )


def columns_of(page: str) -> list[str]:
    """The forms that the page has columns for."""
    head = re.search(r"^\| feature \|(.*)\|$", page, re.MULTILINE)
    return re.findall(r"`(\w+)`", head[1]) if head else list(COLUMNS)


def parse(page: str) -> dict[tuple[str, str], Cell]:
    """The cells of the page by feature and form."""
    cells, columns = {}, columns_of(page)
    notes = dict(re.findall(r"^\[\^(\d+)\]: “(.*)”$", page, re.MULTILINE))
    for line in page.splitlines():
        if line.startswith(EVERYWHERE):
            features = line.removeprefix(EVERYWHERE).removesuffix(".").split(_AND)
            cells |= {(each, form): Cell(EXACT, SMALLEST) for each in features for form in columns}
        parts = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(parts) != 1 + len(columns):
            continue
        for form, text in zip(columns, parts[1:], strict=True):
            parsed = Cell.parse(text, notes)
            if parsed is not None:
                cells[parts[0], form] = parsed
    return cells


INTRODUCTION = """\
# Parity: every parallelism beside one device

*Written by `python -m tests.parity.table --write` from what the tests in `tests/parity`
saw. `make test` fails if the page is stale.*

Each row is trained by plain Keras on one device and under each parallelism, from the same seed:
24 steps unless the case says otherwise, on batches of 17 and a last one of 2, so that no number of
replicas divides them and some have no example.
Every variable of the model and of its optimizers, and every loss and metric of every
epoch, is compared. A cell is the worst of its runs.

- **exact**: no value differs by more than 1e-12, or the number beside it, relative to the largest
  element of its variable. Runs are in float64 and must reach 1e-9; those of float32 1e-4 (Keras's
  image augmentation, top-k metrics, CTC, orthogonal regularizer and factors of LoRA are float32
  alone), of mixed precision 1e-2 with the same number of skipped updates.
- **refused**: an error before or at the first step, quoted in the footnote.
- **not run**: the builder does not take the case's built model, or its option. Under
  `MirroredStrategy(...).scope()` your code builds the model, so it has fewer cases below.
- Data of unknown size (a finite generator, a filtered `tf.data`): plain Keras counts a step more
  for its end. One device, and the parallelisms whose loop is Keras's own (`model_parallel`,
  `tensor_parallel`, `pipeline_parallel`, `hybrid_parallel`), get the same batches, counted.
- `ScheduleFreeAdamW`: one device runs eagerly, or builds the optimizer before `fit`; otherwise
  Keras 3.15 resets its momentum to the weights at every step ([upstream.md](upstream.md)).

`data_parallel` is `tfparallel.data_parallel(build_model)`; `MirroredStrategy` is plain
Keras code under `tfparallel.MirroredStrategy(...).scope()`; `model_parallel` has the layers in two
stages, on two devices; `tensor_parallel` has each layer that can be split in two parts;
`pipeline_parallel` sends 4 micro-batches through two stages, by 1F1B; `hybrid_parallel` has a mesh
of data x pipeline x tensor, with a micro-batch for each stage; `workers` is `data_parallel` on
worker processes: on 2, on 3, or on 2 of two devices each (2 x 2).

Models with sequences are also trained with `Mesh(sequence=2)`, on one replica and on two: exact
(`tests/parity/test_sequences.py`).
"""

UPSTREAM = """\

## Beside it: TensorFlow's own strategy

The same task files on 3 replicas of the CPU, 20 steps in float64, rows of the text sorted
by length: plain Keras under `tf.distribute.MirroredStrategy`, against plain Keras on one
device. The largest relative difference of any weight, rounded to a power of ten.

| task file | plain Keras under `tf.distribute.MirroredStrategy` | `tfparallel.data_parallel` |
| --- | --- | --- |
"""


def runs(cases: list[Case]) -> list[str]:
    """How many cases each form and number of replicas ran."""
    ways = {(form, replicas) for _, _, form, replicas in SEEN}
    counts = {way: sum(case.runs_under(way[0]) for case in cases) for way in ways}
    by_form: dict[tuple[str, int], list[str]] = {}
    for (form, replicas), number in sorted(counts.items(), key=str):
        by_form.setdefault((form, number), []).append(str(replicas))
    return ["What ran:", ""] + [
        f"- `{form}` on {', '.join(ways)}{UNITS.get(form, ' replicas')}: {number} cases"
        for (form, number), ways in by_form.items()
    ]


def render(cases: list[Case], peers: list[str], page: str = "") -> str:
    """The page, from everything seen in this session, and rows that it did not run from `page`."""
    old_rows, lines = parse(page), [INTRODUCTION, *runs(cases)]
    notes: dict[str, int] = {}

    def text(result: Cell | None) -> str:
        if result is None:
            return "not run"
        if result.verdict != REFUSED:
            return str(result)
        said = [notes.setdefault(each, len(notes) + 1) for each in result.message.split(_OR)]
        return REFUSED + "".join(f"[^{number}]" for number in said)

    for group, of_group in itertools.groupby(unique_rows(cases), lambda case: case.group):
        rows = {}
        for case in of_group:
            if is_asked_for(case.feature):
                rows[case.feature] = row(case.feature)
            else:
                rows[case.feature] = [old_rows.get((case.feature, form)) for form in COLUMNS]
        lines.append(f"\n## {group}\n")
        everywhere = [feature for feature, cells in rows.items() if set(map(str, cells)) == {EXACT}]
        if everywhere:
            lines.append(f"{EVERYWHERE}{_AND.join(everywhere)}.")
        if len(everywhere) < len(rows):
            lines += [""] * bool(everywhere)
            lines.append(f"| feature | {' | '.join(f'`{form}`' for form in COLUMNS)} |")
            lines.append("| --- |" + " --- |" * len(COLUMNS))
            lines += [
                f"| {feature} | {' | '.join(map(text, cells))} |"
                for feature, cells in rows.items()
                if feature not in everywhere
            ]
    quoted = [f"[^{number}]: “{message}”" for message, number in notes.items()]
    return "\n".join([*lines, UPSTREAM + "\n".join(peers), "", *quoted]) + "\n"


def row(feature: str) -> list[Cell | None]:
    """What this session saw of a feature, by column; None where nothing was run."""
    cells = []
    for form in COLUMNS:
        seen = [c for (f, _, g, _), c in SEEN.items() if (f, g) == (feature, form)]
        cells.append(worst(seen) if seen else None)
    return cells


def unique_rows(cases: list[Case]) -> list[Case]:
    """The first case of each row, rows of a group together."""
    groups = list(dict.fromkeys(case.group for case in cases))
    first = {case.feature: case for case in reversed(cases)}
    rows = list(dict.fromkeys(case.feature for case in cases))
    return sorted((first[feature] for feature in rows), key=lambda c: groups.index(c.group))


def write(cases: list[Case]) -> None:
    """Writes the page, unless a case kept no verdict: its row would then say too much."""
    seen = {(name, form) for _, name, form, _ in SEEN}
    failed = [
        f"{case.name} under {form}"
        for case in cases
        for form in COLUMNS
        if is_asked_for(case.feature)
        if case.runs_under(form) and (case.name, form) not in seen
    ]
    if failed:
        raise AssertionError(f"docs/parity.md is not written: no verdict for {failed}")
    if os.environ.get(ROWS):
        page = PAGE.read_text()
        peers = page.partition(UPSTREAM)[2].partition("\n\n")[0].splitlines()
        PAGE.write_text(render(cases, peers, page))
    else:
        PAGE.write_text(render(cases, [upstream.table_row(name) for name in upstream.TASKS]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="run every pair and write the page")
    parser.add_argument("--seen", help="keep what is seen here; a run that broke off goes on")
    parser.add_argument(
        "--rows", default="", help="run rows that match this regular expression, and keep the rest"
    )
    parser.add_argument(
        "--workers", default=",".join(JOBS), help=f"numbers of workers to run: {', '.join(JOBS)}"
    )
    arguments = parser.parse_args()
    if not arguments.write:
        parser.print_help()
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SEEN_FILE] = os.path.abspath(
            arguments.seen or os.path.join(folder, "seen.jsonl")
        )
        os.environ[ONE_DEVICE_FOLDER] = folder
        os.environ[ROWS] = arguments.rows
        tests = "tests/parity/test_parity.py" if arguments.rows else "tests/parity"
        result = subprocess.run(
            # A case's pairs follow one another in one process, and share what it traced.
            [sys.executable, "-m", "pytest", "-q", "-n", "2", tests],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TFPARALLEL_PARITY": "write"},
            check=False,
        )
        if result.returncode == 0:
            from .cases import ALL  # TensorFlow, which the processes above do not inherit.

            read_seen()
            selected = [case for case in ALL if is_asked_for(case.feature)]
            run_workers(selected, arguments.workers.split(","))
            write(ALL)
    return result.returncode


def run_workers(cases: list[Case], labels: list[str], batch: int = 30) -> None:
    """Runs every case on each of the jobs, by label, and keeps what was seen."""
    by_name = {case.name: case for case in cases}
    for label in labels:
        num_workers, num_devices = JOBS[label]
        for start in range(0, len(cases), batch):
            names = [
                case.name
                for case in cases[start : start + batch]
                if (case.feature, case.name, WORKERS, label) not in SEEN
            ]
            for name, seen in workers.run_cases(names, num_workers, num_devices).items():
                if seen.failure:
                    raise AssertionError(f"{name} on {label} workers: {seen.failure}")
                record(by_name[name], WORKERS, label, seen.verdict, seen.detail)


if __name__ == "__main__":
    sys.exit(main())
