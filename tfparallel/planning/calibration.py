"""Calibrates the overhead of a mesh: the step time of a tiny model beyond its prediction.

Two small layers train on one device, on two replicas, on two replicas that shard the optimizer, and
in two stages. The first run gives the overhead of any step. The time of the other runs beyond their
predictions is attributed to replicas, to the shards of weights, and to the calls of stages.
"""

import dataclasses

from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.schedule import make_schedule
from tfparallel.planning.prediction import Pieces, Prediction, predict

NUM_ROWS, NUM_MICRO_BATCHES = 8, 4  # The tiny model's batch size, and micro-batches in stages.
NUM_WEIGHTS = 2  # Per layer; the tiny model has two layers.
_CALL = 1e-3  # Seconds; a probe for how much a step grows with the time of a call.


@dataclasses.dataclass(frozen=True)
class TinySteps:
    """Measured steps of the tiny model, in seconds.

    Attributes:
        alone: On one device.
        replicas: On two replicas; None if not measured.
        stages: In two stages; None if not measured.
        shares: On two replicas that shard the optimizer; None if not measured.
    """

    alone: float
    replicas: float | None = None
    stages: float | None = None
    shares: float | None = None


def calibrated(steps: TinySteps, update: Line, machine: Machine) -> tuple[float, Machine]:
    """Returns the overhead of any step, and the machine with the costs of replicas, shards, calls.

    Args:
        steps: The measurements.
        update: The cost of updates, as in `ModelCosts`.
        machine: What the devices share.
    """
    layers = [LayerCosts(name, Line(), num_trained=NUM_WEIGHTS) for name in ("first", "second")]
    costs = ModelCosts(layers, update=update)
    overhead = max(steps.alone - _tiny(costs, Mesh(), machine).step_seconds, 0.0)
    costs = dataclasses.replace(costs, overhead_seconds=overhead)
    if steps.replicas is not None:
        more = steps.replicas - _tiny(costs, Mesh(data=2), machine).step_seconds
        machine = dataclasses.replace(machine, replica_seconds=max(more, 0.0) / 2)
    if steps.shares is not None:
        more = steps.shares - _tiny(costs, Mesh(data=2), machine, "optimizer").step_seconds
        number = 2 * len(layers) * NUM_WEIGHTS
        machine = dataclasses.replace(machine, share_seconds=max(more, 0.0) / number)
    if steps.stages is not None:
        more = steps.stages - _tiny(costs, Mesh(pipeline=2), machine).step_seconds
        with_calls = dataclasses.replace(machine, call_seconds=_CALL)
        grown = _tiny(costs, Mesh(pipeline=2), with_calls).passes_seconds / _CALL
        machine = dataclasses.replace(machine, call_seconds=max(more, 0.0) / grown)
    return overhead, machine


def _tiny(
    costs: ModelCosts, mesh: Mesh, machine: Machine, shard: str | None = None
) -> Prediction:
    number = NUM_MICRO_BATCHES if mesh.pipeline > 1 else 1
    schedule = make_schedule("1f1b", mesh.pipeline, number)
    counts = [len(costs.layers) // mesh.pipeline] * mesh.pipeline
    return predict(costs, Pieces(mesh, NUM_ROWS, schedule, counts, shard=shard), machine)
