"""Every command line and every flag of README, guides and notebooks exists; none of them is run."""

import ast
import importlib.util
import json
import pathlib
import re
import shlex
import sys

import pytest

from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.flag_table import flags_of
from tfparallel.command_line.runner import checked

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
PAGES += [*sorted((TOP / "colab").glob("*.ipynb")), *sorted((TOP / "models").glob("*.py"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# What stands for the reader's own file or command.
PLACEHOLDERS = ("…", "TASK.py", "task.py", "train.py", "digits_task.py")
# Calls that only name a flag.
NAMED = {"plan --draw"}
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]*)")
# Flags of other programs: Slurm's, pip's, XLA's, and those of this project's own scripts.
OTHERS = """
    cpus-per-task exclusive gpus-per-task kill-on-bad-exit no-kill nodes ntasks-per-node partition
    time no-deps quiet tf_xla_auto_jit tf_xla_cpu_global_jit tf_xla_ops_to_cluster help version
    auto busy forms minutes no_workers num_rounds policy rows seconds tasks total_timeout trials
    write
""".split()


def text_of(page):
    """A page as Markdown: the cells of a notebook, the docstring of a model in a block."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        return f"```\n{ast.get_docstring(ast.parse(text))}\n```"
    if page.suffix == ".md":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join(
        "".join(cell["source"]) if cell["cell_type"] == "markdown" else f"```\n{code(cell)}\n```"
        for cell in cells
    )


def code(cell):
    """A cell's code, with commands as at the terminal: in a text, a list, or after `!`."""
    text = "".join(cell["source"])
    text = re.sub(r'" *\n *f?"', "", text)  # A text in several lines.
    calls = re.findall(r'^ *command = (?:\(\n *)?f?"([a-z].*)"', text, re.MULTILINE)
    lists = re.findall(r'\[sys.executable, "-m", ("tfparallel", "\w+".*?)\]', text)
    shell = re.findall(r"^!.*", text.replace("{command}", "tfparallel"), re.MULTILINE)
    lines = ["tfparallel " + re.sub("{.*?}", "rows.json", call) for call in calls]
    lines += [" ".join(re.findall('"(.*?)"', each)) for each in lists]
    lines += [re.sub(r"^!cd {\w+} && ", "", line) for line in shell]
    flags = re.findall(r'^flags = f?"(.*)"', text, re.MULTILINE)
    return "\n".join(lines).replace("{flags}", " ".join(flags)).replace("{device_type}", "cpu")


def commands(text):
    """What a page calls `tfparallel` with, in blocks and in a line of prose, under `launch` too."""
    text = text.replace("\\\n", " ")
    blocks = [block.partition("\n")[2] for block in FENCE.findall(text)]
    lines = [line for block in blocks for line in block.splitlines()]
    # A command that a sentence names without a flag is its name, and not a call.
    lines += re.findall(r"`(tfparallel [^`\n]*--\w[^`\n]*)`", FENCE.sub("", text))
    for line in lines:
        line = re.split(r"  #| > | && | \| | --$", line)[0]
        for command in line.split(" -- "):
            before = r"\s*(?:\w+=\S+ |\$ |srun .*?)*\s*(?:\S*/)?"
            called = re.match(rf"{before}tfparallel ([a-z]+)( .*|)$", command)
            if called and called[1] in COMMANDS:
                yield " ".join(f"{called[1]}{called[2]}".split())


CALLS = sorted({call for page in PAGES for call in commands(text_of(page))} - NAMED)


def test_the_calls_are_seen():
    assert {call.split()[0] for call in CALLS} == {name.split()[0] for name in COMMANDS}
    assert {"doctor", "launch --nproc_per_node=8"} <= set(CALLS)
    lines = "```bash\n$ tfparallel plan a.py  # first\nsrun -n 2 tfparallel train b.py > c\n```\n"
    assert list(commands(lines)) == ["plan a.py", "train b.py"]
    lines = "```bash\ntfparallel launch --x=1 -- \\\n  tfparallel train a.py\n```\n"
    assert list(commands(lines)) == ["launch --x=1", "train a.py"]


@pytest.mark.parametrize(
    ("page", "calls"),
    [
        ("README.md", {"doctor --suggest", "bench all_reduce --nproc_per_node=2"}),
        ("models/lenet.py", {"check models/lenet.py --parallel=data --num_devices=2"}),
        ("colab/all_reduce.ipynb", {"plan all_reduce --ranks=4096 --local_ranks=8"}),
        ("colab/model_parallel.ipynb", {"launch --nproc_per_node=2"}),
        ("colab/multi_worker.ipynb", {
            "launch --nproc_per_node=2",
            "train digits_task.py --device_type=cpu --epochs=3 --seed=7 --save=digits.keras",
        }),
    ],
)  # fmt: skip
def test_the_calls_of_each_kind_of_page_are_seen(page, calls):
    assert calls <= set(commands(text_of(TOP / page)))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one(call, tmp_path, monkeypatch):
    """Parsed and checked as the command does, without the work."""
    name, *arguments = shlex.split(call)
    if "--on=ray" in arguments and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'tfparallel[ray]'")
    if (of_two := f"{name} {arguments[0]}" if arguments else name) in COMMANDS:
        name, arguments = of_two, arguments[1:]
    monkeypatch.setenv("TFPARALLEL_JOB_TOKEN", "a-secret-of-the-tests")
    monkeypatch.chdir(tmp_path)  # Files to write are looked for where the command runs.
    words = []
    for word in arguments:
        if (word in PLACEHOLDERS or (TOP / word).is_file()) and name != "init":
            word = str(tmp_path / "task.py")
            pathlib.Path(word).touch()
        words.append(word)
    if COMMANDS[name].is_on_task and all(word.startswith("--") for word in words):
        pathlib.Path("task.py").touch()  # A sentence may leave the file out.
        words.append("task.py")
    if name == "trace":
        (tmp_path / words[0]).mkdir(parents=True)
    if name == "launch":  # What stands behind "--" is looked at by itself.
        words = [*(word for word in words if word.startswith("--")), "--", sys.executable]
    checked(name, words)


def is_known(flag):
    known = {
        name
        for command in COMMANDS
        for row in flags_of(command).values()
        for name in (row.name, *row.also)
    }
    names = {flag.replace("-", "_"), re.sub("^no-?", "", flag).replace("-", "_")}
    return bool(names & known) or flag in OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_every_flag_is_one(page):
    """Of flags that a sentence names alone, too."""
    assert not [flag for flag in FLAG.findall(text_of(page)) if not is_known(flag)]
