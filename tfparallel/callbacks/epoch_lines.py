"""The progress display of `tfparallel train`: a bar in a terminal, a line per epoch in a log."""

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import keras

from tfparallel.activity import Activity

_REDRAW_SECONDS = 0.1
_WIDEST_BAR = 30


class EpochLines(keras.callbacks.Callback):
    """Prints a line per epoch with examples per second, and a progress bar in a terminal.

    The rate covers training steps only. It excludes validation and callbacks between epochs, the
    first step of a `fit`, which includes tracing, and steps that a resumed run skips.

    Pass it to `fit` with `verbose=0`, on the chief only.

    Args:
        num_examples: Takes an epoch and a range of its steps; returns the number of examples in
            them, or None if unknown.
        num_passed: Takes an epoch; returns the number of skipped steps.
        traced: Describes what the first step traces, such as "the step of 2 devices".
    """

    takes_tensors = True  # It reads the logs only when it draws.

    def __init__(
        self,
        num_examples: Callable[[int, int, int], int | None],
        num_passed: Callable[[int], int] = lambda epoch: 0,
        traced: str = "the step",
    ):
        super().__init__()
        self._num_examples, self._num_passed = num_examples, num_passed
        self._activity = Activity(f"tracing {traced}")
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._is_traced = False
        self._epoch = self._num_seen = 0
        self._first: int | None = None  # The number of untimed steps.
        self._epoch_began = self._began = self._ended = self._drawn = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_traced = False
        self._activity.__enter__()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._num_seen = epoch, 0
        self._epoch_began = self._began = self._ended = time.perf_counter()
        self._first = 0 if self._is_traced and not self._num_passed(epoch) else None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._num_seen, self._ended = batch + 1, time.perf_counter()
        if self._num_seen <= self._num_passed(self._epoch):
            return
        if self._first is None:
            self._first, self._began = self._num_seen, self._ended
        if not self._is_traced:
            self._is_traced = True
            self._activity.stop()
        if self._is_terminal and self._ended - self._drawn >= _REDRAW_SECONDS:
            self._drawn = self._ended
            self._draw(self._bar(logs or {}))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        seconds = time.perf_counter() - self._epoch_began
        steps = f"{self._num_seen} step{'s' * (self._num_seen != 1)}"
        parts = [self._head, f"{steps} in {_duration(seconds)}", *self._rates()]
        line = " - ".join([*parts, *_texts(logs or {})])
        if self._is_terminal:
            self._draw("")
        print(line, flush=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        """Clears the terminal line, also after a failed training."""
        self._activity.stop()

    @property
    def _head(self) -> str:
        return f"Epoch {self._epoch + 1}/{self.params['epochs']}"

    def _rates(self) -> list[str]:
        if self._first is None or self._num_seen <= self._first:
            return []
        seconds = max(self._ended - self._began, 1e-9)
        each = seconds / (self._num_seen - self._first)
        rates = [f"{_duration(each)}/step"]
        examples = self._num_examples(self._epoch, self._first, self._num_seen)
        if examples:
            rates.append(f"{_of_three_digits(examples / seconds)} examples/s")
        return rates

    def _bar(self, logs: dict[str, Any]) -> str:
        number = self.params.get("steps")
        rest = " - ".join([*self._rates(), *_texts(logs)])
        if not number:
            return f"{self._head} {self._num_seen} - {rest}"
        width = min(_WIDEST_BAR, max(10, _columns() // 4))
        done = width * self._num_seen // number
        bar = "━" * done + "─" * (width - done)
        return f"{self._head} {self._num_seen}/{number} {bar} {rest}"

    def _draw(self, text: str) -> None:
        print(f"\r\x1b[K{text[: _columns() - 1]}", end="", flush=True)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _texts(logs: dict[str, Any]) -> list[str]:
    # Arrays do not fit in a line.
    scalars = {name: value for name, value in logs.items() if not getattr(value, "shape", ())}
    values = {name: float(value) for name, value in scalars.items()}
    return [
        f"{name}: {value:.4f}" if abs(value) > 1e-3 or not value else f"{name}: {value:.4e}"
        for name, value in values.items()
    ]


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms" if seconds < 0.0999 else f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _of_three_digits(value: float) -> str:
    """Formats 1234.5 as 1,230: timings have no more significant digits."""
    if value < 1:
        return f"{value:.2g}"
    unit = 10 ** max(0, math.floor(math.log10(value)) - 2)
    return f"{round(value / unit) * unit:,}" if value >= 10 else f"{value:.3g}"
