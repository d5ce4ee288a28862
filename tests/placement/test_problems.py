"""What does not fit is told together; an error that follows from it does not hide it."""

import pytest

from tfparallel.problems import PlacementError, Problems


def test_one_is_raised_as_it_is_and_several_together():
    problems = Problems()
    problems.raise_all()
    with problems.gathered():
        raise ValueError("first")
    with pytest.raises(ValueError, match="^first$"):
        problems.raise_all()
    with problems.gathered():
        raise PlacementError("second")
    with pytest.raises(PlacementError, match="^first\nsecond$"):
        problems.raise_all()


def test_another_error_does_not_hide_what_is_known():
    problems = Problems()
    with pytest.raises(TypeError, match="^of the user$"), problems.gathered():
        raise TypeError("of the user")
    with problems.gathered():
        raise ValueError("CPU:9")
    with pytest.raises(ValueError, match="^CPU:9$"), problems.gathered():
        raise TypeError("because of CPU:9")
