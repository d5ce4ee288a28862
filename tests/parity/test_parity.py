"""Every case under every form and number of replicas, against one device."""

from __future__ import annotations

import functools
import zlib

import pytest

from . import table
from .case import EXACT, HYBRID, REFUSED, REPRODUCIBLE, Case, compare, form_on, on_one_device, run
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


# Where a form is most likely to go wrong; `make test-fast` runs every other one, on 3 replicas.
FAST = {
    "optimizer Nadam",
    "optimizer MultiOptimizer",
    "shares of an embedding's optimizer",
    "optimizer Adam global_clipnorm",
    "optimizer Adam accumulating 5 steps",
    "mixed_float16 that skips updates",
    "sparse gradients under Adam",
    "loss Dice",
    "loss that compares examples",
    "reduction sum of SparseCategoricalCrossentropy",
    "reduction mean_with_sample_weight of SparseCategoricalCrossentropy",
    "softmax far off",
    "ignore_class",
    "regularizer L2",
    "activity regularizer of a layer",
    "add_loss",
    "model subclassed",
    "structure nested",
    "validation_data",
    "predict sizes",
    "layer BatchNormalization after a convolution",
    "layer BatchNormalization of masked input",
    "layer MultiHeadAttention of masked input",
    "stateful LSTM",
    "random Dropout",
    "random GaussianNoise",
    "input arrays",
    "input tf.data of unknown size",
    "input finite generator",
    "unseeded shuffle of tf.data",
    "fewer examples than replicas",
    "on_batch methods",
    "run_eagerly",
    "steps_per_execution 4 of 6 batches",
    "train_step on compute_loss",
    "train_step with a raw loss",
    "GAN",
    "VAE with add_loss",
    "gradient penalty",
    "target network",
    "EarlyStopping",
    "ModelCheckpoint best.keras",
    "freeze and thaw",
    "load_weights",
    "built model",
    "save and load registered subclass",
}

# Of these, what takes more than a few seconds all the same.
TAKE_LONG = {
    "layer BatchNormalization of masked input",
    "freeze and thaw",
    "structure nested",
    "VAE with add_loss",
}


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


def sample_of(name: str) -> list[tuple[str, int | str]]:
    """The ways in which `make test` trains a case, from the case's name alone.

    A case of `FAST` has one: `data_parallel` on 3 replicas for one in two, another for the rest.
    `make parity` alone runs the other cases. No case changes what another one has.
    """
    number = zlib.crc32(name.encode())
    if name not in FAST:
        return []
    return [WAYS[1 + (number >> 10) % (len(WAYS) - 1)]] if number % 2 else WAYS[:1]


def parameters(cases: list[Case] = ALL, mode: str = table.MODE):
    """The pairs of this session, the fast ones unmarked.

    With TFPARALLEL_PARITY=all (or write) all of them, else the sample of `make test`.
    """
    for case in cases:
        for form, replicas in WAYS if mode else sample_of(case.name):
            if not case.runs_under(form):
                continue
            fast = case.name in FAST - TAKE_LONG and (form, replicas) == WAYS[0]
            yield pytest.param(
                case,
                form,
                replicas,
                id=f"{case.name.replace(' ', '-')}-{form}-{str(replicas).replace(' ', '')}",
                marks=[pytest.mark.slow] * (not fast),
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
        `("exact", largest relative difference)`, `("reproducible", same of the
        second run)`, or `("refused", message)`.
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
    if EXACT in case.verdicts and differences[0].relative <= case.limit:
        return EXACT, differences[0].relative
    if REPRODUCIBLE in case.verdicts:
        differences = compare(seen, run(case, form))
        if differences[0].relative <= case.limit:
            return REPRODUCIBLE, differences[0].relative
    worst = "\n".join(f"  {d.name}: {d.relative:.1e}" for d in differences[:12])
    number = sum(difference.relative > case.limit for difference in differences)
    raise AssertionError(
        f"{case.name} under {form.name} on {len(form.devices)} replicas is none of "
        f"{', '.join(case.verdicts)}: {number} of {len(differences)} values differ from one "
        f"device by more than {case.limit:.0e}, relative. The largest:\n{worst}"
    )
