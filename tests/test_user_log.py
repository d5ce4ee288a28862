"""A line for the person at the terminal, and for nobody else."""

import keras
import pytest

from tfparallel import user_log as notices
from tfparallel.user_log import notice


@pytest.fixture(autouse=True)
def nothing_shown_yet(monkeypatch):
    monkeypatch.setattr(notices, "_shown", set())


def test_a_line_on_stderr(capsys, caplog):
    notice("two devices")
    notice("two devices")
    notice("three devices", once=True)
    notice("three devices", once=True)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "two devices\ntwo devices\nthree devices\n")
    assert caplog.records == []


def test_it_is_not_shown_twice_where_absl_shows_information(capsys, caplog):
    with caplog.at_level("INFO", logger="absl"):
        notice("100% of two devices")
    assert capsys.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records] == ["100% of two devices"]


def test_keras_turns_it_off(capsys):
    keras.config.disable_interactive_logging()
    try:
        notice("two devices")
    finally:
        keras.config.enable_interactive_logging()
    assert capsys.readouterr().err == ""
