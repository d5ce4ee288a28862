"""The rules of the judge: the placements of each operation's outputs."""

from tfparallel.judge.rules.call import first_mixed, joined, numbers_a_row
from tfparallel.judge.rules.table import RULES, apply

__all__ = ["RULES", "apply", "first_mixed", "joined", "numbers_a_row"]
