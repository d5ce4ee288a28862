"""A cluster on paper: every rank has a clock, every message moves two of them.

    a message starts when both ends are free        max(clock of source, clock of target)
    takes                                           α + bytes·β of the wire between the two
    and is added in                                 bytes·γ

A rank's wire carries one message each way at a time. Ranks of a group share fast wires; between
groups each rank has a slow one of its own. Where all ranks march in step this gives the closed
formulas; where they do not (a flat ring over two kinds of wire, packets in a tree), more.
"""

from collections.abc import Sequence

import numpy as np

from tfparallel.collectives.algorithms.schedule import MessageSchedule
from tfparallel.collectives.cost_model import CostModel, Link


def simulate(
    schedule: MessageSchedule,
    sizes_bytes: Sequence[float],
    model: CostModel,
    local_ranks: int | None = None,
) -> list[float]:
    """Returns the seconds that an all-reduce takes, for each size.

    Args:
        schedule: Who sends what to whom.
        sizes_bytes: S, several at once: one pass over the schedule serves all.
        model: The wires; its `across` is the one between groups.
        local_ranks: Ranks of a group; by default all.
    """
    num_ranks = schedule.num_ranks
    inside = Link(model.alpha, model.beta)
    across = model.across or inside
    group = np.arange(num_ranks) // (local_ranks or num_ranks)
    block_bytes = np.asarray(sizes_bytes, float)[:, None] / schedule.num_blocks
    clock = np.zeros((len(sizes_bytes), num_ranks))
    for step in schedule.steps():
        crosses = group[step.sources] != group[step.targets]
        alpha = np.where(crosses, across.alpha, inside.alpha)
        beta = np.where(crosses, across.beta, inside.beta)
        sent_bytes = block_bytes * (step.stops - step.starts)
        start = np.maximum(clock[:, step.sources], clock[:, step.targets])
        end = start + alpha + sent_bytes * beta
        moved = clock.copy()
        moved[:, step.sources] = np.maximum(moved[:, step.sources], end)
        received = end + sent_bytes * model.gamma if step.adds else end
        moved[:, step.targets] = np.maximum(moved[:, step.targets], received)
        clock = moved
    return (model.fixed + clock.max(1)).tolist()
