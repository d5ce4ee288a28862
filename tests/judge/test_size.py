"""Sizes: products of numbers and names, and what they depend on."""

from fractions import Fraction

import pytest

from tfparallel.judge.size import (
    ROWS,
    Size,
    depends_on_row_number,
    depends_on_rows,
    is_row_number,
    is_whole,
    per_row,
    power_of_rows,
    row_number,
    size_named,
)

T, U = size_named("T"), size_named("U")


def test_products_do_not_depend_on_their_order():
    assert 3 * ROWS * T == T * 3 * ROWS == ROWS * (T * 3)
    assert hash(ROWS * T) == hash(T * ROWS)
    assert ROWS * T != ROWS * U


def test_names_that_cancel_leave_a_number():
    assert ROWS * T / ROWS == T
    assert 6 * ROWS / (2 * ROWS) == 3
    assert isinstance(6 * ROWS / (2 * ROWS), int)
    assert ROWS / (2 * ROWS) == Fraction(1, 2)
    assert ROWS * 0 == 0
    assert 1 / (1 / ROWS) == ROWS


def test_several_rows_per_row():
    assert per_row(ROWS) == 1 and per_row(3 * ROWS) == 3 and per_row(T * ROWS) == T
    # Another number for each piece, or none.
    others = (8, ROWS / 2, ROWS // 2, ROWS * ROWS, ROWS / T, ROWS * (ROWS // 2), ROWS + 1)
    assert [per_row(size) for size in others] == [None] * len(others)


def test_a_whole_quotient_is_exact_and_another_has_a_name_of_its_own():
    assert (6 * ROWS) // 3 == 2 * ROWS
    assert (ROWS * T) // T == ROWS
    assert isinstance(ROWS // 2, Size)
    assert ROWS // 2 != ROWS / 2
    assert ROWS // 2 == ROWS // 2
    assert 0 // ROWS == 0


def test_a_remainder_is_zero_only_where_that_is_known():
    assert (6 * ROWS) % 3 == 0
    assert (ROWS * T) % T == 0
    assert isinstance(ROWS % 2, Size)
    assert isinstance(7 % ROWS, Size)


def test_sums_of_one_name_are_added_and_others_have_a_name():
    assert ROWS + ROWS == 2 * ROWS
    assert ROWS - ROWS == 0
    assert ROWS + 0 == 0 + ROWS == ROWS
    assert ROWS + T == T + ROWS
    assert ROWS + 1 != ROWS + 2
    assert 5 - ROWS == -ROWS + 5


def test_powers():
    assert ROWS**2 == ROWS * ROWS
    assert (2 * T) ** 3 == 8 * T * T * T
    assert isinstance(ROWS**T, Size)


def test_a_size_equals_no_number():
    assert ROWS != 1
    assert ROWS / 2 != Fraction(1, 2)


@pytest.mark.parametrize(
    ("size", "right"),
    [(3, True), (Fraction(1, 2), False), (3 * ROWS * T, True), (ROWS / 2, False), (ROWS / T, False),
     (ROWS // 2, True)],
)  # fmt: skip
def test_is_whole(size, right):
    assert is_whole(size) is right


@pytest.mark.parametrize(
    ("size", "right"),
    [(3, False), (T, False), (ROWS, True), (T / ROWS, True), (T + 1, False), (ROWS + T, True),
     (ROWS // 2 * T, True), ((ROWS + 1) % 3, True), (T**ROWS, True),
     (size_named(("longest", "name", ROWS)), True), (size_named(("longest", ("name", ROWS))), True),
     (size_named(("longest", "name", T)), False)],
)  # fmt: skip
def test_depends_on_rows(size, right):
    assert depends_on_rows(size) is right


@pytest.mark.parametrize(
    ("size", "right"),
    [(3, 0), (2.5, 0), (T, 0), (ROWS, 1), (3 * ROWS * T, 1), (T / ROWS, -1), (ROWS**2, 2),
     (ROWS + 1, None), (ROWS * (ROWS // 2), None), (T + 1, 0)],
)  # fmt: skip
def test_power_of_rows(size, right):
    assert power_of_rows(size) == right


def test_the_number_of_a_row_is_followed_through_what_is_made_of_it():
    number = row_number("loop")
    assert is_row_number(number)
    assert not any(map(is_row_number, (number + 1, 2 * number, number * number, ROWS, 3)))
    assert all(map(depends_on_row_number, (number, number + 1, (number + 1) % ROWS, number // T)))
    assert not any(map(depends_on_row_number, (ROWS, T, 3, ROWS // 2)))
    assert not depends_on_rows(number)
    assert row_number("loop") != row_number("another")
