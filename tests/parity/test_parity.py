"""Every case under every form and number of replicas, against one device."""

from __future__ import annotations

import functools
import re

import pytest

from . import table
from .case import EXACT, FORMS, REFUSED, REPRODUCIBLE, Case, Plain, compare, run
from .cases import ALL

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@functools.lru_cache(maxsize=4)
def on_one_device(name: str):
    """The observation that a case is measured with; its tests follow one another."""
    (case,) = [case for case in ALL if case.name == name]
    return run(case, Plain(), baseline=True)


def parameters():
    """The pairs of this session.

    Every case on 3 replicas under `data_parallel`, which the fast tests run too; of
    each row the first case also on 2 replicas and under the drop-in strategy, and
    the last on 4. With TFPARALLEL_PARITY=all (or write): every case in every way.
    """
    rows = {}
    for case in ALL:
        rows.setdefault(case.feature, []).append(case)
    for case in ALL:
        first, last = rows[case.feature][0], rows[case.feature][-1]
        for form in FORMS:
            for replicas in (3, 2, 4):
                sampled = {
                    ("data_parallel", 3): True,
                    ("data_parallel", 2): case is first,
                    ("data_parallel", 4): case is last,
                    ("MirroredStrategy", 3): case is first,
                }.get((form, replicas), False)
                if not (sampled or table.MODE) or (form == "MirroredStrategy" and not case.drop_in):
                    continue
                fast = form == "data_parallel" and replicas == 3 and not case.slow
                yield pytest.param(
                    case,
                    form,
                    replicas,
                    id=f"{case.name.replace(' ', '-')}-{form}-{replicas}",
                    marks=[] if fast else [pytest.mark.slow],
                )


@pytest.mark.parametrize(("case", "form", "replicas"), parameters())
def test_trains_as_one_device_does(case: Case, form: str, replicas: int):
    verdict, detail = judge(case, FORMS[form](DEVICES[:replicas]))
    table.record(case, form, replicas, verdict, detail)


def judge(case: Case, form) -> tuple[str, float | str]:
    """Trains the case and says which verdict it earned, or fails.

    Returns:
        `("exact", largest relative difference)`, `("reproducible", same of the
        second run)`, or `("refused", message)`.
    """
    expected = on_one_device(case.name)
    try:
        seen = run(case, form)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if REFUSED in case.verdicts and re.search(case.message, str(error)):
            return REFUSED, str(error)
        raise
    differences = compare(expected, seen)
    if EXACT in case.verdicts and differences[0].relative <= case.limit:
        return EXACT, differences[0].relative
    if REPRODUCIBLE in case.verdicts:
        differences = compare(seen, run(case, form))
        if differences[0].relative <= case.limit:
            return REPRODUCIBLE, differences[0].relative
    worst = "\n".join(f"  {d.name}: {d.relative:.1e}" for d in differences[:12])
    number = sum(difference.relative > case.limit for difference in differences)
    raise AssertionError(
        f"{case.name} under {form.name} on {len(form.devices)} replicas is none of "
        f"{', '.join(case.verdicts)}: {number} of {len(differences)} values differ from one "
        f"device by more than {case.limit:.0e}, relative. The largest:\n{worst}"
    )
