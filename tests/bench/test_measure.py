"""The harness: whole numbers, the slowest rank, the count of what is wrong."""

import dataclasses

import numpy as np
import pytest

from tfparallel.bench import collectives, table
from tfparallel.bench.cost_fit import fitted
from tfparallel.bench.measure import OneProcess, measure
from tfparallel.bench.sizes import COLLECTIVES, ITEM_BYTES, sweep
from tfparallel.bench.table import Row


class Sum:
    """A contender in NumPy; `spoil` makes it wrong."""

    name, implementation, collectives = "sum", "NumPy", ("all_reduce",)

    def __init__(self, spoil=lambda results: results):
        self._spoil = spoil

    def prepare(self, collective, count, dtype):
        return self

    def load(self, arrays):
        self._arrays = arrays

    def run(self):
        total = sum(array.astype(np.float64) for array in self._arrays)
        outputs = [total.astype(self._arrays[0].dtype) for _ in self._arrays]
        return self._spoil(outputs)

    def run_null(self):
        pass

    def arrays(self, outcome):
        return outcome


class Slower(OneProcess):
    """A second process takes three times as long."""

    def gather(self, values):
        gathered = list(values)
        # Digests are equal; times are not.
        return [gathered, [3 * value if 0 < value < 1 else value for value in gathered]]


def test_sums_of_whole_numbers_are_exact_in_any_order():
    for dtype in ITEM_BYTES:
        for num_ranks in (2, 8, 200):
            check_whole_numbers(dtype, num_ranks)


def check_whole_numbers(dtype, num_ranks):
    whole = collectives.whole_numbers
    terms = [whole(100, dtype, rank, num_ranks) for rank in range(num_ranks)]
    forwards, backwards = terms[0], terms[-1]
    for term, other in zip(terms[1:], terms[-2::-1], strict=True):
        forwards, backwards = forwards + term, backwards + other
    sums, ranks = [forwards, backwards], [0, 1]
    assert collectives.num_wrong(sums, ranks, num_ranks, dtype, "all_reduce", whole) == 0
    assert len(np.unique(terms[0].astype(np.float64))) > 1


def test_rounding_is_within_the_tolerance_and_a_lost_term_is_not():
    for dtype in ITEM_BYTES:
        check_tolerance(dtype)


def check_tolerance(dtype):
    random = collectives.random_numbers
    terms = [random(200, dtype, rank, 8) for rank in range(8)]
    total = sum(terms[1:], terms[0])

    def num_wrong(result):
        return collectives.num_wrong([result], [0], 8, dtype, "all_reduce", random)

    assert num_wrong(total) == 0
    assert num_wrong(total - terms[3]) > 100
    assert num_wrong(total * np.nan) == 200


def test_what_each_collective_makes():
    terms = [np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])]
    assert collectives.expected("all_reduce", terms, 1).tolist() == [11, 22, 33, 44]
    assert collectives.expected("reduce_scatter", terms, 1).tolist() == [33, 44]
    assert collectives.expected("all_gather", terms, 0).tolist() == [1, 2, 3, 4, 10, 20, 30, 40]
    assert collectives.expected("broadcast", terms, 1).tolist() == [1, 2, 3, 4]
    assert collectives.expected("all_to_all", terms, 1).tolist() == [3, 4, 30, 40]
    assert collectives.expected("reduce", terms, 0).tolist() == [11, 22, 33, 44]
    assert collectives.expected("reduce", terms, 1).tolist() == [0, 0, 0, 0]
    assert collectives.expected("scatter", terms, 1).tolist() == [3, 4]
    assert collectives.expected("send_recv", terms, 0).tolist() == [10, 20, 30, 40]
    assert collectives.expected("send_recv", terms, 1).tolist() == [1, 2, 3, 4]
    whole = ("all_reduce", "broadcast", "reduce", "send_recv")
    for name in COLLECTIVES:
        assert collectives.whole_count(name, 7, 2, unalign=3) == (10 if name in whole else 12)
        count = collectives.whole_count(name, 7, 2)
        assert count == (7 if name in whole else 6)
        num_in = collectives.input_count(name, count, 2)
        num_out = collectives.expected(name, [np.zeros(num_in)] * 2, 0).size
        assert collectives.input_size(name, num_out, 2) == num_in and max(num_in, num_out) == count


def spoil_one(results):
    results[1][5] += 1
    return results


def test_one_wrong_element_is_counted_for_both_inputs_and_between_ranks():
    (row,) = measure(OneProcess(3), [Sum(spoil_one)], [10], iters=1)
    assert row.num_wrong == 3
    assert "FAILED" in table.footer([row])[0]
    (row,) = measure(OneProcess(3), [Sum()], [10], iters=1)
    assert row.num_wrong == 0


def test_the_time_is_that_of_the_slowest_process():
    ticks = iter(range(10000))
    # A hundredth of a second each way.
    (row,) = measure(Slower(2), [Sum()], [8], iters=3, clock=lambda: next(ticks) / 100)
    assert row.times_seconds == pytest.approx((0.03, 0.03, 0.03))


def test_names_and_units_are_those_of_nccl_tests():
    row = Row("ring", "x", "all_reduce", 4, 256, 1024, "float32", (3e-6, 1e-6, 2e-6), 1e-7, 0)
    record = row.as_json()
    nccl = ["algorithm", "size", "count", "type", "redop", "time", "alg_bw", "bus_bw", "nwrong"]
    assert list(record)[:9] == nccl
    assert record["time"] == pytest.approx(2.0) and record["type"] == "float"
    assert record["alg_bw"] == pytest.approx(0.512) and record["bus_bw"] == pytest.approx(0.768)
    assert [record[key] for key in ("p10", "p50", "p90", "p99")] == pytest.approx(
        [1.2, 2.0, 2.8, 2.98]
    )
    factor = collectives.bus_factor
    assert factor("broadcast", 4) == 1 and factor("all_gather", 4) == 0.75


def test_each_size_is_measured_again_off_its_boundary():
    rows = list(measure(OneProcess(3), [Sum()], [16, 64], iters=1, unalign=1))
    assert [row.count for row in rows] == [16, 17, 64, 65]
    assert {row.num_wrong for row in rows} == {0}


def test_the_report_has_the_keys_of_nccl_tests():
    times = (3e-6, 1e-6, 2e-6)
    rows = [Row("mpi", "x", name, 4, 256, 1024, "float32", times, 1e-7, 0) for name in COLLECTIVES]
    content = table.as_nccl_tests(rows)
    assert list(content) == ["results", "out_of_bounds", "average_bus_bandwidth"]
    assert content["out_of_bounds"] == {"count": 0, "okay": "true"}
    mean = np.mean([row.bus_bw for row in rows])
    assert content["average_bus_bandwidth"]["bandwidth"] == pytest.approx(mean)
    first = content["results"][0]
    assert list(first)[:6] == ["size", "count", "type", "redop", "root", "out_of_place"]
    assert first["out_of_place"]["time"] == pytest.approx(2.0)
    assert first["out_of_place_per_iter"]["p99_us"] == pytest.approx(2.98)
    assert first["out_of_place_per_iter"]["times_us"] == pytest.approx([3.0, 1.0, 2.0])
    roots = {result["experiment_name"]: result["root"] for result in content["results"]}
    assert {name for name, root in roots.items() if root == "0"} == {
        "broadcast",
        "reduce",
        "scatter",
    }
    assert table.as_nccl_tests([dataclasses.replace(rows[0], num_wrong=2)])["out_of_bounds"] == {
        "count": 2,
        "okay": "false",
    }


def test_sizes():
    assert sweep(4096, 70000, 4, 4) == [1024, 4096, 16384]
    with pytest.raises(ValueError, match="at least 2.*below the smallest.*one element of 8"):
        sweep(4, 2, 1, 8)


def test_each_transport_between_workers_has_a_model_of_its_own():
    rows = [
        Row(name, "x", "all_reduce", 2, size // 4, size, "float32", (time * (1e-4 + size / 1e9),),
            0.0, 0)
        for name, time in (("ring", 4.0), ("mpi_ring", 1.0), ("mpi_tree", 1.0), ("mpi", 1.0))
        for size in (4096, 65536, 2**20, 2**24)
    ]  # fmt: skip
    models = fitted(rows, shared=False)
    assert list(models) == ["gRPC", "MPI"]
    slow, fast = models["gRPC"].seconds("ring", 2, 2**22), models["MPI"].seconds("ring", 2, 2**22)
    assert slow == pytest.approx(4 * (1e-4 + 2**22 / 1e9), rel=1e-3) and fast < slow / 2
    assert fitted(rows, shared=True).keys() == {"memory"}  # The ring, there, is ours.
