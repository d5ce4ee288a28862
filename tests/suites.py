"""Named suites of slow tests, of which `make test` runs a sample that changes with the commit.

    pytest                    every test
    pytest -m parity          one suite
    pytest -m "not slow"      what takes less than about a second each (`make test-fast`)
    pytest --sample=commit    the fast tests, and a sample of each suite (`make test`)
    pytest --sample=3f2c1a0   the sample of that commit, or of any other word

A slow test belongs to the suite of its folder, or to the one whose marker it carries. A suite is
divided into as many parts as SUITES says, and a commit's hash chooses one part of each. All N parts
of a suite have been chosen after about N (ln N + 0.6) commits: 37 for 12 parts, 72 for 20.
"""

import shlex
import subprocess
import zlib
from collections.abc import Collection, Iterable

import pytest

from tests.scheduling import shared_work

# Suite -> (in how many parts a sample divides it, what it holds).
SUITES = {
    "parity": (20, "each case of docs/parity.md in each form"),
    "networks": (15, "networks of keras.applications"),
    "workers": (12, "jobs of several worker processes"),
    "faults": (12, "workers that are killed or hang, and planted faults"),
    "hosts": (20, "jobs of several hosts: network namespaces, a Slurm cluster, a Ray cluster"),
    "features": (16, "features of each kind of parallelism, trained in one process"),
    "programs": (12, "commands, tasks, examples of the pages, notebooks, benchmarks"),
    "judge": (20, "693 small programs, of which the judge must say whether they mix examples"),
}
# The longest prefix of a test's path, behind `tests/`, decides; what has none is of "features".
FOLDERS = {
    "": "features",
    "asynchronous/": "workers",
    "benchmarks/": "programs",
    "cluster/": "workers",
    "cluster/test_slurm_cluster.py": "hosts",
    "colab/": "programs",
    "collectives/": "workers",
    "commands/": "programs",
    "diagnostics/": "programs",
    "diagnostics/test_check_faults.py": "faults",
    "diagnostics/test_inject.py": "faults",
    "diagnostics/test_networks.py": "networks",
    "docs/": "programs",
    "judge/": "judge",
    "flight/": "workers",
    "gpu/": "programs",
    "hosts/": "hosts",
    "models/": "programs",
    "ray/": "hosts",
    "parity/": "parity",
    "parity/test_applications.py": "networks",
    "parity/test_workers.py": "workers",
    "placement/test_processes.py": "workers",
    "test_readme.py": "programs",
    "test_startup.py": "programs",
    "test_wheel.py": "programs",
    "workers/": "workers",
    "workers/test_restart.py": "faults",
}


def also_slow(values: Iterable, fast: Collection) -> list:
    """Values for `parametrize`; a test is slow with all that are not among the fast ones."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.slow) for each in values]


def suite_of(item: pytest.Item) -> str | None:
    """Returns the name of a slow test's suite; None for a fast test."""
    for name in SUITES:
        if item.get_closest_marker(name):
            return name
    if not item.get_closest_marker("slow"):
        return None
    path = item.nodeid.removeprefix("tests/")
    return FOLDERS[max((prefix for prefix in FOLDERS if path.startswith(prefix)), key=len)]


def is_chosen(suite: str, nodeid: str, seed: str) -> bool:
    """Whether a test is in the part of its suite that a seed chooses.

    Tests that share what takes long to make are chosen together.

    Args:
        suite: A name of SUITES.
        nodeid: The test's id.
        seed: Any word.
    """
    num_parts, _ = SUITES[suite]
    part = zlib.crc32(f"{seed} {suite}".encode()) % num_parts
    return zlib.crc32(shared_work(nodeid).encode()) % num_parts == part


def hash_of_commit(folder: str) -> str:
    """Returns the commit's hash; "no commit" outside of a repository."""
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()[:12] or "no commit"


def pytest_addoption(parser):
    """Called by pytest."""
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="run a sample of each suite of slow tests (tests/suites.py), chosen by SEED; "
        "'commit' stands for the commit's hash",
    )


def pytest_configure(config):
    """Called by pytest: the suites are markers, and the seed is the same in every process."""
    for name, (num_parts, content) in SUITES.items():
        line = f"{name}: a suite: {content}; a sample has one test in {num_parts}"
        config.addinivalue_line("markers", line)
    if config.option.sample == "commit":
        config.option.sample = hash_of_commit(str(config.rootpath))


def pytest_report_header(config):
    """Called by pytest."""
    if (seed := config.option.sample) is None:
        return None
    return f"of each suite of slow tests one part, chosen by the commit: --sample={seed}"


def pytest_collection_modifyitems(config, items):
    """Called by pytest: gives each slow test its suite's marker, and takes the sample."""
    chosen, deselected = [], []
    for item in items:
        suite = suite_of(item)
        if suite is not None:
            item.add_marker(suite)
            item.add_marker("slow")
        seed = config.option.sample
        is_left = seed is not None and suite is not None and not is_chosen(suite, item.nodeid, seed)
        (deselected if is_left else chosen).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = chosen


def pytest_terminal_summary(terminalreporter):
    """Called by pytest: names the command that runs each failed test alone."""
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if reports:
        terminalreporter.section("run it alone")
    for nodeid in dict.fromkeys(report.nodeid for report in reports):
        terminalreporter.line(f".venv/bin/python -m pytest {shlex.quote(nodeid)}")
