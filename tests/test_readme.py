"""What the README shows runs as it stands."""

import os
import pathlib
import re

import pytest

from tests.forked import run_python

TOP = pathlib.Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
DEADLINE_SECONDS = 180


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.mark.slow
@pytest.mark.fresh_interpreter
def test_the_example_runs_and_saves_plain_keras(tmp_path):
    (example,) = blocks("python")
    finished = run_python(
        ["-c", f"{example}\nprint('trained on', len(model.strategy.devices))"],
        cwd=tmp_path,
        env=environment(),
        timeout=DEADLINE_SECONDS,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Epoch 5/5" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "trained on 2"
    assert (tmp_path / "model.keras").stat().st_size > 0


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}


DOCS = [f"docs/{page.name}" for page in (TOP / "docs").glob("*.md")]
PAGES = ["README.md", "CHANGELOG.md", *DOCS]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_between_files_lead_somewhere(page):
    text = (TOP / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    inside = [target for target in targets if "://" not in target]
    missing = [target for target in inside if not (TOP / page).parent.joinpath(target).exists()]
    assert not missing


def test_the_makefile_has_the_commands():
    makefile = (TOP / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_canaries_named_exist():
    page = (TOP / "docs" / "upstream.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:…|test_)(\w+)(?:\[\w+\])?`", page)
    assert len(named) > 15
    tests = "".join(path.read_text(encoding="utf-8") for path in (TOP / "tests").rglob("test_*.py"))
    defined = re.findall(r"^def (test_\w+)", tests, re.MULTILINE)
    assert not [name for name in named if not any(each.endswith(name) for each in defined)]
    files = re.findall(r"`((?:\w+/)+test_\w+\.py)`", page)
    assert not [file for file in files if not (TOP / "tests" / file).is_file()]
