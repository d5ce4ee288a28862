"""Families of findings: those that are known and not mended yet, and what one is told by.

A finding that shows a known family is counted under its name, and is not made smaller again.
When a family is mended, or refused, its entry goes.
"""

from __future__ import annotations

import dataclasses
import re

from .judge import Outcome
from .program import Program, source


@dataclasses.dataclass(frozen=True)
class Family:
    """A name, what a program's source (or the error) must hold, and the forms that show it."""

    name: str
    pattern: str
    forms: tuple[str, ...]
    of_error: bool = False

    def tells(self, program: Program, outcome: Outcome) -> bool:
        beside = f"start = {program.start}, then = {program.then}"
        text = outcome.detail if self.of_error else source(program) + beside
        return outcome.form in self.forms and re.search(self.pattern, text, re.DOTALL) is not None


KNOWN: list[Family] = []


def family_of(program: Program, outcome: Outcome) -> str:
    """The name of the known family that a finding belongs to, or nothing."""
    return next((family.name for family in KNOWN if family.tells(program, outcome)), "")


def traits(program: Program) -> frozenset[str]:
    """What is out of the ordinary in a program: its layers, and the options that it sets."""
    plain = Program(inputs=(), blocks=(), heads=())
    names = set()
    for field in dataclasses.fields(Program):
        value = getattr(program, field.name)
        if field.name in ("inputs", "heads"):
            for each in value:
                names |= {block.make.split("(")[0] for block in each.blocks}
            names |= {f"two {field.name}"} if len(value) > 1 else set()
        elif field.name == "blocks":
            for block in value:
                names |= {block.make.split("(")[0], block.after, block.call}
        elif value != getattr(plain, field.name):
            names.add(f"{field.name}={value}")
    ordinary = {"", "layers.Dense", "layers.Flatten", "layers.Embedding", "{layer}({x})"}
    # How many there are is seldom the cause, and shrinks to what shows it.
    return frozenset(
        trait
        for trait in names - ordinary
        if not trait.startswith(("num_examples", "batch_size", "replicas", "schedule", "outputs"))
    )


# Layers of a known family, left out of three programs in four, so that what they do hides nothing.
LAYERS: frozenset[str] = frozenset()
