"""Runs tests on the versions of TensorFlow, Keras and Python that people have.

    python -m tests.versions                 the fast tests on each pair (`make test-versions`)
    python -m tests.versions oldest --smoke  whether each form trains on the oldest (`.ci/run`)

Each pair has an environment of its own, `.venv-NAME`, which is made once.
"""

import dataclasses
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
    """

    python: str
    packages: tuple[str, ...]


PAIRS = {
    "oldest": Pair("3.11", ("tensorflow==2.19.0", "keras==3.10.0")),
    "colab": Pair("3.12", ("tensorflow==2.19.*", "keras==3.10.*")),
    "between": Pair("3.12", ("tensorflow==2.20.*", "keras==3.12.*")),
    "newest": Pair("3.13", ("tensorflow==2.21.*", "keras==3.15.*")),
}
# Every form against one device, and what is taken of TensorFlow's and Keras's insides.
SMOKE = ["tests/parity/test_parity.py", "tests/test_seams.py", "tests/test_startup.py"]


def interpreter(version: str) -> str:
    """The path of a Python of this version: on PATH, or as pyenv keeps it.

    Raises:
        SystemExit: If there is none.
    """
    name = f"python{version}"
    kept = sorted(
        (pathlib.Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])],
    )
    if kept:
        return str(kept[-1])
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
    pair = PAIRS[name]
    subprocess.run([interpreter(pair.python), "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--no-compile", "--editable", ".[test,models]", *pair.packages]
    subprocess.run(install, check=True, cwd=TOP)
    stamp.touch()
    return python


def main() -> int:
    """Runs the tests on each pair that is named; returns how many failed."""
    args = parse_names(__doc__, "pair", PAIRS, "--smoke", "a minute's worth of tests")
    tests = [*(SMOKE if args.smoke else []), "-m", "not slow"]
    failed = []
    for name in args.names:
        python = environment(name)
        print(f"== {name}: Python {PAIRS[name].python}, {', '.join(PAIRS[name].packages)}")
        sys.stdout.flush()
        command = [python, "-m", "pytest", "-q", "-n", "2", *tests]
        if subprocess.run(command, cwd=TOP, check=False).returncode:
            failed.append(name)
    print(f"Failed: {', '.join(failed)}." if failed else "All pairs passed.")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
