"""Callbacks that write, in a job of two workers: one run, and no hang."""

import importlib.util
import json
import pathlib

import pytest

from . import loggers
from .jobs import run_workers

PROGRAM = pathlib.Path(__file__).with_name("loggers.py")

pytestmark = pytest.mark.slow


@pytest.fixture(name="job", scope="module")
def run_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return folder, run_workers(PROGRAM, arguments=[str(folder)], timeout_seconds=300)


def test_the_chief_alone_writes(job):
    folder, (chief, other) = job
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert lines == [[epoch, loss] for epoch, loss in enumerate(chief["lines"])]
    assert chief["lines"] == other["lines"] and len(lines) == loggers.EPOCHS


def test_it_may_stop_the_training_of_all(job):
    _, results = job
    assert [len(each["stopped"]) for each in results] == [1, 1]


# Values of copies are here, and those of shares are on all workers.
NEED_ALL = {"evaluate", "predict", "test_on_batch", "all_reduce", "barrier"}


@pytest.mark.parametrize(
    ("case", "need_all"), [("copies", NEED_ALL), ("shares", NEED_ALL | {"save", "get_weights"})]
)
def test_what_needs_all_workers_is_an_error_and_no_hang(job, case, need_all):
    _, (chief, other) = job
    answers = chief[case]["answers"]
    refused = {
        name
        for name, text in answers.items()
        if text.startswith("`on_epoch_end` of NeedsAll runs on the chief alone, but all workers")
        and "List the callback without `ChiefOnly`" in text
    }
    assert refused == need_all, answers
    assert {answers[name] for name in answers.keys() - need_all} <= {"None"}
    assert other[case]["answers"] == {} and other[case]["losses"] == chief[case]["losses"]


RUNS = {"wandb": "wandb/offline-run-*", "mlflow": "[0-9]*/*/metrics", "tensorboard": "train/*"}


@pytest.mark.parametrize("name", RUNS)
def test_a_logger_has_one_run(job, name):
    folder, (chief, other) = job
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install wandb mlflow-skinny")
    runs = list((folder / name).glob(RUNS[name]))
    assert len(runs) == 1, [str(path) for path in (folder / name).rglob("*")]
    assert chief[name]["losses"] == other[name]["losses"]
    if "logged" in chief[name]:
        assert chief[name]["logged"] == pytest.approx(chief[name]["losses"][-1], rel=1e-6)
