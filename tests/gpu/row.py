"""The rows that the trials of `make test-gpu` print."""

import json
import re
from collections.abc import Callable, Iterator

# A row: what was tried; "ok", "skipped" or "broken"; what came of it.
Row = tuple[str, str, str]

OK, SKIPPED, BROKEN = "ok", "skipped", "broken"


def tried(what: str, function: Callable[[], str], refusal: str | None = None) -> Iterator[Row]:
    """Yields a row of what a function returned, or raised.

    Args:
        what: The row's name, which is printed before the function is called.
        function: Returns what came of it, in words.
        refusal: What the error says, a regular expression, where one is to be expected: that
            is "skipped", and every other one "broken".
    """
    print(json.dumps([what]), flush=True)
    try:
        yield what, OK, function()
    except Exception as error:  # noqa: BLE001  (whatever it is: it is what was asked for)
        text = f"{type(error).__name__}: {error}"
        expected = refusal is not None and re.search(refusal, text)
        if expected:
            yield what, SKIPPED, text[expected.start() :][:500]
        else:
            yield what, BROKEN, text[:500]
