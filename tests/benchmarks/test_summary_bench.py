"""The table of figures to reach: from literal figures to literal lines."""

import importlib
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
DAY = "2026-11-23"


@pytest.fixture
def module(monkeypatch):
    """Imports a module that lies beside the program."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def spread(median):
    return {"median": median, "p10": 0.9 * median, "p90": 1.1 * median}


FIGURES = {
    "data_parallel": {
        "date": "2026-11-24",
        "dispatch_bound": {"ours_1/plain_1": spread(1.02), "ours_2/stock_2": spread(0.81)},
        "compute_bound": {"ours_1/plain_1": spread(1.03), "ours_2/stock_2": spread(1.0)},
    },
    "scaling": {
        "date": DAY,
        "language_model": {
            "step_over_unjoined": spread(1.05),
            "unjoined_over_step": spread(0.95),
            "memory_over_unjoined": 1.12,
            "sent_beyond_gradients_kib": 1.0,
        },
        "cnn_32": {"unjoined_over_step": spread(0.95)},
        "cnn_128": {"unjoined_over_step": spread(0.97)},
    },
    "first_epoch": {
        "date": DAY,
        "mobilenet_v2": {"epoch_over_plain": spread(1.8)},
        "transformer": {"tracing_seconds": spread(10)},
    },
}
TABLE = """\
| what | measured | to reach | verdict |
| --- | --- | --- | --- |
| language model, 2 workers: step over the unjoined | 1.050 (0.945 to 1.155) | at most 1.08 | reached |
| language model, 2 workers: memory over the unjoined | 1.120 | at most 1.10 | **missed** |
| language model, 2 workers: sent by a worker beyond its gradients | 1.0 KiB | at most 64 KiB | reached |
| CNN of 1.2 M parameters, 32 examples a worker: step of the unjoined over ours | 0.950 (0.855 to 1.045) | at least 0.95 | reached |
| CNN of 1.2 M parameters, 128 examples a worker: step of the unjoined over ours | 0.970 (0.873 to 1.067) | at least 0.98 | **missed** |
| CNN of 9.5 M parameters, 32 examples a worker: step of the unjoined over ours | not run: `benchmarks/scaling.py` | at least 0.93 | |
| 1 replica against plain Keras, dispatch-bound: step of ours over theirs | 1.020 (0.918 to 1.122) | at most 1.02 | reached |
| 1 replica against plain Keras, compute-bound: step of ours over theirs | 1.030 (0.927 to 1.133) | at most 1.02 | **missed** |
| 2 replicas against `MirroredStrategy`, dispatch-bound: step of ours over theirs | 0.810 (0.729 to 0.891) | at most 0.80 | **missed** |
| 2 replicas against `MirroredStrategy`, compute-bound: step of ours over theirs | 1.000 (0.900 to 1.100) | at most 1.00 | reached |
| first epoch of MobileNetV2, 2 replicas: over plain Keras's | 1.800 (1.620 to 1.980) | at most 1.15 | **missed** |
| pipeline of 10.8 M parameters, M = 8: time to trace | 10.00 s (9.00 s to 11.00 s) | at most 6 s | **missed** |
| pipeline of 10.8 M parameters, M = 8: step over PyTorch's | not run: `benchmarks/pipeline.py` | at most 1.00 | |
| lines in `tfparallel/` | 36,824 | below 28,700 | **missed** |

Read from the blocks below: scaling, measured on 2026-11-23; data_parallel, measured on 2026-11-24; first_epoch, measured on 2026-11-23. Lines counted on 2026-11-25."""  # noqa: E501


def test_figures_become_a_table(module):
    lines = module("summary").page(FIGURES, 36_824, "2026-11-25")
    assert lines[4:] == TABLE.splitlines()


def test_without_any_benchmark_the_lines_alone_are_judged(module):
    lines = module("summary").page({}, 28_699, "2026-11-25")
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert len(rows) == 14
    assert all("| not run: `benchmarks/" in row and row.endswith("| |") for row in rows[:-1])
    assert rows[-1].endswith("| 28,699 | below 28,700 | reached |")
    assert lines[-1] == "Lines counted on 2026-11-25."


def test_the_programs_leave_figures_where_the_summary_looks(module):
    summary, names = module("summary"), ("ours_1", "plain_1", "ours_2", "stock_2")
    ratios = [
        {"of": of, "to": to, "target": None, **spread(1.0)} for of, to in (names[:2], names[2:])
    ]
    workloads = {name: {"ratios": ratios} for name in ("dispatch_bound", "compute_bound")}
    scaled = {
        "ours_over_apart": spread(1.0),
        "efficiency": {"ours/apart": spread(1.0)},
        "peak_mib": {"ours": 110.0, "apart": 100.0},
        "sent_bytes": {"ours": 3072},
        "versions": {"plain": {"gradient_bytes": 2048}},
    }
    epoch = {
        "figures": {kind: {"tracing_seconds": spread(1.0)} for kind in ("ours", "pipeline:8")},
        "ratio": spread(1.0),
    }
    figures = {
        "data_parallel": module("data_parallel").figures_of({"workloads": workloads}),
        "scaling": module("scaling").figures_of(dict.fromkeys(module("scaling").WORKLOADS, scaled)),
        "first_epoch": module("first_epoch").figures_of(
            dict.fromkeys(module("first_epoch").CONTENDERS, epoch)
        ),
        "pipeline": module("pipeline").figures_of(
            {"rows": [{"num_micro_batches": 8, "ours_over_torch": spread(1.0)}]}
        ),
    }
    dated = {name: {"date": DAY} | of_block for name, of_block in figures.items()}
    page = "\n".join(summary.page(dated, 1, DAY))
    assert "not run" not in page
    assert "memory over the unjoined | 1.100 |" in page
    assert "beyond its gradients | 1.0 KiB |" in page


def test_the_summary_stands_before_the_other_blocks_and_stays_there(module, tmp_path):
    contest, path = module("contest"), tmp_path / "RESULTS.md"
    contest.write_block(path, "scaling", ["old"], {"date": DAY, "ratio": 1.23456})
    contest.write_block(path, "pipeline", ["piped"])
    contest.write_block(path, "summary", ["first"])
    contest.write_block(path, "scaling", ["new"], {"date": DAY, "ratio": 2.34567})
    contest.write_block(path, "summary", ["again"])
    assert path.read_text().removeprefix(contest.HEAD) == (
        "\n<!-- summary: begin -->\nagain\n<!-- summary: end -->\n"
        "\n<!-- scaling: begin -->\nnew\n\n"
        f'<!-- figures: {{"date": "{DAY}", "ratio": 2.3457}} -->\n<!-- scaling: end -->\n'
        "\n<!-- pipeline: begin -->\npiped\n<!-- pipeline: end -->\n"
    )
    assert contest.read_figures(path) == {"scaling": {"date": DAY, "ratio": 2.3457}}


def test_lines_of_python_are_counted(module, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("one\ntwo\n")
    (tmp_path / "inner" / "b.py").write_text("three\n")
    (tmp_path / "c.txt").write_text("not counted\n")
    assert module("summary").count_lines(tmp_path) == 3


def test_gradients_of_an_embedding_are_counted_as_slices(module):
    workload = module("workloads").WORKLOADS["language_model"]
    # 16 rows of 64 words: a slice of 64 float32 and an index each; the dense layers' weights.
    dense = 64 * 64 + 64 + 64 * 32_768 + 32_768
    size = workload.gradient_bytes(workload.build_model())
    assert size == 4 * dense + 16 * 64 * (64 * 4 + 4)
