"""Runs tests on the versions of TensorFlow, Keras and Python that people have.

    python -m tests.versions                 the fast tests on each pair (`make test-versions`)
    python -m tests.versions oldest --smoke  whether each form trains on the oldest (`.ci/run`)
    python -m tests.versions next            on what is not released yet; only if it is named

Each pair has an environment of its own, `.venv-NAME`, which is made once.
"""

import configparser
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

from tests.named import parse_names

TOP = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Pair:
    """What is installed together.

    Args:
        python: The version of Python, "3.12".
        packages: Requirements beside those of setup.cfg.
        is_next: Whether they are outside of the ranges in setup.cfg, and take their place.
    """

    python: str
    packages: tuple[str, ...]
    is_next: bool = False


PAIRS = {
    "oldest": Pair("3.11", ("tensorflow==2.19.0", "keras==3.10.0")),
    "colab": Pair("3.12", ("tensorflow==2.19.*", "keras==3.10.*")),
    "between": Pair("3.12", ("tensorflow==2.20.*", "keras==3.12.*")),
    "newest": Pair("3.13", ("tensorflow==2.21.*", "keras==3.15.*")),
}
# Release candidates and nightly builds, which another day may break.
NEXT = {
    "next": Pair("3.13", ("tensorflow>=2.22.0rc0", "keras-nightly>=3.16.0.dev0"), is_next=True),
}
# Every form against one device, and what is taken of TensorFlow's and Keras's insides.
SMOKE = ["tests/parity/test_parity.py", "tests/test_seams.py", "tests/test_startup.py"]


def interpreter(version: str) -> str:
    """The path of a Python of this version: on PATH, or as pyenv keeps it.

    Raises:
        SystemExit: If there is none.
    """
    name = f"python{version}"
    installed = sorted(
        (pathlib.Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])],
    )
    if installed:
        return str(installed[-1])
    on_path = shutil.which(name)
    if on_path is None:
        raise SystemExit(
            f"{name} is required, on PATH or in ~/.pyenv/versions. Received: neither. "
            f"Install it (`pyenv install {version}`), or name other pairs: {', '.join(PAIRS)}."
        )
    return on_path


def environment(name: str) -> pathlib.Path:
    """Makes the environment of a pair, or finds it made; returns its Python."""
    folder = TOP / f".venv-{name}"
    python, stamp = folder / "bin" / "python", folder / ".ready"
    setup = TOP / "setup.cfg"
    if stamp.exists() and stamp.stat().st_mtime > setup.stat().st_mtime:
        return python
    pair = (PAIRS | NEXT)[name]
    subprocess.run([interpreter(pair.python), "-m", "venv", "--clear", folder], check=True)
    if not pair.is_next:
        install(python, "--editable", ".[test,models]", *pair.packages)
    else:
        install(python, *other_requirements(), *pair.packages)
        # A released Keras, which TensorFlow may require, is the same module as the nightly one,
        # and takes files of it along when it goes.
        run_pip(python, "uninstall", "--yes", "keras")
        keras = [package for package in pair.packages if package.startswith("keras")]
        install(python, "--no-deps", "--force-reinstall", *keras)
        install(python, "--no-deps", "--editable", ".")
    stamp.touch()
    return python


def install(python: pathlib.Path, *arguments: str) -> None:
    """Installs what pip's arguments say."""
    run_pip(python, "install", "--no-compile", *arguments)


def run_pip(python: pathlib.Path, *arguments: str) -> None:
    """Runs pip, which says what fails."""
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True, cwd=TOP)


def other_requirements() -> list[str]:
    """What `.[test,models]` requires in setup.cfg beside TensorFlow and Keras."""
    setup = configparser.ConfigParser()
    setup.read(TOP / "setup.cfg")
    lists = [setup["options"]["install_requires"]]
    lists += [setup["options.extras_require"][extra] for extra in ("test", "models")]
    lines = [line for text in lists for line in text.splitlines() if line]
    return [line for line in lines if not re.match(r"(tensorflow|keras)\b|#", line)]


def main() -> int:
    """Runs the tests on each pair that is named; returns how many failed."""
    args = parse_names(
        __doc__, "pair", PAIRS, "--smoke", "a minute's worth of tests", only_named=NEXT
    )
    tests = [*(SMOKE if args.smoke else []), "-m", "not slow"]
    failed = []
    for name in args.names:
        python, pair = environment(name), (PAIRS | NEXT)[name]
        print(f"== {name}: Python {pair.python}, {', '.join(pair.packages)}", flush=True)
        command = [python, "-m", "pytest", "-q", "-n", "2", *tests]
        wish = {"TFPARALLEL_ANY_VERSION": "1"} if pair.is_next else {}
        if subprocess.run(command, cwd=TOP, env=os.environ | wish, check=False).returncode:
            failed.append(name)
    print(f"Failed: {', '.join(failed)}." if failed else "All pairs passed.")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
