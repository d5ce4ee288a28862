import pytest

from tfparallel.texts import counted, number_of_bytes, parse_bytes, size_text


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


@pytest.mark.parametrize(
    ("text", "number"),
    [("16GiB", 2**34), ("5MB", 5 * 10**6), ("7", 7), ("4K", 4096), ("16M", 2**24),
     ("2Gi", 2**31)],
)
def test_parse_bytes(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "16XB", "4Q", "K", "-1GiB", "0", "GiB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="such as 16GiB, 500MB, 4K or 1048576 is required"):
        parse_bytes(text)


def test_an_argument_is_a_number_or_a_text():
    assert number_of_bytes("device_memory", None) is None
    assert number_of_bytes("device_memory", 2**30) == number_of_bytes("device_memory", "1GiB")


@pytest.mark.parametrize("value", ["much", 0, -1, True, [1]])
def test_an_argument_that_is_neither(value):
    with pytest.raises(ValueError, match=r"or a string such as '16GiB'. Received: device_memory="):
        number_of_bytes("device_memory", value)


def test_one_thing_has_no_plural():
    texts = [counted(number, "worker") for number in (0, 1, 2)]
    assert texts == ["0 workers", "1 worker", "2 workers"]
