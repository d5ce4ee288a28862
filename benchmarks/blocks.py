"""RESULTS.md is written by several programs, each of them between marks of its own."""

import re


def write(path, name, lines):
    """Puts the lines between the marks of `name`, or at the end of the page if it has none yet."""
    text = path.read_text() if path.exists() else ""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = "\n".join([begin, *lines, end]) + "\n"
    pattern = re.compile(f"{begin}.*?{end}\n", re.DOTALL)
    text = pattern.sub(lambda _: block, text) if pattern.search(text) else f"{text}\n{block}"
    path.write_text(text)


def all_of(text):
    """Returns all blocks of a page, as they are."""
    blocks = re.finditer(r"<!-- (\w+): begin -->.*?<!-- \1: end -->\n", text, re.DOTALL)
    return "".join(f"\n{block[0]}" for block in blocks)
