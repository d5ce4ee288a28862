"""Words of other tools, which usage errors translate."""

__all__ = ["PARALLELISMS", "PRECISIONS", "PROCESSES"]

PROCESSES = ("n", "np", "nproc", "nprocs", "num_processes", "workers")  # In other tools.

# Terms of PyTorch users and of papers.
PARALLELISMS = {
    "ddp": "data", "dp": "data", "mirrored": "data", "horovod": "data", "pp": "pipeline",
    "tp": "tensor", "3d": "hybrid", "mesh": "hybrid", "single": "none",
    **dict.fromkeys(("sequence", "sp", "context", "cp"), "hybrid --mesh=sequence=2"),
    **dict.fromkeys(("fsdp", "zero3"), "data --shard=parameters"),
    **dict.fromkeys(("zero", "zero1", "zero2"), "data --shard=optimizer"),
}  # fmt: skip
PRECISIONS = {
    "16": "mixed_float16", "bf16": "mixed_bfloat16", "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16", "fp16": "mixed_float16", "fp32": "float32", "fp64": "float64",
    "half": "mixed_float16", "mixed": "mixed_float16",
}  # fmt: skip
