"""Differences between two runs, and what counts as rounding."""

import numpy as np
import pytest

from tfparallel.diagnostics.compare import difference, digits_that_agree, owner_of_slot


def test_elements_are_held_against_the_largest_of_their_variable():
    expected = np.array([2.0, 1e-9])
    found = difference(expected, expected + [0.0, 1e-5], tolerance=1e-5)
    assert found.within and found.absolute == pytest.approx(1e-5)
    assert found.relative == pytest.approx(5e-6)
    assert not difference(expected, expected + [0.0, 3e-5], tolerance=1e-5).within


def test_a_scale_replaces_a_smaller_magnitude():
    noise, other = np.array([1e-17]), np.array([-3e-17])
    assert not difference(noise, other, 1e-9).within
    assert difference(noise, other, 1e-9, scale=1.0).within
    assert not difference(noise + 1e-3, other, 1e-9, scale=1.0).within


def test_integers_must_be_equal():
    assert difference(np.array(20), np.array(20), 0.5).within
    assert not difference(np.array(20), np.array(21), 0.5, scale=1e3).within


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_is_never_within(bad):
    value = np.array([1.0, bad])
    assert not difference(value, value, 1.0).within
    assert not difference(np.ones(2), value, 1.0).within


def test_shapes_and_empty_and_zero():
    assert not difference(np.ones(2), np.ones(3), 1.0).within
    assert difference(np.ones((0, 2)), np.ones((0, 2)), 0.0).within
    assert difference(np.zeros(2), np.zeros(2), 1e-4).relative == 0.0
    assert not difference(np.zeros(2), np.full(2, 1e-12), 1e-4).within


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
