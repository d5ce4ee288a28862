"""Every command of docs/gpu.md exists, and its flags go together."""

import importlib
import pathlib
import re
import shlex
import sys

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs" / "gpu.md").read_text(encoding="utf-8")


def commands():
    """What the page calls `tfparallel` with, in blocks and in lines, under `launch` or not."""
    text = PAGE.replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    for line in lines:
        for command in line.split(" -- "):
            _, name, rest = command.rpartition("tfparallel ")
            if name and not command.startswith("pip"):
                yield rest.strip()


def test_all_of_them_are_read():
    names = [command.split()[0] for command in commands()]
    assert names.count("launch") == 4 and names.count("train") == 4
    assert {"doctor", "check", "plan"} <= set(names)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_is_one(command):
    name, *arguments = shlex.split(command)
    module = importlib.import_module(f"tfparallel.commands.{name}")
    values = module._flags()
    _, *positional = values(["tfparallel", *arguments])
    assert all((TOP / path).is_file() for path in positional)
    assert len(positional) == (name not in ("doctor", "launch"))
    assert not module._problems(values, *[[sys.executable]] * (name == "launch"))


def test_the_job_of_slurm_asks_for_what_the_page_says():
    (script,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    asked = dict(re.findall(r"^#SBATCH (--[\w-]+)=(\S+)$", script, re.MULTILINE))
    assert int(asked["--cpus-per-task"]) > 1 and asked["--gpus-per-task"] == "1"
    assert re.search(
        r"^srun --cpus-per-task=\$SLURM_CPUS_PER_TASK --kill-on-bad-exit=1", script, re.M
    )
