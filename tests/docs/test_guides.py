"""What holds for every guide: it is short, its links lead somewhere, its scripts run."""

import ast
import pathlib
import re
import sys
import unicodedata

import pytest

from tests.forked import run_python

TOP = pathlib.Path(__file__).resolve().parents[2]
# Written by tests, or a list of what the code rests on: tables, and no guides.
REFERENCE = {"parity.md", "upstream.md"}
GUIDES = sorted(path for path in (TOP / "docs").glob("*.md") if path.name not in REFERENCE)
INTERNALS = sorted((TOP / "docs" / "internals").glob("*.md"))
# The site's own pages may look otherwise, and it makes pages of its own.
PAGES = [page for page in [*GUIDES, *INTERNALS] if page.name not in ("index.md", "quick_start.md")]
MADE_BY_THE_SITE = "reference/"
LINKED = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md")), *INTERNALS]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MAX_WORDS = 1000
DEADLINE_SECONDS = 180


def name_of(path):
    return str(path.relative_to(TOP))


def prose(text):
    return FENCE.sub("", text)


def num_words(text):
    """Words outside of code, those of tables included; a bar or a dash alone is none."""
    return sum(any(letter.isalnum() for letter in word) for word in prose(text).split())


def github_anchor(title):
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def site_anchor(title):
    """As Python-Markdown's `toc` makes them, which mkdocs takes."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(path):
    """The anchors of a page that GitHub and the site have both."""
    text = prose(path.read_text(encoding="utf-8"))
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        for title in re.findall(r"^#{1,6} +(.+)$", text, re.MULTILINE)
    ]
    return {anchor for title in titles if (anchor := github_anchor(title)) == site_anchor(title)}


def test_every_guide_is_seen():
    names = {path.name for path in GUIDES}
    assert {"data_parallel.md", "multi_worker.md", "troubleshooting.md", "gpu.md"} <= names
    assert len(INTERNALS) > 5


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_is_short(page):
    assert num_words(page.read_text(encoding="utf-8")) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_one_title(page):
    text = prose(page.read_text(encoding="utf-8"))
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1 and text.startswith("# ")


def what_you_see(page):
    """A pattern for each line of the first block that the guide shows as its script's output."""
    if page.name == "check.md":  # It shows the output of its command instead.
        return []
    block = r"^## What you see$.*?^```text\n(.*?)^```$"
    match = re.search(block, page.read_text("utf-8"), re.M | re.S)
    lines = match[1].splitlines() if match else []
    return [pattern(line) for line in lines if line != "..."]


def pattern(line):
    """The line without what varies: measured times, losses, and the layers of a measured cut."""
    escaped = re.escape(line)
    escaped = re.sub(r"\b\d+(?=m?s\b)|(?<=loss:\\ )[\d.\\]+", r"[\\d.]+", escaped)
    return re.sub(r"(stage\\ \d\\ \\ CPU:\d\\ \\ ).*", r"\1\\w.*", escaped)


def scripts():
    """The scripts of the guides that run as they stand, with what starts them and is printed."""
    for page in GUIDES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
            if block.startswith("import keras\n") and page.name != "migrate.md":
                on_workers = "tfparallel.init()" in block
                yield pytest.param(block, on_workers, what_you_see(page), id=name_of(page))


SCRIPTS = list(scripts())


def test_the_scripts_are_seen():
    _, on_workers, shown = zip(*(script.values for script in SCRIPTS), strict=True)
    assert len(SCRIPTS) >= 7 and any(on_workers)
    assert sum(len(lines) > 2 for lines in shown) >= 6


def test_patterns_ignore_what_varies_between_runs():
    epoch = "[0] 16/16 - 1s - 3ms/step - loss: 0.1"
    assert re.fullmatch(pattern("[0] 16/16 - 2s - 11ms/step - loss: 7.5566"), epoch)
    assert re.fullmatch(pattern("  stage 0  CPU:0  first"), "  stage 0  CPU:0  first, second")
    assert not re.fullmatch(pattern("data parallel: data=2"), "data=2")
    assert not re.fullmatch(pattern("  stage 0  CPU:0  first"), "  stage 0  CPU:1  first")


@pytest.mark.slow  # The forms are trained elsewhere; this is that the page can be copied.
@pytest.mark.parametrize("script, on_workers, shown", SCRIPTS)
def test_a_script_can_be_copied(script, on_workers, shown, tmp_path):
    for package in re.findall(r"^import (\w+)", script, re.MULTILINE):
        pytest.importorskip(package)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    launcher = ["-m", "tfparallel", "launch", "--nproc_per_node=2", "--", sys.executable]
    command = [*launcher * on_workers, "train.py"]
    done = run_python(command, cwd=tmp_path, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(tmp_path.glob("*.keras")) or "OK: " in done.stdout
    printed = (done.stdout + done.stderr).splitlines()
    assert not [line for line in shown if not any(re.fullmatch(line, each) for each in printed)]


def languages(page):
    """What stands behind the fence of each block."""
    return re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_names_its_language(page):
    assert all(languages(page))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_and_anchors_lead_somewhere(page):
    text = prose(page.read_text(encoding="utf-8"))
    missing = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" in target or target.startswith(MADE_BY_THE_SITE):
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(f"{target}#{anchor}" if anchor else target)
    assert not missing


def messages():
    """What docs/troubleshooting.md quotes, in the first cells of its tables."""
    text = (TOP / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (.*?) \| ", prose(text), re.MULTILINE):
        for long, short in re.findall(r"``(.+?)``|`([^`]+)`", row):
            if (quoted := long or short)[0] != "-" and " " in quoted:
                yield quoted


def texts():
    """Every text of the package; what a message fills in ends one."""
    for path in (TOP / "tfparallel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_are_those_of_the_package():
    messages_of_package, quoted = "\n".join(texts()), list(messages())
    assert len(quoted) > 20
    parts = [part.strip() for text in quoted for part in text.split("…")]
    assert not [part for part in parts if part not in messages_of_package]
