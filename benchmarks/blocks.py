"""Blocks of RESULTS.md, which several programs write, each between its own marks.

A block may end in a comment that is not shown: its figures, in JSON, for `summary.py`.
"""

import json
import re

FIRST = "summary"  # The first block of the page.
HEAD = """\
# Results

What the programs of this folder measured. Each writes a block, with the machine and the day it ran
on; `make bench` runs them all.
"""
_FIGURES = re.compile(r"^<!-- figures: (.*) -->$", re.MULTILINE)


def write(path, name, lines, figures=None):
    """Writes the lines between the marks of `name`, or at the end of the page.

    Args:
        path: The page; created if there is none.
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
    """Returns the figures by block, of those blocks that have any."""
    text = path.read_text() if path.exists() else ""
    blocks = re.finditer(r"<!-- (\w+): begin -->.*?<!-- \1: end -->\n", text, re.DOTALL)
    figures = {block[1]: _FIGURES.search(block[0]) for block in blocks}
    return {name: json.loads(match[1]) for name, match in figures.items() if match}


def _as_json(figures):
    """Returns JSON with four decimals, more than any of the figures is accurate to."""
    rounded = json.loads(json.dumps(figures), parse_float=lambda digits: round(float(digits), 4))
    return json.dumps(rounded)
