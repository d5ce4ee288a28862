"""The report of a check: verdicts, curves and their text."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tfparallel.diagnostics.compare import digits_that_agree
from tfparallel.diagnostics.floor import StepReport

_VERDICTS = ("match", "reproducible", "undetermined", "differs")


@dataclasses.dataclass(frozen=True)
class VariableReport:
    """One weight or optimizer variable.

    Attributes:
        path: Its path on one device.
        shape: Its shape.
        absolute: The largest absolute difference after the last step.
        relative: `absolute` / the largest magnitude in the variable.
        floor: The relative difference that rounding alone causes after the last step.
        verdict: `"match"`, `"reproducible"`, `"undetermined"` (rounding alone exceeds the tolerance
            from the first step on) or `"differs"`.
        first_step: The first compared step at which it differs, or None.
        digits: Decimal digits that agree after the last step, if it matches.
    """

    path: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    floor: float
    verdict: str
    first_step: int | None = None
    digits: int | None = None


@dataclasses.dataclass(frozen=True)
class ValueReport:
    """One loss or metric.

    Attributes:
        name: `"fit: loss"`, `"evaluate: accuracy"`, and so on.
        single: Its value on one device.
        parallel: Its value in parallel.
        verdict: As for variables.
        first_step: As for variables.
        digits: As for variables.
    """

    name: str
    single: float
    parallel: float
    verdict: str
    first_step: int | None = None
    digits: int | None = None

    @property
    def relative(self) -> float:
        """Relative difference of the two values."""
        size = max(abs(self.single), abs(self.parallel))
        return abs(self.single - self.parallel) / size if size else 0.0


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The outcome of a check; `print` shows it as tables.

    Attributes:
        verdict: `"match"`, `"reproducible"`, `"undetermined"` (rounding alone exceeds the tolerance
            in every variable) or `"differs"`.
        dtype: The coarsest dtype in which the model computes or stores a trainable weight.
        tolerance: The relative difference that counts as rounding in any model.
        batch_sizes: Examples in each step.
        steps: Statistics over the weights after steps 1, 2, 4, 8, … and the last.
        sharp_until: The last step up to which the tolerance alone applied to most weights, or None.
        growth: Factor by which each step amplifies rounding, or None if it does not grow.
        variables: Weights first, then the optimizers' variables.
        values: Losses and metrics.
        random_layers: Names of the layers that draw random numbers.
        first_difference: Description of the first difference, or None.
        notes: Further remarks for the reader.
        sent_bytes_in_a_step: Bytes that a step passes to other workers, by "sums", "slices" and
            "rows" (`tfparallel.callbacks.SentBytes`); None without other workers.
    """

    verdict: str
    dtype: str
    tolerance: float
    batch_sizes: tuple[int, ...]
    steps: tuple[StepReport, ...]
    sharp_until: int | None
    growth: float | None
    variables: tuple[VariableReport, ...]
    values: tuple[ValueReport, ...]
    random_layers: tuple[str, ...]
    first_difference: str | None
    notes: tuple[str, ...]
    sent_bytes_in_a_step: dict[str, int] | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return self.verdict != "differs"

    @property
    def digits(self) -> tuple[int, int] | None:
        """Digits to which all weights agree after the first and the last step, if they match."""
        if self.verdict != "match" or not self.steps:
            return None
        first, last = self.steps[0], self.steps[-1]
        return tuple(digits_that_agree(step.difference, self.dtype) for step in (first, last))

    def with_note(self, note: str) -> "CheckReport":
        """Returns the report with one more note."""
        return dataclasses.replace(self, notes=(*self.notes, note))

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serializable values."""
        return {**dataclasses.asdict(self), "digits": self.digits}

    def __str__(self) -> str:
        lines = [
            "",
            *_table(_OF_VARIABLES, self.variables),
            "",
            *_table(_OF_VALUES, self.values),
            "",
            *_table(_OF_STEPS, self.steps),
            "",
            f"computed in {self.dtype}, tolerance {self.tolerance:.0e} relative to the largest "
            f"magnitude in a variable; {_batches(self.batch_sizes)}",
            self._sharpness(),
        ]
        if self.growth is not None:
            lines.append(
                f"this model amplifies rounding error by a factor of {self.growth:.2g} per step"
            )
        if self.sent_bytes_in_a_step is not None:
            lines.append(_sent(self.sent_bytes_in_a_step))
        if self.random_layers:
            lines.append(f"random layers: {', '.join(self.random_layers)}")
        lines += [f"note: {note}" for note in self.notes]
        if self.first_difference is not None:
            lines.append(f"first difference: {self.first_difference}")
        counted = Counter(item.verdict for item in self.variables)
        counts = ", ".join(f"{counted[name]} {name}" for name in _VERDICTS if name in counted)
        verdict = f"{self.verdict}{self._digits_text()}"
        lines.append(f"{'OK' if self.passed else 'FAILED'}: {verdict} ({counts})")
        return "\n".join(lines)

    def _digits_text(self) -> str:
        """Describes how closely all weights agree, and the limit set by rounding."""
        if self.digits is None:
            return ""
        first, last = self.digits
        step = self.steps[-1]
        before, after = (_agreement(s.difference, self.dtype) for s in (self.steps[0], step))
        if "identical" in (before, after):
            if before == after:
                return ": identical"
            return f": {before} after step {self.steps[0].step}, {after} after step {step.step}"
        text = f": {first} digits"
        if last != first:
            text += f" after step {self.steps[0].step}, {last} after step {step.step}"
        floor = digits_that_agree(step.floor, self.dtype)
        if last < first and floor < first:
            text += f", where rounding alone leaves {floor}"
        return text

    def _sharpness(self) -> str:
        last = len(self.batch_sizes)
        if self.sharp_until is None:
            return (
                "the comparison is not sharp at any step: from the first one on, rounding alone "
                f"moves most weights by more than the tolerance. {_SHARPER[self.dtype]}"
            )
        if self.sharp_until == last:
            return f"the comparison is sharp at all {last} steps"
        return (
            f"the comparison is sharp up to step {self.sharp_until} of {last}; after that, "
            "rounding alone moves most weights by more than the tolerance"
        )


_SHARPER = dict.fromkeys(("float32", "bfloat16", "float16"), "Check in float64.") | {
    "float64": "Check with larger batches, or with fewer layers."
}


def _sent(sent_bytes: dict[str, int]) -> str:
    sums, slices, rows = (
        f"{num_bytes / 1024:,.1f} KiB of {kind}" if num_bytes else f"no {kind}"
        for kind, num_bytes in sent_bytes.items()
    )
    return f"each step sends the other workers {sums}, {slices} and {rows}"


def _agreement(relative: float, dtype: str) -> str:
    return f"{digits_that_agree(relative, dtype)} digits" if relative else "identical"


def _verdict(item: VariableReport | ValueReport) -> str:
    if item.digits is not None and not item.relative:
        return f"{item.verdict}: identical"
    if item.digits is not None:
        return f"{item.verdict}: {item.digits} digit{'s' * (item.digits != 1)}"
    since = f" from step {item.first_step}" if item.first_step is not None else ""
    return item.verdict + since


def _batches(sizes: tuple[int, ...]) -> str:
    full = max(sizes)
    num_shorter = sum(size < full for size in sizes)
    return f"{len(sizes)} batches of {full}" + (
        f", {num_shorter} of them shorter" if num_shorter else ""
    )


def _table(columns: Sequence[tuple[str, Callable]], items: Sequence) -> list[str]:
    head = [name for name, _ in columns]
    rows = [[cell(item) for _, cell in columns] for item in items]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    # Names are left-aligned, numbers right-aligned; the verdict comes last, unpadded.
    last = len(head) - 1

    def line(row: list[str]) -> str:
        cells = [
            cell if column == last else cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells)

    return [line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)]


# Name, and text of a cell.
_OF_VARIABLES = (
    ("variable", lambda item: item.path),
    ("shape", lambda item: str(item.shape)),
    ("largest abs", lambda item: f"{item.absolute:.1e}"),
    ("largest rel", lambda item: f"{item.relative:.1e}"),
    ("floor", lambda item: f"{item.floor:.1e}"),
    ("verdict", _verdict),
)
_OF_VALUES = (
    ("loss or metric", lambda item: item.name),
    ("one device", lambda item: f"{item.single:.9g}"),
    ("in parallel", lambda item: f"{item.parallel:.9g}"),
    ("verdict", _verdict),
)
_OF_STEPS = (
    ("step", lambda item: str(item.step)),
    ("median diff", lambda item: f"{item.median_difference:.1e}"),
    ("largest diff", lambda item: f"{item.difference:.1e}"),
    ("median floor", lambda item: f"{item.median_floor:.1e}"),
    ("largest floor", lambda item: f"{item.floor:.1e}"),
    ("sharp", lambda item: f"{item.num_sharp} of {item.num_weights} weights"),
)
