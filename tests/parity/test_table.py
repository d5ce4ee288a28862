"""The page docs/parity.md says what the tests of this session saw. Runs after them."""

from __future__ import annotations

import pytest

from . import table, upstream
from .case import EXACT, REFUSED
from .cases import ALL
from .table import Cell, cell, worst


def test_names_are_unique_and_rows_have_one_group():
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
    groups = {}
    for case in ALL:
        assert groups.setdefault(case.feature, case.group) == case.group, case.feature


@pytest.mark.parametrize(
    ("verdict", "detail", "text"),
    [
        (EXACT, 0.0, "exact"),
        (EXACT, 3e-11, "exact, ≤ 1e-10"),
        (EXACT, 1e-10, "exact, ≤ 1e-10"),
        (REFUSED, "Not on 3 replicas. Received: x", "refused: “Not on N replicas.”"),
        (
            REFUSED,
            "Exception encountered when calling X.call().\n\n\x1b[1mNo state. Received: x\x1b[0m",
            "refused: “No state.”",
        ),
    ],
)
def test_a_cell_prints_what_it_parses(verdict, detail, text):
    assert str(cell(verdict, detail)) == text
    if verdict != REFUSED:  # On the page that is a footnote.
        assert Cell.parse(text, {}).verdict == verdict
        assert str(Cell.parse(text, {})) == text


def test_a_cell_allows_noise_and_no_worse_verdict():
    exact = Cell(EXACT, 1e-12)
    assert exact.allows(Cell(EXACT, 1e-11))
    assert not exact.allows(Cell(EXACT, 1e-9))
    assert not exact.allows(Cell(REFUSED, message="a"))
    assert not Cell(REFUSED, message="a").allows(Cell(REFUSED, message="b"))


def test_a_cell_names_each_refusal_of_its_cases():
    a, b, exact = Cell(REFUSED, message="a"), Cell(REFUSED, message="b"), Cell(EXACT, 1e-12)
    both = worst([b, exact, a])
    assert str(both) == "refused: “a” or “b”"
    assert Cell.parse("refused[^3][^1]", {"3": "a", "1": "b"}) == both
    assert both.allows(a) and both.allows(b) and not both.allows(Cell(REFUSED, message="c"))


def test_every_row_stands_on_the_page():
    if table.MODE == "write":
        pytest.skip("the page is being written")
    cells = table.parse(table.PAGE.read_text())
    rows = {case.feature for case in ALL}
    missing = rows - {feature for feature, _ in cells}
    # The last table is of task files, beside TensorFlow's own strategy.
    surplus = {feature for feature, _ in cells if "tests/tasks/" not in feature} - rows
    assert not missing and not surplus, f"missing {missing}, surplus {surplus}. {table.RENEW}"


def test_the_page_begins_with_the_introduction_and_says_what_was_not_run():
    if table.MODE == "write":
        pytest.skip("the page is being written")
    page = table.PAGE.read_text()
    assert page.startswith(table.INTRODUCTION), table.RENEW
    run = {case.feature for case in ALL if case.drop_in}
    not_run = {line.split(" | ")[0][2:] for line in page.splitlines() if "| not run |" in line}
    assert not_run == {case.feature for case in ALL} - run


@pytest.mark.slow
@pytest.mark.parametrize("name", upstream.TASKS)
def test_what_tensorflows_own_strategy_does_with_the_task(name):
    row = upstream.table_row(name)
    if table.MODE != "write":
        assert row in table.PAGE.read_text(), f"The page lacks: {row}\n{table.RENEW}"


def test_a_stale_cell_is_refused(monkeypatch, tmp_path):
    case = ALL[0]
    page = tmp_path / "parity.md"
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "SEEN", {})
    monkeypatch.delenv(table.SEEN_FILE, raising=False)
    table.record(case, "data_parallel", 3, EXACT, 1e-10)
    page.write_text(f"| {case.feature} |" + " exact |" * len(table.COLUMNS))
    table.refuse_stale(case, "data_parallel", 3)
    table.record(case, "data_parallel", 3, EXACT, 1e-8)
    with pytest.raises(AssertionError, match=r"is stale.*the page says “exact”"):
        table.refuse_stale(case, "data_parallel", 3)
    page.write_text("")
    with pytest.raises(AssertionError, match="says “None”"):
        table.refuse_stale(case, "data_parallel", 3)


def test_rows_that_were_not_asked_for_stay_as_they_are(monkeypatch, tmp_path):
    row = next(case.feature for case in ALL if case.feature == "`float32`")
    cases = [case for case in ALL if case.feature == row]
    before = table.PAGE.read_text()
    page = tmp_path / "parity.md"
    page.write_text(before)
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "SEEN", {})
    monkeypatch.setenv(table.ROWS, f"^{row}$")
    monkeypatch.delenv(table.SEEN_FILE, raising=False)
    for form in table.COLUMNS[:-1]:
        for case in cases:
            table.record(case, form, 2, EXACT, 1e-7)
    with pytest.raises(AssertionError, match="is not written: no verdict for .* under workers"):
        table.write(ALL)
    for case in cases:
        table.record(case, table.WORKERS, "2", EXACT, 1e-7)
    table.write(ALL)
    counts = ("- `",)  # Those of this session's numbers of replicas.
    old, new = ([line for line in text.splitlines() if not line.startswith(counts)]
                for text in (before, page.read_text()))  # fmt: skip
    (changed,) = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    assert changed[1] == f"| {row} |" + " exact, ≤ 1e-07 |" * len(table.COLUMNS)
