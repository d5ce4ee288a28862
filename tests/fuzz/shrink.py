"""Makes a finding's program smaller, by hypothesis, for as long as it shows the same."""

from __future__ import annotations

import contextlib
import time

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes

from .generator import draw_program
from .judge import Discarded, OneDevice, Outcome, judge
from .program import Program, source


class Shown(Exception):
    """A program shows what the finding showed."""


def shrink(
    choices: list[int],
    outcome: Outcome,
    excluded: frozenset[str] = frozenset(),
    seconds: float = 120,
) -> tuple[Program, Outcome]:
    """The smallest program that was found in `seconds`.

    Args:
        choices: Those that made the program, of `generator.drawn`.
        outcome: What it showed, and under which form.
        excluded: What `generator.drawn` left out.
        seconds: After that no further program is trained.

    Returns:
        The program and its outcome.
    """
    until = time.monotonic() + seconds
    tried: dict[Program, Outcome | None] = {}

    def outcome_of(program: Program) -> Outcome | None:
        try:
            return judge(outcome.form, OneDevice.train(program))
        except Discarded:
            return None

    def body(draw):
        program = draw_program(lambda count: draw(st.integers(0, count - 1)), excluded)
        if program not in tried:
            if tried and time.monotonic() > until:
                reject()
            tried[program] = outcome_of(program)
        seen = tried[program]
        if seen is not None and seen.family == outcome.family:
            raise Shown(source(program))

    key, database = b"finding", InMemoryExampleDatabase()
    # Under the first key hypothesis keeps what is small already.
    database.save(key + b".secondary", choices_to_bytes(choices))

    def search(number: int) -> None:
        @settings(
            database=database,
            deadline=None,
            phases=[Phase.reuse, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
            derandomize=False,
        )
        @seed(number)  # Below the settings: it takes the database away.
        @given(st.composite(lambda draw: body(draw))())
        def smaller(_):
            pass

        smaller._hypothesis_internal_database_key = key
        with contextlib.suppress(Shown):
            smaller()

    sizes = []
    # It tries at random, and may stop too early; what it has found is where it begins again, with
    # other numbers, until three times in a row find nothing smaller.
    while len(sizes) < 4 or sizes[-1] < sizes[-4]:
        search(len(sizes))
        alike = [p for p, seen in tried.items() if seen and seen.family == outcome.family]
        if not alike:
            raise RuntimeError("The finding does not show a second time.")
        smallest = min(alike, key=lambda program: len(source(program)))
        sizes.append(len(source(smallest)))
    return smallest, tried[smallest]
