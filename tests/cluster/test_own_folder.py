"""A temporary folder goes with its process, unless that keeps it."""

import os
import subprocess
import sys

import pytest

from tests.cluster.processes import wait_for
from tests.commands.command_line import ROOT
from tfparallel.cluster.own_folder import OwnFolder


@pytest.mark.parametrize("is_kept", [False, True])
def test_it_is_removed_unless_it_is_kept(tmp_path, monkeypatch, is_kept):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OwnFolder("own_") as folder:
        open(os.path.join(folder.path, "file"), "w").close()
        if is_kept:
            folder.keep()
    assert folder._remover.returncode == 0
    assert os.path.isdir(folder.path) == is_kept


KILLED = """
import os, signal, sys, tempfile
from tfparallel.cluster.own_folder import OwnFolder
tempfile.tempdir = sys.argv[1]
open(OwnFolder("own_").path + "/file", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_goes_with_a_process_that_is_killed(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=60)
    wait_for(lambda: os.listdir(tmp_path) == [], "the folder to be removed")
