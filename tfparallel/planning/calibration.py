"""What a mesh adds to a step beside the layers: a tiny model's step beyond its prediction.

Two small layers are trained as they are, on two replicas, on two that share out the optimizer, and
in two stages. The first is what any step takes. What the others take beyond their predictions is
laid to replicas, to the shares of weights, and to the calls of stages.
"""

import dataclasses

from tfparallel.layout.mesh import Mesh
from tfparallel.layout.model_costs import LayerCosts, Line, Machine, ModelCosts
from tfparallel.layout.schedule import make_schedule
from tfparallel.planning.prediction import Pieces, Prediction, predict

__all__ = ["NUM_MICRO_BATCHES", "NUM_ROWS", "NUM_WEIGHTS", "TinySteps", "calibrated"]

NUM_ROWS, NUM_MICRO_BATCHES = 8, 4  # Of the tiny model's batch, and in its stages.
NUM_WEIGHTS = 2  # Of each of its two layers.
_CALL = 1e-3  # Seconds, to see how a step grows with those of a call.


@dataclasses.dataclass(frozen=True)
class TinySteps:
    """Measured steps of the tiny model, in seconds.

    Attributes:
        alone: On one device.
        replicas: On two replicas; None where it was not measured.
        stages: In two stages; likewise.
        shares: On two replicas that share out the optimizer; likewise.
    """

    alone: float
    replicas: float | None = None
    stages: float | None = None
    shares: float | None = None


def calibrated(steps: TinySteps, update: Line, machine: Machine) -> tuple[float, Machine]:
    """Returns what any step takes, and the machine with what replicas, shares and calls take.

    Args:
        steps: What was measured.
        update: As `ModelCosts` has it.
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
