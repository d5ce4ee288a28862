"""The resources of a job: a place for each worker, in placement groups of Ray.

    num_workers=(2, 4):   [ a | b ]   [ c ]   [ d ]

The least number of workers is one group, which Ray reserves as a whole or not at all, so that two
jobs cannot block each other. Each further worker is a group of its own. When a node dies, Ray looks
for new room for its bundles, and reports them as placed once a node has arrived: that is how a job
learns that it can grow. Groups that wait for room are also what Ray's autoscaler acts on.
"""

import dataclasses
from collections.abc import Mapping

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one worker: a bundle of a placement group."""

    group: PlacementGroup
    bundle: int


class Placement:
    """The placement groups of a job. A context manager, which returns the resources to Ray.

    Args:
        least: The least number of workers.
        most: The largest number of workers.
        resources: The resources of each worker, by Ray's names.
        strategy: Ray's strategy for the group of the least number: "PACK", "SPREAD" and so on.
    """

    def __init__(self, least: int, most: int, resources: Mapping[str, float], strategy: str):
        bundle = dict(resources)
        self._groups = [placement_group([bundle] * least, strategy=strategy)]
        self._groups += [placement_group([bundle]) for _ in range(most - least)]

    def __enter__(self) -> "Placement":
        return self

    def __exit__(self, *_):
        for group in self._groups:
            remove_placement_group(group)

    def placed(self) -> dict[Slot, str]:
        """Returns the slots that Ray has placed on living nodes, with the nodes' ids."""
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        slots = {}
        for group in self._groups:
            table = placement_group_table(group)
            if table["state"] not in ("CREATED", "RESCHEDULING"):
                continue
            for bundle, node in sorted(table["bundles_to_node_id"].items()):
                if node in living:
                    slots[Slot(group, int(bundle))] = node
        return slots
