"""The model against the formulas, the simulator, and itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.collectives.algorithms import ALGORITHMS, GROUPED, double_binary_tree
from tfparallel.collectives.cost_model import CostModel, Link, Measurement, fit, simulate

WIRE = CostModel(alpha=5e-6, beta=1e-9, gamma=2e-10)
SIZES = [2**12, 2**20, 2**26]
FLAT = sorted(set(ALGORITHMS) - set(GROUPED) - {"double_binary_tree"})


@given(st.sampled_from(FLAT), st.integers(1, 33))
@settings(max_examples=40, deadline=None)
def test_a_simulated_cluster_takes_what_the_formula_says(name, num_ranks):
    seconds = simulate(ALGORITHMS[name].schedule(num_ranks), SIZES, WIRE)
    expected = [WIRE.seconds(name, num_ranks, size) for size in SIZES]
    if name in ("halving_doubling", "recursive_doubling") and num_ranks & (num_ranks - 1):
        # The formula lets nobody begin before the ranks that join a neighbour have.
        assert all(a <= b * (1 + 1e-9) for a, b in zip(seconds, expected, strict=True))
    else:
        # Of a tree the root adds at once what others add one after the other.
        assert seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_ring_of_4096_ranks():
    seconds = simulate(ALGORITHMS["ring"].schedule(4096), SIZES[:1], WIRE)
    assert seconds == pytest.approx([WIRE.seconds("ring", 4096, SIZES[0])])


@pytest.mark.parametrize("name", GROUPED)
def test_two_kinds_of_wire(name):
    model = CostModel(1e-6, 1e-11, 1e-11, across=Link(1e-5, 1e-10))
    seconds = simulate(ALGORITHMS[name].schedule(256, 8), SIZES, model, 8)
    expected = [model.seconds(name, 256, size, 8) for size in SIZES]
    assert seconds == pytest.approx(expected)
    # PERFORMANCE's formula: 2(g−1)α₁ + 2(g−1)/g·Sβ₁ + 2(k−1)α₂ + 2(k−1)/k·(S/g)β₂.
    if name == "hierarchical_ring":
        g, k, size = 8, 32, SIZES[1]
        text = 2 * (g - 1) * 1e-6 + 2 * (g - 1) / g * size * 1e-11
        text += 2 * (k - 1) * 1e-5 + 2 * (k - 1) / k * (size / g) * 1e-10
        assert model.seconds(name, 256, size, 8) == pytest.approx(text + 255 / 256 * size * 1e-11)
    # A flat ring waits for a slow wire in every step.
    flat = simulate(ALGORITHMS["ring"].schedule(256), SIZES, model, 8)
    assert flat == pytest.approx([model.seconds("ring", 256, size, 8) for size in SIZES], rel=0.1)


def test_packets_pay_for_large_vectors():
    size = 2**26
    packets = double_binary_tree.best_num_packets(64, size, WIRE.alpha, WIRE.beta)
    assert packets > 20

    def time(number):
        return simulate(double_binary_tree.schedule(64, number), [size], WIRE)[0]

    assert time(packets) < time(packets // 4) and time(packets) < time(packets * 4)
    assert time(packets) < 0.3 * WIRE.seconds("tree", 64, size)


@pytest.mark.parametrize("transport", ["wire", "shared"])
def test_a_fit_finds_the_numbers_and_predicts_ranks_that_it_has_not_seen(transport):
    true = CostModel(3e-6, 4e-10, 2e-10, 5e-5, transport)
    names = ["ring", "tree", "recursive_doubling", "double_binary_tree"]

    def times(ranks):
        return [
            Measurement(name, n, size, true.seconds(name, n, size) if name != "double_binary_tree"
                        or transport == "shared" else _with_packets(true, n, size))
            for name in names for n in ranks for size in SIZES
        ]  # fmt: skip

    fitted = fit(times([2, 4]), transport)
    assert fitted.median_error < 1e-6
    assert (fitted.alpha, fitted.beta, fitted.gamma, fitted.fixed) == pytest.approx(
        (3e-6, 4e-10, 2e-10, 5e-5), rel=1e-4
    )
    assert fitted.seconds("ring", 8, 12345) == pytest.approx(true.seconds("ring", 8, 12345))


def test_ranks_that_share_a_core_take_turns():
    true = CostModel(3e-6, 4e-10, 2e-10, 5e-5)
    rows = [
        Measurement(name, n, size, max(1, n / 2) * true.seconds(name, n, size))
        for name in ("ring", "tree", "recursive_doubling")
        for n in (2, 8)
        for size in SIZES
    ]
    fitted = fit(rows, num_cores=2)
    assert fitted.median_error < 1e-6
    assert fitted.seconds("ring", 4, 12345) == pytest.approx(2 * true.seconds("ring", 4, 12345))
    # Two ranks a host have a core each, however many hosts there are.
    assert fitted.seconds("ring", 64, 12345, 2) == pytest.approx(true.seconds("ring", 64, 12345))


def _with_packets(model, num_ranks, size):
    terms = double_binary_tree.terms(num_ranks)
    bytes_time = (terms.sent * model.beta + terms.added * model.gamma) * size
    return model.fixed + terms.latencies * model.alpha + bytes_time


def test_nothing_is_fitted_below_zero():
    rows = [Measurement("ring", 2, size, 1e-4 - 1e-13 * size) for size in SIZES]
    fitted = fit([*rows, *rows])
    assert min(fitted.alpha, fitted.beta, fitted.gamma, fitted.fixed) == 0


def test_crossovers_are_where_two_lines_meet():
    names = ["recursive_doubling", "ring"]
    (first, small), (size, large) = WIRE.crossovers(16, 1024, 2**30, algorithms=names)
    assert (first, small, large) == (1024, *names)
    times = [WIRE.seconds(name, 16, size) for name in names]
    assert times[0] == pytest.approx(times[1], rel=0.01)


def test_too_little_to_fit():
    with pytest.raises(ValueError, match="At least 4 measurements.*Received: 1"):
        fit([Measurement("ring", 2, 4096, 1e-3)])
    with pytest.raises(ValueError, match="Received: 'pigeon'"):
        fit([], "pigeon")
