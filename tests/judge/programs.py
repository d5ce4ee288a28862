"""The programs that the judge must decide, by name.

Those of one kind stand together: functions of rows, functions that mix rows, layers, what draws,
inputs that are no numbers, losses and metrics, what is kept outside of the graph.
"""

from tests.judge import (
    programs_of_layers,
    programs_of_losses,
    programs_of_models,
    programs_of_more,
    programs_of_rows,
)
from tests.judge.program import PROGRAMS

__all__ = [
    "FAST",
    "PROGRAMS",
    "programs_of_layers",
    "programs_of_losses",
    "programs_of_models",
    "programs_of_more",
    "programs_of_rows",
]

# Of each kind one; the others are of the suite.
FAST = {
    "rows: softmax",
    "mixes: mean",
    "behind a draw: GaussianNoise",
    "loss: contrastive",
    "kept: read behind a batch normalization",
}
