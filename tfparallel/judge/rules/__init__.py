"""For each operation, where the rows are in its outputs: the rules of the judge."""

from tfparallel.judge.rules.call import first_mixed, joined, numbers_a_row
from tfparallel.judge.rules.table import RULES, apply

__all__ = ["RULES", "apply", "first_mixed", "joined", "numbers_a_row"]
