"""The storage path of a job on Ray, which one of two nodes does not see: it has another mount."""

import os
import pathlib
import subprocess
import time

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tfparallel[ray]'")

import tfparallel
from tests.ray.clusters import add_node, cluster, disturbed, kill_raylet, own_mounts, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="A mount of a node's own needs root."),
]


@pytest.fixture(scope="module")
def node():
    with cluster(1) as started:
        yield started


def wait_until_there_is(path):
    """What the workers call."""
    pathlib.Path(f"{path}_waits").touch()
    deadline = time.monotonic() + 140
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    return os.environ["WORLD_SIZE"]


def test_a_node_that_does_not_see_the_storage_path(node, tmp_path, capfd):
    storage, go, waits = tmp_path / "storage", tmp_path / "go", tmp_path / "go_waits"
    storage.mkdir()

    def add():
        with own_mounts():
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(storage)], check=True)
            add_node(node)

    def said():
        shown.append(capfd.readouterr().err)
        return "does not see the storage path" in "".join(shown)

    shown = []
    # One that arrives later is left out, and the job goes on.
    size = disturbed(
        lambda: tfparallel.ray.fit(wait_until_there_is, (1, 2), args=[go], storage_path=storage),
        lambda: wait_for(waits.exists, "a worker"), add,
        lambda: wait_for(said, "the message"), go.touch,
    )  # fmt: skip
    assert size == "1"
    # One that is there when the job starts is an error at once.
    with pytest.raises(RuntimeError, match="does not see the storage path") as caught:
        tfparallel.ray.fit(wait_until_there_is, 2, args=[go], storage_path=storage)
    assert f"storage_path='{storage}'" in str(caught.value)
    assert list(storage.iterdir()) == []
    assert tfparallel.ray.fit(wait_until_there_is, 2, args=[go], storage_path=tmp_path) == "2"
    kill_raylet(node)


def test_a_storage_path_that_cannot_be_written(node, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="must be a folder that the driver can write to"):
        tfparallel.ray.fit(print, 1, storage_path=pathlib.Path(tmp_path, "file"))


def test_a_job_with_a_new_storage_path_runs(node, tmp_path):
    assert tfparallel.ray.fit(lambda: "done", 1, storage_path=tmp_path / "new") == "done"
    assert list((tmp_path / "new").iterdir()) == []
