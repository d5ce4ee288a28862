"""The tests of parity cannot be fooled: by an error that is new, or by a case that is added."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import keras
import pytest

from tfparallel.problems import PlacementError

from . import refusals, table, test_parity, workers
from .case import EXACT, FORMS, HYBRID, REFUSED, Builder, Plain, Split, compare, fit, run
from .cases import ALL
from .cases.optimizers import overflowing
from .programs import case, compiled
from .test_parity import judge, parameters

DEVICES = ["CPU:0", "CPU:1"]


def refusing(text: str):
    """A form that refuses every case in these words."""

    class Refusing(Split):
        def make(self, build, compile=None):
            raise PlacementError(text)

    return Refusing(DEVICES)


@pytest.fixture
def add_case(monkeypatch):
    """Adds a case to those that `judge` knows."""

    def add(**fields):
        added = case("Tests", "a row", "a case of this test", **fields)
        monkeypatch.setattr(test_parity, "ALL", [*ALL, added])
        test_parity.expected_of.cache_clear()
        return added

    yield add
    test_parity.expected_of.cache_clear()


def test_a_refusal_counts_only_in_the_form_and_the_words_that_the_case_says(add_case):
    expected = add_case(refused={"tensor_parallel": "must treat each element"}, fit={"epochs": 1})
    said = "The update must treat each element by itself."
    assert judge(expected, refusing(said)) == (REFUSED, said)
    with pytest.raises(PlacementError, match="something else"):
        judge(expected, refusing("Now it is something else."))
    elsewhere = dataclasses.replace(expected, refused={"pipeline_parallel": "must treat"})
    with pytest.raises(PlacementError, match="must treat each element"):
        judge(elsewhere, refusing(said))
    with pytest.raises(PlacementError, match="must treat each element"):
        judge(dataclasses.replace(expected, refused={}), refusing(said))


@pytest.mark.slow
def test_a_case_that_says_it_is_refused_may_not_train(add_case):
    expected = add_case(refused={"data_parallel": "anything"}, fit={"epochs": 1})
    with pytest.raises(AssertionError, match="was trained under data_parallel.*“anything”"):
        judge(expected, Builder(DEVICES))


def losing_the_policy(form, case):
    keras.backend.clear_session()
    return fit(form, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_a_case_that_computes_in_another_precision_is_no_case(add_case, dtype):
    lost = add_case(dtype=dtype, train=losing_the_policy, fit={"epochs": 1})
    for form in (Plain(), Builder(DEVICES)):
        with pytest.raises(AssertionError, match=f"computes in the case's precision, {dtype}"):
            run(lost, form)


@pytest.mark.parametrize(("scale", "skipped"), [(1.0, 0), (2.0**60, 6)])
def test_a_case_of_skipped_updates_skips_some_and_not_all(add_case, scale, skipped):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=scale)

    overflows = add_case(
        dtype="mixed_float16",
        compile=compiled(optimizer),
        train=overflowing,
        fit={"epochs": 1},
    )
    with pytest.raises(AssertionError, match=f"must skip some of its 6.*: {skipped} skipped"):
        run(overflows, Plain())


class Alone:
    """The workers of a job of one."""

    worker_index = 0

    def exchange(self, value, what):
        return [value]


@pytest.mark.slow
def test_workers_judge_likewise():
    said = "A layer mixes examples, so the batch cannot be divided."

    def seen(refused, form):
        form.name = table.WORKERS
        one = case("Tests", "a row", "a case of this test", fit={"epochs": 1}, refused=refused)
        return workers._judge(one, form, Alone(), compare)

    expected = refusals.MIXES_EXAMPLES
    assert seen(expected, refusing(said)) == (REFUSED, said, "")
    for refused in ({}, {"workers": "other words"}, {"data_parallel": "twice"}):
        verdict, _, failure = seen(refused, refusing(said))
        assert not verdict and said in failure
    assert seen({}, Plain())[0] == EXACT
    verdict, _, failure = seen(expected, Plain())
    assert not verdict and "Trained, though" in failure


def test_a_case_names_forms_that_there_are():
    for each in ALL:
        assert set(each.refused) <= {*table.COLUMNS}, each.name
    assert {*refusals.PLACED, *refusals.REPLICATED} == {*FORMS, table.WORKERS}


def test_the_page_says_refused_where_a_case_says_so():
    """Each refused cell is some case's, and each case's refusal is in its cell."""
    if table.MODE == "write":
        pytest.skip("the page is being written")
    cells = table.parse(table.PAGE.read_text())
    expected = {
        (each.feature, form)
        for each in ALL
        for form in each.refused
        if each.drop_in or form != "MirroredStrategy"
    }
    # Of its meshes one has stages, the other parts: it refuses what either does.
    expected |= {(each.feature, HYBRID) for each in ALL if each.refusals(f"{HYBRID} 2 x 1 x 2")}
    refused = {key for key, written in cells.items() if written.verdict == REFUSED}
    assert refused == expected, f"{refused ^ expected}. {table.RENEW}"


def test_every_way_has_a_pair_that_is_always_run():
    always = [parameter.values[1:] for parameter in parameters() if not parameter.marks]
    assert sorted(always, key=str) == sorted(test_parity.WAYS, key=str)


@pytest.mark.slow
def test_what_is_refused_anew_fails_where_the_page_is_written(tmp_path):
    """`make parity` may not write a refusal that no case expects."""
    plugin = tmp_path / "refuses_sgd.py"
    plugin.write_text(
        "import tfparallel\n"
        "from tfparallel.problems import PlacementError\n"
        "def refuse(*args, **kwargs):\n"
        "    raise PlacementError('A new refusal.')\n"
        "tfparallel.tensor_parallel = refuse\n"
    )
    seen = tmp_path / "seen.jsonl"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "refuses_sgd", "tests/parity/test_parity.py"]
        + ["-k", "optimizer-Adam-tensor_parallel-2 or optimizer-Lamb-tensor_parallel-2"],
        cwd=table.PAGE.parents[1],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "TFPARALLEL_PARITY": "write",
            table.SEEN_FILE: str(seen),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1, result.stdout[-2000:]
    assert "2 failed" in result.stdout, result.stdout[-2000:]
    assert not seen.exists(), json.loads(seen.read_text().splitlines()[0])
