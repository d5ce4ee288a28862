"""Parallel training for TensorFlow and Keras: the weights of one device, from many.

Importing this package loads no TensorFlow, so that programs which only start
other processes stay light; the first public name that needs it does (PEP 562).
"""

import importlib
import os

if os.environ.get("TFPARALLEL_WORKER_ERROR"):  # Only in a worker of `tfparallel launch`.
    # The launcher shows an error that ends all workers once, in a few lines.
    importlib.import_module("tfparallel.cluster.worker_error").tell_launcher()

# A literal: setup.cfg reads it without importing the package.
__version__ = "0.1.0"

# Public name -> (module, attribute); None stands for the module itself.
_FACE = {
    "Cluster": ("tfparallel.cluster.cluster_spec", "Cluster"),
    "MirroredStrategy": ("tfparallel.replication.drop_in_strategies", "MirroredStrategy"),
    "MultiWorkerMirroredStrategy": (
        "tfparallel.replication.drop_in_strategies",
        "MultiWorkerMirroredStrategy",
    ),
    "all_gather": ("tfparallel.collectives.ops", "all_gather"),
    "all_reduce": ("tfparallel.collectives.ops", "all_reduce"),
    "all_to_all": ("tfparallel.collectives.personalized", "all_to_all"),
    "barrier": ("tfparallel.collectives.ops", "barrier"),
    "broadcast": ("tfparallel.collectives.ops", "broadcast"),
    "callbacks": ("tfparallel.callbacks", None),
    "check": ("tfparallel.diagnostics.check_model", "check"),
    "connect_to_cluster": ("tfparallel.placement.processes", "connect_to_cluster"),
    "data": ("tfparallel.data", None),
    "data_parallel": ("tfparallel.replication.data_parallel", "data_parallel"),
    "devices": ("tfparallel.devices", None),
    "distribute": ("tfparallel.hybrid.keras_distribution", "distribute"),
    "distribute_optimizer": ("tfparallel.replication.custom_loop", "distribute_optimizer"),
    "layers": ("tfparallel.layers", None),
    "gather": ("tfparallel.collectives.ops", "gather"),
    "hybrid_parallel": ("tfparallel.hybrid.hybrid_parallel", "hybrid_parallel"),
    "init": ("tfparallel.replication.init", "init"),
    "Mesh": ("tfparallel.layout.mesh", "Mesh"),
    "model_parallel": ("tfparallel.placement.model_parallel", "model_parallel"),
    "new_group": ("tfparallel.collectives.new_group", "new_group"),
    "num_workers": ("tfparallel.collectives.ops", "num_workers"),
    "pipeline_parallel": ("tfparallel.pipeline.pipeline_parallel", "pipeline_parallel"),
    "placement_report": ("tfparallel.placement.report", "placement_report"),
    "ray": ("tfparallel.ray", None),
    "recv": ("tfparallel.collectives.messages", "recv"),
    "reduce": ("tfparallel.collectives.ops", "reduce"),
    "reduce_gradients": ("tfparallel.replication.custom_loop", "reduce_gradients"),
    "reduce_scatter": ("tfparallel.collectives.ops", "reduce_scatter"),
    "scatter": ("tfparallel.collectives.personalized", "scatter"),
    "send": ("tfparallel.collectives.messages", "send"),
    "tensor_parallel": ("tfparallel.layers.tensor_parallel", "tensor_parallel"),
    "spawn": ("tfparallel.cluster.launcher.spawn", "spawn"),
    "worker_index": ("tfparallel.collectives.ops", "worker_index"),
}

# Names in plain Python, which must not make a launcher wait for TensorFlow.
_PLAIN = {"Cluster", "Mesh", "ray", "spawn"}

# Repeated, because editors and linters only read literals.
__all__ = [
    "Cluster",
    "Mesh",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "callbacks",
    "check",
    "connect_to_cluster",
    "data",
    "data_parallel",
    "devices",
    "distribute",
    "distribute_optimizer",
    "gather",
    "hybrid_parallel",
    "init",
    "layers",
    "model_parallel",
    "new_group",
    "num_workers",
    "pipeline_parallel",
    "placement_report",
    "ray",
    "recv",
    "reduce",
    "reduce_gradients",
    "reduce_scatter",
    "scatter",
    "send",
    "spawn",
    "tensor_parallel",
    "worker_index",
]


def __getattr__(name):
    if name not in _FACE:
        raise AttributeError(f"Module 'tfparallel' has no attribute {name!r}. {_offer(name)}")
    if name not in _PLAIN:
        importlib.import_module("tfparallel.startup").prepare()
    module_name, attribute = _FACE[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    # The next access finds the value without this function.
    globals()[name] = value
    return value


def _offer(name):
    """Returns the public name that resembles a misspelt one, or all of them."""
    close_matches = importlib.import_module("difflib").get_close_matches
    plain = {public.lower().replace("_", ""): public for public in _FACE}
    if alike := close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=0.8):
        return f"Did you mean `tfparallel.{plain[alike[0]]}`?"
    return f"It offers: {', '.join(sorted(_FACE))}."


def __dir__():
    return list(__all__)


if os.environ.get("TFPARALLEL_STANDBY"):  # A process that `launch --standby` started in advance.
    importlib.import_module("tfparallel.warm_spare").wait()
