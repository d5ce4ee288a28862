"""Files that take their place whole."""

import keras
import pytest

from tfparallel.checkpoint.model_files import can_be_streamed, moved_into_place


def test_what_is_written_replaces_what_was_there(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with moved_into_place(str(path)) as temporary_path:
        assert path.read_text() == "old"
        with open(temporary_path, "w") as file:
            file.write("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), moved_into_place(str(path)) as temporary_path:
        open(temporary_path, "w").close()
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_and_the_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved" / "assets").mkdir(parents=True)
    (tmp_path / "saved" / "assets" / "kept").write_text("kept")
    with moved_into_place("saved/") as temporary_path:
        (tmp_path / temporary_path / "assets").mkdir(parents=True)
        (tmp_path / temporary_path / "assets" / "words").write_text("words")
        (tmp_path / f"{temporary_path}_00001.weights.h5").write_text("shard")
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"saved/assets/kept", "saved/assets/words", "saved_00001.weights.h5"}


@pytest.mark.parametrize("path", ["no/such/folder/model.keras", "gs://bucket/model.keras"])
def test_what_the_writer_must_judge_itself(path):
    with moved_into_place(path) as path_to_write:
        assert path_to_write == path


def test_a_save_of_the_users_own_writes_the_file(tmp_path):
    """Story: it was passed over, and so was an argument that Keras refuses."""

    class Notes(keras.Sequential):
        def save(self, filepath, *args, **kwargs):
            super().save(filepath, *args, **kwargs)

    path = str(tmp_path / "model.keras")
    assert can_be_streamed(keras.Sequential(), path, True, None, {})
    assert not can_be_streamed(keras.Sequential(), path, True, None, {"save_format": "tf"})
    assert not can_be_streamed(Notes(), path, True, None, {})
