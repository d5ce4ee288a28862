"""Checkpoints on disk: whole, or passed over aloud; what was there before stays."""

import hashlib
import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tfparallel.checkpoint.folder import CheckpointError, CheckpointFolder, ForeignCheckpointError

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
    return sorted(path.name for path in directory.iterdir())


def test_what_was_written_is_read(tmp_path):
    found = written(tmp_path / "a" / "b", [3]).newest()
    assert found.content == {"step": 3} and found.specs == SPECS
    for expected, array in zip(ARRAYS, found.arrays(), strict=True):
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
    found = folder.newest()
    assert [array[0] for array in found.arrays(1, 3)] == [1, 2]
    assert next(found.arrays(2))[0] == 2 and log == ["take 0", "take 1", "take 2"]


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
    with pytest.warns(UserWarning, match=r"step_00000002 is not whole, and is passed over"):
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
    with pytest.warns(UserWarning, match=r"manifest\.json does not have its checksum"):
        assert folder.newest().content == {"step": 1}


def test_with_none_whole_the_run_does_not_start_anew_by_itself(tmp_path):
    folder = written(tmp_path, [1, 2])
    for step in (1, 2):
        cut(tmp_path / f"step_0000000{step}" / "state.npy")
    with (
        pytest.warns(UserWarning, match="has 419 of 420 bytes"),
        pytest.raises(ForeignCheckpointError, match="None of the 2 checkpoints is whole"),
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
    folder.write(3, SPECS, ARRAYS, {})
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ForeignCheckpointError, match="cannot be written to.*Name another folder"):
        CheckpointFolder(str(tmp_path / "file" / "folder"), 1).prepare()


# A limit on the size of a file stands for a full disk: both fail in the middle of a write.
FULL_DISK = """
import resource, sys
import numpy as np
from tfparallel.checkpoint.folder import CheckpointError, CheckpointFolder
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
    assert "File too large" in done.stdout and "step_00000001 is whole" in done.stdout
    assert names(tmp_path) == ["step_00000001"]


def test_a_folder_that_vanished_is_told(tmp_path):
    folder = written(tmp_path / "a", [])
    (tmp_path / "a").rmdir()
    with pytest.raises(CheckpointError, match="No such file.*There is none before it"):
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
