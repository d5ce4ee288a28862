"""RESULTS.md is written by several programs, each of them between marks of its own.

A block may end in a comment that a page does not show: figures of it, in JSON, for `summary.py`.
"""

import json
import re

FIRST = "summary"  # The block that stands before the others.
HEAD = """\
# Results

What the programs of this folder measured. Each writes a block, with the machine and the day it ran
on; `make bench` runs them all.
"""
_FIGURES = re.compile(r"^<!-- figures: (.*) -->$", re.MULTILINE)


def write(path, name, lines, figures=None):
    """Puts the lines between the marks of `name`, or at the end of the page if it has none yet.

    Args:
        path: The page; made if there is none.
        name: The block's name.
        lines: What the page shows.
        figures: What `read_figures` returns of this block: dictionaries, numbers and text.
    """
    text = path.read_text() if path.exists() else HEAD
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    hidden = [] if figures is None else ["", f"<!-- figures: {_as_json(figures)} -->"]
    block = "\n".join([begin, *lines, *hidden, end]) + "\n"
    pattern = re.compile(f"{begin}.*?{end}\n", re.DOTALL)
    first = re.search(r"^<!-- \w+: begin -->$", text, re.MULTILINE)
    if pattern.search(text):
        text = pattern.sub(lambda _: block, text)
    elif name == FIRST and first:
        text = f"{text[: first.start()]}{block}\n{text[first.start() :]}"
    else:
        text = f"{text}\n{block}"
    path.write_text(text)


def read_figures(path):
    """Returns the figures of each block that has any, by its name."""
    text = path.read_text() if path.exists() else ""
    blocks = re.finditer(r"<!-- (\w+): begin -->.*?<!-- \1: end -->\n", text, re.DOTALL)
    figures = {block[1]: _FIGURES.search(block[0]) for block in blocks}
    return {name: json.loads(match[1]) for name, match in figures.items() if match}


def _as_json(figures):
    """Four digits behind the point are more than any of the figures is good for."""
    rounded = json.loads(json.dumps(figures), parse_float=lambda digits: round(float(digits), 4))
    return json.dumps(rounded)
