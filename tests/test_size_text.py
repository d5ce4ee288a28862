import pytest

from tfparallel.size_text import size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 * 1024, "1023 KiB"),
        (254_246.4, "248.3 KiB"),
        (3.2 * 2**20, "3.2 MiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_a_number_of_bytes_for_people(size_bytes, text):
    assert size_text(size_bytes) == text
