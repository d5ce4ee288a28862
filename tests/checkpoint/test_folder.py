"""Checkpoints on disk: whole, or passed over aloud; what was there before stays."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.checkpoint.stored import CheckpointError, ForeignCheckpointError

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(7, np.int64),
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
]
SPECS = [[f"layer/v{i}", list(array.shape), array.dtype.name] for i, array in enumerate(ARRAYS)]


def written(directory, steps, keep=9):
    folder = CheckpointFolder(str(directory), keep)
    folder.prepare()
    for step in steps:
        folder.write(step, SPECS, ARRAYS, {"step": step})
    return folder


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".writer")


def test_what_was_written_is_read(tmp_path):
    checkpoint = written(tmp_path / "a" / "b", [3]).newest()
    assert checkpoint.content == {"step": 3} and checkpoint.specs == SPECS
    for expected, array in zip(ARRAYS, checkpoint.arrays(), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_arrays_are_written_and_read_one_by_one(tmp_path):
    """A model on many devices is larger than the memory of the process that writes it."""
    log = []

    def arrays():
        for index in range(3):
            log.append(f"take {index}")
            yield np.full(4, index)

    folder = CheckpointFolder(str(tmp_path), 1)
    folder.prepare()
    folder.write(1, [[f"v{i}", [4], "int64"] for i in range(3)], arrays(), {})
    checkpoint = folder.newest()
    assert [array[0] for array in checkpoint.arrays(1, 3)] == [1, 2]
    assert next(checkpoint.arrays(2))[0] == 2 and log == ["take 0", "take 1", "take 2"]


def test_the_newest_are_kept(tmp_path):
    folder = written(tmp_path, [1, 2, 30, 4_000_000_000], keep=2)
    assert names(tmp_path) == ["step_00000030", "step_4000000000"]
    assert folder.newest().content["step"] == 4_000_000_000


def test_an_empty_folder_has_none(tmp_path):
    assert CheckpointFolder(str(tmp_path), 1).newest() is None
    assert CheckpointFolder(str(tmp_path / "absent"), 1).newest() is None


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["state.npy", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip_a_bit, lambda path: path.unlink()])
def test_a_damaged_one_is_passed_over_aloud(tmp_path, file, damage):
    folder = written(tmp_path, [1, 2])
    damage(tmp_path / "step_00000002" / file)
    with pytest.warns(UserWarning, match=r"step_00000002, which (is damaged|cannot be read): "):
        assert folder.newest().content == {"step": 1}
    # What is written next takes the damaged one's place.
    folder.write(2, SPECS, ARRAYS, {"step": 2})
    assert folder.newest().content == {"step": 2}


def test_a_number_that_was_changed_by_hand_is_noticed(tmp_path):
    folder = written(tmp_path, [1, 2])
    path = tmp_path / "step_00000002" / "manifest.json"
    content = json.loads(path.read_text())
    content["manifest"]["content"]["step"] = 3
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"manifest\.json does not match its checksum"):
        assert folder.newest().content == {"step": 1}


def test_with_none_whole_the_run_does_not_start_anew_by_itself(tmp_path):
    folder = written(tmp_path, [1, 2])
    for step in (1, 2):
        cut(tmp_path / f"step_0000000{step}" / "state.npy")
    with (
        pytest.warns(UserWarning, match="has 419 of 420 bytes"),
        pytest.raises(ForeignCheckpointError, match="None of the 2 checkpoints is intact"),
    ):
        folder.newest()


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path):
    folder = written(tmp_path, [1])
    (tmp_path / "unfinished_step_00000002").mkdir()
    (tmp_path / "unfinished_step_00000002" / "state.npy").write_bytes(b"half")
    assert folder.newest().content == {"step": 1}
    folder.write(2, SPECS, ARRAYS, {})
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_checkpoints_ahead_of_the_run_go(tmp_path):
    """The run went on from step 2, since 9 was damaged: 9 is of a future that does not come."""
    folder = written(tmp_path, [1, 2, 9])
    cut(tmp_path / "step_00000009" / "state.npy")
    with pytest.warns(UserWarning, match="step_00000009, which is damaged"):
        folder.newest()
    folder.write(3, SPECS, ARRAYS, {})
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "[]", '{"manifest": []}', "3"])
def test_a_manifest_that_says_anything_is_damage(tmp_path, text):
    folder = written(tmp_path, [1, 2])
    (tmp_path / "step_00000002" / "manifest.json").write_text(text)
    with pytest.warns(UserWarning, match="step_00000002, which is damaged"):
        assert folder.newest().content == {"step": 1}


# --- A disk that cannot be read for a moment --------------------------------------------------


@pytest.fixture
def unreadable(monkeypatch):
    """Makes a manifest one that cannot be read (EIO), until the function it returns is called."""
    monkeypatch.setattr("tfparallel.checkpoint.stored._PAUSES_SECONDS", (0.01, 0.01))

    def make(directory):
        manifest, aside = directory / "manifest.json", directory / "aside"
        manifest.rename(aside)
        manifest.symlink_to("/proc/self/mem")
        return lambda: (manifest.unlink(), aside.rename(manifest))

    return make


def test_one_that_could_not_be_read_for_a_moment_is_never_deleted(tmp_path, unreadable):
    folder = written(tmp_path, [1, 9], keep=1)
    folder.write(1, SPECS, ARRAYS, {"step": 1})
    mend = unreadable(tmp_path / "step_00000009")
    with pytest.warns(UserWarning, match=r"00000009, which cannot be read.*Input/output error"):
        assert folder.newest().content == {"step": 1}
    mend()
    for step in (2, 9, 10):
        folder.write(step, SPECS, ARRAYS, {})
    assert names(tmp_path) == ["step_00000010", "unreadable_step_00000009"]
    (tmp_path / "unreadable_step_00000009").rename(tmp_path / "step_00000011")
    assert folder.newest().content == {"step": 9}


def test_none_that_can_be_read_is_an_error_after_which_to_start_again(tmp_path, unreadable):
    folder = written(tmp_path, [1])
    mend = unreadable(tmp_path / "step_00000001")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(CheckpointError, match="some could not be read"),
    ):
        folder.newest()
    mend()
    assert folder.newest().content == {"step": 1}


@pytest.mark.slow
def test_one_that_can_be_read_at_the_second_try_is_taken(tmp_path, unreadable, monkeypatch):
    folder = written(tmp_path, [1, 2])
    mend = unreadable(tmp_path / "step_00000002")
    monkeypatch.setattr("tfparallel.checkpoint.stored._PAUSES_SECONDS", (1.0,))
    threading.Timer(0.2, mend).start()
    assert folder.newest().content == {"step": 2}


# --- A second one of the same step ------------------------------------------------------------

# Looks at the folder in the middle of each rename, as the next run does after a kill there.
LOOKER = """
import os, sys
from tfparallel.checkpoint.folder import CheckpointFolder
import numpy as np
folder = CheckpointFolder(sys.argv[1], 1)
folder.prepare()
array, at, kill_at = np.zeros(2), 0, int(sys.argv[2])
def look(event, args):
    global at
    if event == "os.rename":
        at += 1
        if at == kill_at:
            os._exit(9)
folder.write(5, [["v", [2], "float64"]], [array], {"written": 1})
sys.addaudithook(look)
folder.write(5, [["v", [2], "float64"]], [array], {"written": 2})
"""


@pytest.mark.slow
def test_one_that_is_rewritten_is_whole_at_every_moment(tmp_path):
    seen = []
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        done = subprocess.run([sys.executable, "-c", LOOKER, folder, str(number)], timeout=60)
        reader = CheckpointFolder(str(folder), 1)
        seen.append(reader.newest().content["written"])
        # And the next run finishes what was begun.
        reader.prepare()
        reader.write(6, SPECS, ARRAYS, {})
        reader.release()
        assert names(folder) == ["step_00000006"]
        if done.returncode == 0:
            break
        assert done.returncode == 9
    # The first rename is of one that is not there.
    assert seen == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("damaged", ["step_00000005", "step_00000005.new"])
def test_of_two_of_a_step_the_whole_one_counts(tmp_path, damaged):
    folder = written(tmp_path, [4, 5])
    shutil.copytree(tmp_path / "step_00000005", tmp_path / "step_00000005.new")
    cut(tmp_path / damaged / "state.npy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert folder.newest().content == {"step": 5}
    for content in ({"again": 1}, {"again": 2}):
        folder.write(5, SPECS, ARRAYS, content)
        assert folder.newest().content == content
        assert names(tmp_path) == ["step_00000004", "step_00000005"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ForeignCheckpointError, match="is not writable.*Choose another folder"):
        CheckpointFolder(str(tmp_path / "file" / "folder"), 1).prepare()


# A limit on the size of a file stands for a full disk: both fail in the middle of a write.
FULL_DISK = """
import resource, sys
import numpy as np
from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.checkpoint.stored import CheckpointError
folder = CheckpointFolder(sys.argv[1], 2)
folder.prepare()
array = np.zeros(100_000, np.uint8)
folder.write(1, [["v", [100_000], "uint8"]], [array], {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
try:
    folder.write(2, [["v", [100_000], "uint8"]] * 2, [array] * 2, {"step": 2})
except CheckpointError as error:
    print(error)
    assert folder.newest().content == {"step": 1}
    sys.exit(7)
"""


def test_a_full_disk_leaves_the_one_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert "step_00000002 could not be written" in done.stdout
    assert "File too large" in done.stdout and "step_00000001 is intact" in done.stdout
    assert names(tmp_path) == ["step_00000001"]


def test_a_folder_that_vanished_is_told(tmp_path):
    folder = written(tmp_path / "a", [])
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match="No such file.*There is no earlier one"):
        folder.write(1, SPECS, ARRAYS, {})


def test_one_of_a_later_version_is_refused_and_not_passed_over(tmp_path):
    folder = written(tmp_path, [1, 2])
    path = tmp_path / "step_00000002" / "manifest.json"
    read = json.loads(path.read_text())
    read["manifest"]["format"] = 2
    text = json.dumps(read["manifest"], sort_keys=True).encode()
    read["sha256"] = hashlib.sha256(text).hexdigest()
    path.write_text(json.dumps(read))
    with pytest.raises(ForeignCheckpointError, match="was written by a later version") as caught:
        folder.newest()
    assert "Received: format 2. Upgrade tfparallel" in str(caught.value)


@pytest.mark.parametrize("num_listed, is_written", [(0, False), (2, True)])
def test_a_folder_that_cannot_be_listed_is_told_or_waited_for(
    tmp_path, monkeypatch, num_listed, is_written
):
    """A stale handle of a network file system: it hid the error, or ended a run that had saved."""
    folder = CheckpointFolder(str(tmp_path), 2)
    folder.prepare()
    lists, remaining = os.listdir, [None] * num_listed

    def listdir(path):
        if not remaining:
            raise OSError(116, "Stale file handle")
        remaining.pop()
        return lists(path)

    monkeypatch.setattr("tfparallel.checkpoint.folder.os.listdir", listdir)
    if is_written:
        folder.write(1, [], [], {})
        assert (tmp_path / "step_00000001").is_dir()
    else:
        with pytest.raises(CheckpointError, match="Stale file handle. The folder is currently"):
            folder.write(1, [], [], {})
    monkeypatch.undo()
    folder.release()


def test_one_that_cannot_be_replaced_does_not_end_later_writes(tmp_path, monkeypatch):
    folder = CheckpointFolder(str(tmp_path), 5)
    folder.prepare()
    folder.write(1, [], [], {})
    (tmp_path / "step_00000001.new").mkdir()
    monkeypatch.setattr(folder, "_remove", lambda name: None)  # As where it cannot be renamed.
    folder.write(2, [], [], {})
    assert (tmp_path / "step_00000002").is_dir()
    monkeypatch.undo()
    folder.release()
