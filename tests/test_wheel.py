"""What is built of the sources installs into an empty place, and runs from there."""

import re
import subprocess
import sys
import zipfile

import pytest

from tests.commands.command_line import ROOT

pytestmark = [pytest.mark.slow]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def test_a_wheel_installs_and_runs(tmp_path):
    built = tmp_path / "built"
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, source], check=True)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={built}", source]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = built.glob("tfparallel-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tfparallel/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "models/", "benchmarks/"))]
    (about,) = (name for name in names if name.endswith("/METADATA"))
    links = re.findall(r"\]\(([^)\s]+)", zipfile.ZipFile(wheel).read(about).decode())
    assert len(links) > 40
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    place = tmp_path / "place"
    subprocess.run([*PIP, "install", "--no-deps", f"--target={place}", wheel], check=True)
    program = "import tfparallel, tfparallel.commands.main as m; print(tfparallel.__file__)"
    run = [sys.executable, "-c", f"{program}; m.main(['--version'])"]
    environment = {"PYTHONPATH": str(place), "PATH": ""}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place)) and "tfparallel 0.1.0" in done.stdout
