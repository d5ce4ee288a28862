"""What `benchmarks/choice.py` concludes from sweeps; times are made up."""

import importlib
import pathlib

import pytest

from tfparallel.collectives.cost_model import CostModel

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
NAMES = ["reduce_to_one", "tree", "ring"]
SIZES = [4096, 16384, 65536, 262144]


@pytest.fixture
def choice(monkeypatch):
    """The program, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("choice")


def sweep(times, num_ranks=2):
    """A sweep of times in microseconds: algorithm -> of each size."""
    return {
        "rows": [
            {"algorithm": name, "num_ranks": num_ranks, "size": size, "time": time}
            for name, of_sizes in times.items()
            for size, time in zip(SIZES, of_sizes, strict=True)
        ],
        "profile": {
            name: [(size, time * 1e-6) for size, time in zip(SIZES, of_sizes, strict=True)]
            for name, of_sizes in times.items()
        },
    }


def test_what_the_first_sweep_chooses_the_second_one_times(choice):
    first = sweep({"ring": [100, 100, 100, 100], "tree": [50, 95, 200, 80]})
    second = sweep({"ring": [100, 100, 100, 100], "tree": [200, 50, 50, 80]})
    rows = choice.choices([first, second], "ring")
    assert [row["taken"] for row in rows] == ["tree", "ring", "ring", "tree"]
    assert [row["over_best"] for row in rows] == [2.0, 2.0, 2.0, 1.0]
    assert [row["over_default"] for row in rows] == [2.0, 1.0, 1.0, 0.8]


def test_ranks_and_sizes_that_were_not_fitted_are_predicted(choice):
    true = CostModel(3e-6, 4e-10, 2e-10, 5e-5, "shared")

    def swept(num_ranks, factor=1.0):
        times = {
            name: [1e6 * factor * true.seconds(name, num_ranks, size) for size in SIZES]
            for name in NAMES
        }
        return sweep(times, num_ranks)

    exact = choice.errors({n: [swept(n), swept(n)] for n in choice.NUM_RANKS}, shared=True)
    assert set(exact["memory"]) == set(choice.NUM_RANKS)
    for errors in exact["memory"].values():
        assert len(errors) == len(NAMES) * len(SIZES) / 2 and max(errors) < 1e-6
    # Half as fast when it is predicted.
    slower = choice.errors({n: [swept(n), swept(n, 2.0)] for n in choice.NUM_RANKS}, shared=True)
    assert slower["memory"][4] == pytest.approx([0.5] * 6)
