"""Words of other tools, which usage errors translate."""

# Names of flags in torchrun, horovodrun, nccl-tests and training scripts, as flags here: of names
# between bars, the first that the command has; of names after commas, all that it has. A name with
# a value stands for both.
_DEVICES = "num_devices|nproc_per_node"
_WORKERS = "nproc_per_node|num_workers"
FLAGS = {
    "mode": "parallel", "parallelism": "parallel", "tensor": "parallel=tensor",
    **dict.fromkeys(("gpus", "num_gpus", "n", "g", "stages", "num_stages", "world_size"), _DEVICES),
    **dict.fromkeys(("accelerator", "device"), "device_type"),
    **dict.fromkeys(("cuda", "gpu"), "device_type=gpu"), "no_cuda": "device_type=cpu",
    **dict.fromkeys(("gpu_ids", "visible_devices"), "devices"),
    **dict.fromkeys(("distributed", "multi_gpu"), "parallel=data"),
    **dict.fromkeys(("np", "nproc", "nprocs", "num_processes", "workers"), _WORKERS),
    "nproc_per_node": "num_workers", "num_workers": "nproc_per_node",
    **dict.fromkeys(("hosts", "nodes", "num_nodes", "host", "hostfile", "h"), "nnodes"),
    **dict.fromkeys(("master_addr", "master_port"), "rdzv_endpoint"), "rdzv_id": "job_name",
    "backend": "transport|all_reduce",
    **dict.fromkeys(("batch_size", "per_device_batch_size", "bs"), "global_batch_size"),
    **dict.fromkeys(("steps", "max_steps", "num_steps", "train_steps"), "steps_per_epoch|steps"),
    "epochs": "steps", "num_epochs": "epochs", **dict.fromkeys(("output", "o"), "save, report"),
    "output_dir": "checkpoint_dir|log_dir",
    **dict.fromkeys(("ckpt", "resume", "resume_from_checkpoint"), "checkpoint_dir"),
    **dict.fromkeys(("log_dir", "logdir"), "tensorboard"), "json": "report",
    **dict.fromkeys(("mixed_precision", "policy"), "precision"), "memory": "device_memory",
    **dict.fromkeys(("xla", "jit"), "jit_compile"),
    **dict.fromkeys(("accumulate", "gradient_accumulation_steps"), "sync=accumulate:4"),
    **dict.fromkeys(("local_sgd", "diloco", "async", "adascale"), "sync"),
    **dict.fromkeys(("zero", "zero_stage"), "shard"),
    "b": "min_bytes", "e": "max_bytes", "f": "step_factor", "w": "warmup_iters",
    "u": "unalign", "output_file": "report",
}  # fmt: skip

# Flags of other launchers that nothing here needs.
NEEDLESS = ("dist_backend", "dist_url", "local_rank", "rank", "rdzv_backend", "standalone")
NEEDLESS += ("use_env", "verbose")

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
    "half": "mixed_float16", "mixed": "mixed_float16", "amp": "mixed_float16",
}  # fmt: skip
STRATEGIES = {
    "mirroredstrategy": "mirrored", "multiworkermirroredstrategy": "multi_worker",
    "multi_worker_mirrored": "multi_worker", "ddp": "mirrored",
}  # fmt: skip
SHARDS = {
    "zero1": "optimizer", "zero2": "gradients", "grads": "gradients",
    **dict.fromkeys(("zero3", "fsdp", "params", "weights", "true"), "parameters"),
}
DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
EMITTED = {"k8s": "kubernetes", "sbatch": "slurm", "kubeflow": "trainjob"}
PREDICTED = {
    "classification": "image", "regression": "table", "csv": "table", "tabular": "table",
    "nlp": "text", "timeseries": "series", "time_series": "series",
}  # fmt: skip
