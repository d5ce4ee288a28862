"""The pictures of the pages are those that the programs of this repository draw."""

import pathlib
import re
import subprocess
import sys

import pytest

TOP = pathlib.Path(__file__).parents[2]
PICTURES = TOP / "docs" / "pictures"
PROGRAM = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import house, measured, steps
for program in (house, measured, steps):
    program.main(pathlib.Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    command = [sys.executable, "-B", "-c", PROGRAM, str(PICTURES), str(folder)]
    subprocess.run(command, cwd=TOP, check=True, timeout=180)
    return folder


def words(path):
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_picture_has_its_program(drawn):
    assert {path.name for path in drawn.iterdir()} == {p.name for p in PICTURES.glob("*.svg")}


def test_the_numbers_are_those_of_the_measurements(drawn):
    """`make pictures` after benchmarks/RESULTS.md or a JSON file has changed."""
    for path in drawn.iterdir():
        assert words(path) == words(PICTURES / path.name), path.name
    assert any(re.fullmatch(r"0\.\d\d", word) for word in words(drawn / "scaling.svg"))


def test_they_fetch_nothing_and_know_the_dark():
    for path in PICTURES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'(href|src)="http|url\(http|@import', text), path.name
        assert "prefers-color-scheme: dark" in text
