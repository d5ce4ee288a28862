"""Gradients that travel compressed: what is not sent is kept, and comes later."""

import pytest

from tests.commands.command_line import TASKS, tfparallel
from tfparallel.collectives.compression import compression_of
from tfparallel.collectives.compression_name import CompressionName

from .compression import KINDS
from .jobs import ROOT, run_workers

PROGRAM = ROOT / "tests/workers/compression.py"
# Of one layer of 128 x 128 and its 128 biases, which go as they are, with the loss and the metrics.
BYTES = {
    "bf16": (0.49, 0.52),
    "fp16": (0.49, 0.52),
    "topk:0.01": (0.02, 0.03),
    "powersgd:2": (0.03, 0.05),
}


@pytest.fixture(name="job", scope="module")
def run_job(transport, tmp_path_factory):
    arguments = [transport, str(tmp_path_factory.mktemp("checkpoints"))]
    return run_workers(PROGRAM, 2, 2, arguments, timeout_seconds=600)


OTHER = pytest.param("ring_tuned", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["mpi", OTHER])
def transport(request):
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("case", [*KINDS, "accumulating", "hybrid", "buckets"])
def test_what_was_not_sent_is_left_over(job, transport, case):
    if transport != "mpi" and case not in KINDS:
        pytest.skip("does not depend on the transport")
    for seen in job:
        figures = seen[case]
        # Sums in 16 bits are rounded once more, and that is not made up for.
        allowed = {"bf16": 2**-8, "buckets": 2**-8, "fp16": 2**-11}.get(case, 1e-5)
        assert figures["apart"] < allowed and figures["equal on all"], figures
        assert figures["left over"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_as_promised(job, kind):
    lowest, highest = BYTES[kind]
    assert lowest < job[0][kind]["bytes"] < highest


@pytest.mark.slow
def test_gradients_of_attention_are_sent_whole_or_small(job):
    """Their sizes are not known to TensorFlow: they were padded, and never compressed."""
    figures = job[0]["attention"]
    assert figures["gradients"] <= figures["None"] < figures["gradients"] + 64
    assert figures["powersgd:2"] < 0.1 * figures["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_an_overflow_all_workers_know_and_nothing_stays(job, kind):
    for seen in job:
        figures = seen[f"{kind}, overflow"]
        assert figures["is seen"] == [True, False, True], figures
        assert figures["left over is finite"]
        assert figures["is kept"]  # On the other workers too: the step is skipped on all of them.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk:0.01", "powersgd:2"])
@pytest.mark.parametrize("transport", ["mpi"], scope="module")
def test_what_is_left_over_is_in_checkpoints(job, kind):
    assert [seen[f"{kind}, resumed"] for seen in job] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi"], scope="module")
def test_other_workers_than_before_go_on_with_all_of_it_on_the_first(job):
    assert [seen["of others"] for seen in job] == [[9, 12], [0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi"], scope="module")
def test_a_job_has_one_way(job):
    assert "Received: compression='bf16'" in job[0]["another"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zip", "there is no compression of that name"),
        ("topk", "topk takes the fraction"),
        ("topk:0", "above 0 and at most 1"),
        ("topk:1.5", "above 0 and at most 1"),
        ("powersgd:0", "a whole number of at least 1"),
        ("powersgd:two", "a whole number of at least 1"),
        ("bf16:2", "there is no compression of that name"),
    ],
)
def test_invalid_names_raise(spec, message):
    with pytest.raises(ValueError, match=message):
        CompressionName.parse(spec)


@pytest.mark.parametrize("spec", ["bf16", "fp16", "topk:0.25", "powersgd:4"])
def test_it_prints_as_it_was_asked_for(spec):
    assert str(compression_of(spec)) == spec
    assert compression_of(None) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("train", "--compression=bf16"), "without other workers"),
        (("train", "--compression=topk:2"), "--compression: `compression` must be"),
        (("check", "--compression=bf16"), "Received: --compression=bf16. Drop it"),
    ],
)
def test_flags_that_do_not_fit(flags, message):
    command, *others = flags
    code, _, errors = tfparallel(
        command, TASKS / "blobs.py", "--num_devices=2", "--device_type=cpu", *others
    )
    assert code == 2 and message in errors
