"""Every case under every form and number of replicas, against one device."""

from __future__ import annotations

import functools

import pytest

from . import table
from .case import EXACT, HYBRID, REFUSED, Case, compare, form_on, on_one_device, run
from .cases import ALL

DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@functools.lru_cache(maxsize=4)
def expected_of(name: str):
    """What a case is measured with; its tests follow one another."""
    (case,) = [case for case in ALL if case.name == name]
    return on_one_device(case)


@functools.cache
def seen_before():
    table.read_seen()
    return frozenset(table.SEEN)


# All pairs of a case: every form, on as many devices as the page says.
WAYS = [
    ("data_parallel", 3),
    ("data_parallel", 2),
    ("data_parallel", 4),
    ("MirroredStrategy", 3),
    ("model_parallel", 2),
    ("tensor_parallel", 2),
    ("pipeline_parallel", 2),
    (HYBRID, "2 x 2 x 1"),
    (HYBRID, "2 x 1 x 2"),
]


# A case for each form, where it is most likely to go wrong. They are in no suite.
ALWAYS = {
    ("optimizer Adam global_clipnorm", "data_parallel", 3),
    ("reduction mean_with_sample_weight of SparseCategoricalCrossentropy", "data_parallel", 2),
    ("random Dropout", "data_parallel", 4),
    ("fewer examples than replicas", "MirroredStrategy", 3),
    ("ignore_class", "model_parallel", 2),
    ("optimizer Nadam", "tensor_parallel", 2),
    ("add_loss", "pipeline_parallel", 2),
    ("sparse gradients under Adam", HYBRID, "2 x 2 x 1"),
    ("activity regularizer of a layer", HYBRID, "2 x 1 x 2"),
}


def parameters(cases: list[Case] = ALL):
    """Every case in every form that it runs under."""
    for case in cases:
        for form, replicas in WAYS:
            if not case.runs_under(form) or not table.is_asked_for(case.feature):
                continue
            yield pytest.param(
                case,
                form,
                replicas,
                id=f"{case.name.replace(' ', '-')}-{form}-{str(replicas).replace(' ', '')}",
                marks=[] if (case.name, form, replicas) in ALWAYS else [pytest.mark.slow],
            )


# Keras warns of what the cases are about: shuffling left to the data set, data that ends.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("case", "form", "replicas"), parameters())
def test_trains_as_one_device_does(case: Case, form: str, replicas: int | str):
    if table.MODE == "write" and (case.feature, case.name, form, replicas) in seen_before():
        pytest.skip("an earlier run of `python -m tests.parity.table --write` saw it")
    verdict, detail = judge(case, form_on(form, DEVICES, replicas))
    table.record(case, form, replicas, verdict, detail)
    if table.MODE != "write":
        table.refuse_stale(case, form, replicas)


def judge(case: Case, form) -> tuple[str, float | str]:
    """Trains the case and says which verdict it earned, or fails.

    Returns:
        `("exact", largest relative difference)`, or `("refused", message)`.
    """
    expected = expected_of(case.name)
    try:
        seen = run(case, form)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if case.expects(form.name, error):
            return REFUSED, str(error)
        raise
    if refusals := case.refusals(form.name):
        raise AssertionError(
            f"{case.name} was trained under {form.name}, and the case says that it is refused: "
            f"“{refusals[0]}”. Take {form.name} out of its `refused`."
        )
    differences = compare(expected, seen)
    if differences[0].relative <= case.limit:
        return EXACT, differences[0].relative
    worst = "\n".join(f"  {d.name}: {d.relative:.1e}" for d in differences[:12])
    number = sum(difference.relative > case.limit for difference in differences)
    raise AssertionError(
        f"{case.name} under {form.name} on {len(form.devices)} replicas is not exact: {number} of "
        f"{len(differences)} values differ from one device by more than {case.limit:.0e}, "
        f"relative. The largest:\n{worst}"
    )
