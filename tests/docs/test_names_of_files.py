"""Every file that the internals' pages, docstrings and comments name is there."""

import pathlib
import re

import pytest

TOP = pathlib.Path(__file__).parents[2]
LIBRARY = TOP / "tfparallel"
PAGES = [*(TOP / "docs" / "internals").glob("*.md"), TOP / "docs" / "upstream.md"]
NAMED = re.compile(r"[`(]((?:[a-z_*]+/)*[a-z_]+\.py)[`):,; ]")
# What a page or a docstring tells of others, or of what a user writes.
OF_OTHERS = {"train.py", "model.py", "script.py", "task.py", "setup.py", "conftest.py"}


def is_there(name, beside):
    if name.rpartition("/")[2] in OF_OTHERS or name.endswith("_test.py"):  # Keras's tests.
        return True
    is_elsewhere = "/" in name or name.startswith("test_")
    places = [beside, LIBRARY, *((TOP / "tests", TOP) if is_elsewhere else ())]
    return any(next(place.glob(f"**/{name}"), None) is not None for place in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_of_a_page(page):
    names = sorted(set(NAMED.findall(page.read_text())))
    assert [name for name in names if not is_there(name, LIBRARY)] == []


def test_of_the_source():
    missing = []
    for path in sorted(LIBRARY.rglob("*.py")):
        text = path.read_text()
        missing += [
            f"{path.relative_to(LIBRARY)}: {name}"
            for name in sorted(set(NAMED.findall(text)))
            if not is_there(name, path.parent)
        ]
    assert missing == []
