"""What MkDocs does not do by itself: pages from outside `docs/`, help texts, formulas, `folder/*`.

Formulas become MathML, which browsers show without a script from elsewhere.

A link out of `docs/`, such as `../benchmarks/RESULTS.md`, is right in the repository. In the site
the file it names stands under `repository/`, and the link leads there.
"""

import fnmatch
import html
import os
import pathlib
import posixpath
import re
import subprocess
import sys
import textwrap

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

TOP = pathlib.Path(__file__).parents[2]
OUTSIDE = "repository/"
COMMANDS = "reference/commands.md"
NAMES = (
    *("init", "train", "check", "plan", "plan all_reduce", "launch", "bench all_reduce"),
    *("bench pipeline", "bench train", "trace", "doctor"),
)
WIDE_COLUMNS = 8
HELP_WIDTH = 84
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)")
FILE_LINK = re.compile(r"\[`?[\w./]+\.md`?\]\(([^)\s#:]+\.md)")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL
)
PROGRAM = "import sys; from tfparallel.commands.main import main; main()"


def on_files(files, config):
    """Adds the pages that are not files of `docs/`, and completes the navigation."""
    waiting = [f for f in files if f.is_documentation_page() and not f.inclusion.is_excluded()]
    named = {page for page in _pages(config.nav) if page.startswith(OUTSIDE)}
    paths = [page.removeprefix(OUTSIDE) for page in named]
    while waiting or paths:
        for path in paths:
            uri = OUTSIDE + path
            if files.get_file_from_path(uri) is None:
                file = File.generated(config, uri, abs_src_path=str(TOP / path))
                files.append(file)
                waiting += [file] if file.is_documentation_page() else []
        paths = [path for file in waiting for path in _linked_outside(file)]
        waiting = []
    pages = [f.src_uri for f in files if f.is_documentation_page()]
    free = sorted(set(pages) - set(_pages(config.nav)))
    config.nav = _expanded(config.nav, free)
    return files


def on_page_markdown(markdown, page, config, files):
    """Leads links to where the site has the file, under its title; makes room for wide tables."""
    if page.file.src_uri == COMMANDS:
        markdown += _commands()
    rules = re.findall(r"^\|[-:| ]+\|$", markdown, re.MULTILINE)
    if max((rule.count("|") - 1 for rule in rules), default=0) >= WIDE_COLUMNS:
        page.meta.setdefault("hide", ["toc"])

    def moved(match):
        target = _in_repository(page.file, match[1])
        if not (TOP / target).is_file():
            return match[1]  # MkDocs complains.
        uri = _uri(target)
        file = files.get_file_from_path(uri)
        if file is None or file.inclusion.is_excluded():  # Which MkDocs tells, and does not mind.
            raise PluginError(f"{page.file.src_uri} links to {uri}, which the site does not have.")
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    def titled(match):
        file = files.get_file_from_path(_uri(_in_repository(page.file, match[1])))
        heading = file and re.search(r"^# (.+)$", file.content_string, re.MULTILINE)
        return f"[{heading[1]}]({match[1]}" if heading else match[0]

    return LINK.sub(moved, FILE_LINK.sub(titled, markdown))


def on_page_content(content, page, config, files):
    """Writes formulas, which pymdownx.arithmatex has marked, as MathML."""

    def as_mathml(match):
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return FORMULA.sub(as_mathml, content)


def _linked_outside(file):
    """The files outside `docs/` that a page links to, from the top of the repository."""
    targets = {_in_repository(file, link) for link in LINK.findall(file.content_string)}
    return [t for t in targets if _uri(t).startswith(OUTSIDE) and (TOP / t).is_file()]


def _in_repository(file, link):
    here = file.src_uri
    here = here.removeprefix(OUTSIDE) if here.startswith(OUTSIDE) else f"docs/{here}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), link))


def _uri(path):
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def _pages(nav):
    """Every path of a navigation, section by section."""
    for entry in nav if isinstance(nav, list) else [nav]:
        if isinstance(entry, dict):
            for below in entry.values():
                yield from _pages(below)
        else:
            yield entry


def _expanded(nav, free):
    """Puts the pages that no entry names where an entry is a pattern."""
    entries = []
    for entry in nav:
        if isinstance(entry, dict):
            entries.append(
                {
                    title: _expanded(below, free) if isinstance(below, list) else below
                    for title, below in entry.items()
                }
            )
        elif "*" in entry:
            # A star stands for no slash.
            entries += [
                page
                for page in free
                if page.count("/") == entry.count("/") and fnmatch.fnmatch(page, entry)
            ]
        else:
            entries.append(entry)
    return entries


def _commands():
    """What `--help` of each command prints, which needs no TensorFlow."""
    text = [""]
    for name in ("", *NAMES):
        command = [*name.split(), "--help"]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *command],
            cwd=TOP, env=os.environ | {"COLUMNS": str(HELP_WIDTH)}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or "usage:" not in done.stdout:
            raise RuntimeError(f"`tfparallel {' '.join(command)}` failed:\n{done.stderr}")
        lines = [part for line in done.stdout.rstrip().splitlines() for part in _wrapped(line)]
        text += [f"## tfparallel {name}".rstrip(), "", "```text", *lines, "```", ""]
    return "\n".join(text)


def _wrapped(line):
    """A line of help, cut where the page ends; its rest stands under the text beside a name."""
    indent = " " * len(re.match(r"\s*(\w+  +)?", line)[0])
    return textwrap.wrap(line, HELP_WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
