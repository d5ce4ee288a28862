"""Differences between two runs, and what counts as rounding."""

import numpy as np
import pytest

from tfparallel.diagnostics.compare import digits_that_agree, distance_between, owner_of_slot


def test_elements_are_held_against_the_largest_of_their_variable():
    expected = np.array([2.0, 1e-9])
    distance = distance_between(expected, expected + [0.0, 1e-5])
    assert distance.is_within(1e-5) and distance.absolute == pytest.approx(1e-5)
    assert distance.relative == pytest.approx(5e-6)
    assert not distance_between(expected, expected + [0.0, 3e-5]).is_within(1e-5)


def test_what_is_no_float_is_equal_or_not():
    assert distance_between(np.array(20), np.array(21)).absolute == 1.0
    assert distance_between(np.array(True), np.array(False)).absolute == 1.0
    assert distance_between(np.array(["a"]), np.array(["a"])).absolute == 0.0


def test_a_weight_in_bfloat16_has_a_magnitude():
    """NumPy calls it no number: each of its differences was infinite, relative to a size of 0."""
    expected = np.array([2.0, 1.0], "bfloat16")
    distance = distance_between(expected, np.array([2.0, 1.125], "bfloat16"))
    assert (distance.absolute, distance.magnitude, distance.relative) == (0.125, 2.0, 0.0625)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_is_never_within(bad):
    value = np.array([1.0, bad])
    assert not distance_between(value, value).is_within(1.0)
    assert not distance_between(np.ones(2), value).is_within(1.0)


def test_shapes_and_empty_and_zero():
    assert not distance_between(np.ones(2), np.ones(3)).is_within(1.0)
    assert distance_between(np.ones((0, 2)), np.ones((0, 2))).is_within(0.0)
    assert distance_between(np.zeros(2), np.zeros(2)).relative == 0.0
    assert not distance_between(np.zeros(2), np.full(2, 1e-12)).is_within(1e-4)


@pytest.mark.parametrize(
    "slot, owner",
    [
        ("adam/model_dense_kernel_momentum", 0),
        ("adam/model_dense_1_kernel_velocity", 1),
        ("adam/iteration", None),
    ],
)
def test_slots_find_the_variable_with_the_longest_fitting_name(slot, owner):
    paths = ["model/dense/kernel", "model/dense_1/kernel"]
    assert owner_of_slot(slot, paths) == owner
    assert owner_of_slot("sgd/a_b_c_momentum", ["a", "a/b", "a/b/c"]) == 2


@pytest.mark.parametrize(
    ("relative", "dtype", "digits"),
    [
        (0.0, "float32", 6), (0.0, "float64", 15), (0.0, "bfloat16", 2), (3e-7, "float32", 6),
        (1e-6, "float64", 6), (2e-6, "float64", 5), (0.3, "float64", 0), (2.0, "float64", 0),
        (float("inf"), "float64", 0), (float("nan"), "float64", 0), (1e-20, "float64", 15),
    ],
)  # fmt: skip
def test_digits_that_agree(relative, dtype, digits):
    assert digits_that_agree(relative, dtype) == digits


def test_the_imaginary_part_counts():
    distance = distance_between(np.array([3.0 + 4.0j]), np.array([3.0 + 4.5j]))
    assert (distance.absolute, distance.magnitude) == (0.5, 5.0)
