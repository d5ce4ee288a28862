"""All flags of all commands, one row each; a flag with two meanings has two rows.

absl's definitions, `--help` and usage errors are generated from these rows.
"""

from tfparallel.bench.sizes import ITEM_BYTES, MIN_WARMUP
from tfparallel.cluster.launcher.supervisor import GRACE_SECONDS
from tfparallel.cluster.launcher_env import parse_nnodes
from tfparallel.collectives import compression_name
from tfparallel.collectives.compression_name import CompressionName
from tfparallel.command_line import words_elsewhere as words
from tfparallel.command_line.flag import Flag
from tfparallel.diagnostics.faults import parse_fault
from tfparallel.layout.layout import RECOMPUTES, SHARED_OUT
from tfparallel.layout.mesh import Mesh
from tfparallel.ray.options import parse_num_workers, parse_resources, parse_storage_path
from tfparallel.replication.sync import option as sync_option
from tfparallel.replication.sync.option import Synchronization
from tfparallel.starter_tasks.kinds import KINDS
from tfparallel.texts import parse_bytes

_IN_PARALLEL = "train, check, bench pipeline_job"
_STAGES = "parallel=pipeline|hybrid|auto"
_ON_KUBERNETES = "emit=kubernetes|jobset|trainjob"
_MATPLOTLIB = ("matplotlib", "'tfparallel[bench]'")
_OF_RECOMPUTES = ("holds the activations", "holds only the inputs", "for all but the last "
    "micro-batch")

# Topics, in the order in which a user decides.
TABLE = {
    "The parallelism": (
        Flag("parallel", _IN_PARALLEL, "How to train the model on several devices.", "data",
            choices={
                "none": "one device, plain Keras",
                "data": "each device of each worker has a copy of the model and a share of the "
                    "batch",
                "model": "each device has some of the layers; the devices run one after the other",
                "tensor": "each device has a part of each large layer",
                "pipeline": "like model, with micro-batches, so that the devices run at the same "
                    "time",
                "hybrid": "replicas of a model that itself spans several devices, see --mesh",
                "auto": "the first choice of `tfparallel plan`, measured here",
            }, choices_elsewhere=words.PARALLELISMS),
        Flag("parallel", "plan", "What to plan.", "auto",
            choices={
                "auto": "every mesh of the devices, best first",
                "model": "how many devices the model needs, and which layers go where",
                "pipeline": "what each device does when, with micro-batches",
            }, choices_elsewhere=dict.fromkeys(("data", "hybrid", "tensor"), "auto")),
        Flag("parallel", "init", "The parallelism in the file's example commands; the file itself "
            "works with all.",
            choices={
                "none": "one device",
                "data": "replicas of the model, on two devices",
                "model": "layers on two devices",
                "tensor": "layers split over two devices",
                "pipeline": "layers on two devices, with micro-batches",
            }, if_absent="data"),
        Flag("mesh", _IN_PARALLEL, "For hybrid: the number of devices along each mesh axis (data, "
            "pipeline, tensor, sequence).", shown="data=2,pipeline=2", read=Mesh.parse,
            only_with="parallel=hybrid"),
        Flag("num_trials", f"{_IN_PARALLEL}, plan", "For auto: briefly train each of the plan's "
            "first N meshes on a batch of the task's data, and choose the fastest.", 0, "whole",
            least=0, only_with="parallel=auto"),
    ),
    "Devices": (
        Flag("num_devices", _IN_PARALLEL, "Number of devices; the CPU is split as needed.",
            kind="whole", least=1),
        Flag("num_devices", "plan", "Number of devices available.", 1, "whole",
            least=1),
        Flag("num_devices", "bench", "Ranks in one process; the CPU is split as needed.",
            kind="whole", least=2),
        Flag("num_devices", "bench pipeline", "Numbers of stages to measure; each stage is a "
            "process.", ["2"], "list"),
        Flag("devices", _IN_PARALLEL, "Devices by name, such as GPU:0,GPU:2.", kind="list",
            shown="GPU:0,GPU:1"),
        Flag("device_type", f"{_IN_PARALLEL}, bench", "Which devices to count.", "auto",
            choices=("auto", "cpu", "gpu")),
        Flag("split_gpu", _IN_PARALLEL, "Split this machine's only GPU into --num_devices logical "
            "devices (default: 2), to try things out.", False, "switch"),
    ),
    "Workers": (
        Flag("nproc_per_node", "launch", "Workers on this host: a number; gpu, one per GPU; cpu, "
            "one per core; auto, one per GPU if there is one, else one per core.", "1", "workers"),
        Flag("nproc_per_node", "bench", "Start this many processes, one rank each.", kind="whole",
            least=2),
        Flag("nproc_per_node", "bench train", "Numbers of workers to measure, all on this host.",
            ["1", "2"], "list"),
        Flag("num_workers", _IN_PARALLEL, "Start this many workers on this host.", kind="whole",
            least=1, only_with="parallel=data|model|pipeline|hybrid"),
        Flag("num_ps", "launch", "For --sync=async: number of parameter servers. They are started "
            "beside the workers, as is a chief, which runs the program and assigns its batches.",
            kind="whole", least=1),
        Flag("strategy", _IN_PARALLEL, "For data: which devices take part.", "auto",
            choices={
                "auto": "all workers, if this process is one of several; else its devices",
                "mirrored": "the devices of this process",
                "multi_worker": "all workers of the job",
            }, choices_elsewhere=words.STRATEGIES, only_with="parallel=data"),
        Flag("allow_independent_workers", _IN_PARALLEL, "Let each worker of a job train its own "
            "model.", False, "switch"),
        Flag("independent", "launch", "Let each worker train a model alone.", False, "switch"),
        Flag("transport", "launch", "How tensors travel between workers, unless the program "
            "chooses with --all_reduce. Default: MPI between the CPUs of one host if it is "
            "installed, else TensorFlow.",
            choices={
                "tensorflow": "gRPC between CPUs, NCCL between GPUs",
                "mpi": "needs tfparallel[mpi], but not mpiexec",
            }),
        Flag("bind_cores", "launch", "Bind each worker to its share of the CPU cores (Linux). Use "
            "it if this job has the host to itself.", False, "switch"),
        Flag("start_timeout", _IN_PARALLEL, "Seconds to wait for the other workers.", 120.0, "real",
            above=0),
        Flag("start_timeout", "launch", "Seconds to wait for the other hosts.", 120.0, "real",
            above=0),
        Flag("stall_timeout", _IN_PARALLEL, "Seconds that a step, or the pause between two steps, "
            "may last before the worker exits.", 1800.0, "real", above=0),
    ),
    "Multiple hosts": (
        Flag("on", "launch", "Where the workers run. Default: on this host.",
            choices={"ray": "on the running Ray cluster (RAY_ADDRESS)"},
            needs_package=("ray", "'tfparallel[ray]'")),
        Flag("num_workers", "launch", "With --on=ray: number of workers. MIN:MAX makes the job "
            "elastic: it continues when a node is lost, and grows when one arrives.",
            read=parse_num_workers, shown="N|MIN:MAX", only_with="on=ray"),
        Flag("resources_per_worker", "launch", "With --on=ray: what Ray reserves for each worker. "
            "Default: one CPU.", read=parse_resources, shown="CPU=4,GPU=1", only_with="on=ray"),
        Flag("storage_path", "launch", "With --on=ray: the folder of the checkpoints, which every "
            "node must see before the workers start.", read=parse_storage_path, shown="PATH",
            only_with="on=ray"),
        Flag("nnodes", "launch", "Number of hosts of the job, which share a secret, "
            "TFPARALLEL_JOB_TOKEN.", "1", read=parse_nnodes, shown="N"),
        Flag("node_rank", "launch", "This host's index, from 0; with --nnodes. Default: the index "
            "set by Slurm (SLURM_NODEID) or by an indexed Job of Kubernetes "
            "(JOB_COMPLETION_INDEX).", kind="whole"),
        Flag("rdzv_endpoint", "launch", "host:port on node 0, the same on every host; with "
            "--nnodes.", shown="HOST:PORT"),
        Flag("local_addr", "launch", "The address at which other hosts reach this one; with "
            "--nnodes. Default: the source address of its connections. Node 0 listens on it.",
            shown="ADDRESS"),
    ),
    "Failures and logs": (
        Flag("max_restarts", "launch", "How often to restart all workers when one fails. With "
            "--emit=jobset or trainjob, how often to recreate all pods (default 3).", 0, "whole",
            least=0),
        Flag("standby", "launch", "Keep a standby process with TensorFlow loaded for each worker, "
            "to restart in 2 s instead of 5, for 0.3 GB of memory each. Your own script must "
            "import tfparallel first, and must not set environment variables for TensorFlow "
            "afterwards.", False, "switch"),
        Flag("grace_seconds", "launch", "Seconds between a signal to stop the workers and SIGKILL; "
            "at most one second if another worker failed.", GRACE_SECONDS, "real", least=0),
        Flag("log_dir", "launch", "Write each worker's full output to this folder.", shown="DIR"),
    ),
    "Training": (
        Flag("prove", "check", "Do not train: prove from the model's operations that it treats "
            "each example independently, and print where the batch's rows are in each layer's "
            "output.", False, "switch"),
        Flag("epochs", "train", "Number of passes over the data. Default: EPOCHS in the task file, "
            "or else 1.", kind="whole", least=1),
        Flag("steps_per_epoch", "train", "Batches per epoch. Default: one pass over the data.",
            kind="whole", least=1),
        Flag("steps", "check", "Number of training steps.", 20, "whole", least=1),
        Flag("steps", "bench pipeline", "Timed steps per configuration.", 20, "whole", least=1),
        Flag("steps", "bench pipeline_job", "Timed steps.", 20, "whole", least=1),
        Flag("steps", "bench train", "Steps per run.", 100, "whole", least=10),
        Flag("global_batch_size", f"{_IN_PARALLEL}, plan, bench pipeline, bench train", "Examples "
            "per step, over all devices.", 64, "whole",
            least=1),
        Flag("seed", _IN_PARALLEL, "Fixes the initial weights and the order of the data.", 0,
            "whole", least=0, most=2**32 - 1),
        Flag("callbacks", "train", "Whether to use the Keras callbacks that callbacks() in the "
            "task file returns. Default: yes, if it is defined. Checkpoints do not contain the "
            "state of callbacks.", kind="switch"),
        Flag("stop_on_nan", "train", "Stop with exit code 1 when the loss is NaN; otherwise warn.",
            False, "switch"),
    ),
    "Precision and compilation": (
        Flag("precision", "train, check", "The dtype policy. Default: Keras's global policy, "
            "float32 unless set.",
            choices={
                "float32": "everything in 32 bits",
                "float64": "everything in 64 bits; the most sensitive setting for `check`",
                "mixed_float16": "compute in 16 bits, weights in 32, with loss scaling",
                "mixed_bfloat16": "compute in 16 bits with the range of float32, weights in 32",
            }, also=("dtype",), choices_elsewhere=words.PRECISIONS),
        Flag("jit_compile", "train, check", "Whether XLA compiles each device's computation. "
            "Default: as in the task file's `compile`. Not with --sync=async.", kind="switch"),
    ),
    "Gradient reduction and synchronization": (
        Flag("all_reduce", _IN_PARALLEL, "For data: the algorithm that sums gradients, by name "
            "(`tfparallel bench all_reduce` lists those available here), or auto for the fastest "
            "by measurement. Default: TensorFlow's. Between workers: ring, ring_tuned, nccl, mpi "
            "or one of MPI's algorithms.", shown="NAME", only_with="parallel=data|hybrid"),
        Flag("all_reduce", "bench train", "The algorithm that sums gradients, as for train.",
            shown="NAME"),
        Flag("calibrate", _IN_PARALLEL, "For --all_reduce=auto: measure at the first step if there "
            "is no saved profile.", True, "switch", only_with="all_reduce=auto"),
        Flag("bucket_bytes", _IN_PARALLEL, "Between workers: sum gradients in buckets of this "
            "size, such as 4MiB, while the rest is still being computed. Default: all at once.",
            shown="SIZE", read=parse_bytes),
        Flag("compression", _IN_PARALLEL, "Between workers: send gradients in fewer bytes, which "
            f"is not exact: {compression_name.FORMS}.", shown="HOW", read=CompressionName.parse),
        Flag("sync", _IN_PARALLEL, "When weights are updated, and workers synchronize: "
            f"{sync_option.FORMS}. Default: every_step. All but every_step, accumulate and "
            "adascale need several workers, and are not exact; async needs `tfparallel launch "
            "--num_ps=1`. pipeline and hybrid support only every_step and accumulate:N.",
            shown="WHEN", read=Synchronization.parse),
        Flag("shard", _IN_PARALLEL, "What to shard over the replicas: optimizer state, or also the "
            "weights and all gradients. For data also: gradients accumulated by "
            "--sync=accumulate:N.", choices=list(SHARED_OUT), choices_elsewhere=words.SHARDS,
            only_with="parallel=data|hybrid"),
    ),
    "Stages and micro-batches": (
        Flag("num_micro_batches", f"{_IN_PARALLEL}, plan", "For pipeline: micro-batches per batch "
            "(default: 8). For hybrid: micro-batches per replica (default: 4, if the mesh has a "
            "pipeline).", kind="whole", least=1, only_with=_STAGES),
        Flag("num_micro_batches", "bench pipeline", "Numbers of micro-batches to measure.",
            ["2", "4", "8"], "list"),
        Flag("schedule", f"{_IN_PARALLEL}, plan", "For pipeline and hybrid: the order in which "
            "each device runs its passes.",
            choices={
                "gpipe": "all forward passes, then all backward passes; supports any loss",
                "1f1b": "alternating forward and backward passes; holds fewer activations",
                "interleaved": "1F1B with several stages per device",
            }, if_absent="1f1b", only_with=_STAGES),
        Flag("schedule", "bench pipeline", "Schedules to measure: gpipe, 1f1b, interleaved.",
            ["gpipe", "1f1b"], "list"),
        Flag("chunks_per_device", f"{_IN_PARALLEL}, plan", "For interleaved: stages per device. "
            "Default: 2.", kind="whole", only_with="schedule=interleaved"),
        Flag("recompute", f"{_IN_PARALLEL}, plan", "For pipeline: whether the backward pass "
            "recomputes the forward pass.",
            choices=dict(zip(RECOMPUTES, _OF_RECOMPUTES, strict=True)), if_absent="never",
            only_with=_STAGES),
        Flag("recompute", "bench pipeline", "Values to measure: never, always, except_last.",
            ["never"], "list"),
        Flag("batch_normalization", f"{_IN_PARALLEL}, plan", "For pipeline: normalize each "
            "micro-batch by its own statistics, and update the moving averages once per step. "
            "Without this flag, batch normalization raises an error.", choices=("deferred",),
            only_with=_STAGES),
        Flag("batch_normalization", "bench pipeline", "As for train.", choices=("deferred",)),
        Flag("balance", f"{_IN_PARALLEL}, plan", "For model, pipeline and hybrid: what to balance "
            "over the devices. Default: memory for model, time for pipeline and hybrid.",
            choices={
                "memory": "bytes held by each stage",
                "time": "seconds of each stage, measured first",
                "both": "the larger of the two shares",
            }, only_with="parallel=model|pipeline|hybrid|auto"),
        Flag("device_memory", f"{_IN_PARALLEL}, plan", "The memory limit, such as 16GiB: per stage "
            "for model, pipeline and hybrid; per device for auto. Default: no limit.", shown="SIZE",
            read=parse_bytes, only_with="parallel=model|pipeline|hybrid|auto"),
    ),
    "Split layers": (
        Flag("convolutions", _IN_PARALLEL, "For tensor: how to split convolutions.",
            "channels",
            choices={
                "channels": "channels, and with them the weights",
                "height": "rows of the image",
            }, only_with="parallel=tensor"),
    ),
    "Task file": (
        Flag("kind", "init", "What the model predicts.",
            choices={name: kind.predicts for name, kind in KINDS.items()},
            choices_elsewhere=words.PREDICTED),
        Flag("data", "init", "sample, or a file: .npz with arrays x and y, .csv with a header "
            "line, .txt for text. Default: sample.", shown="sample|FILE"),
        Flag("target", "init", "For .csv: the column to predict. Default: the last; for series, "
            "the first."),
        Flag("force", "init", "Overwrite an existing file.", False, "switch"),
    ),
    "Cluster": (
        Flag("ranks", "plan all_reduce", "Number of ranks.", kind="whole"),
        Flag("local_ranks", "plan all_reduce", "Ranks per host. Default: all.", kind="whole"),
        Flag("latency_us", "plan all_reduce", "Latency of a message between hosts, in "
            "microseconds.", 10.0, "real", above=0),
        Flag("bandwidth", "plan all_reduce", "Bandwidth of a rank's link to other hosts, in GB/s.",
            25.0, "real", above=0),
        Flag("local_latency_us", "plan all_reduce", "The same within a host.", 3.0, "real", above=0,
            only_with="local_ranks"),
        Flag("local_bandwidth", "plan all_reduce", "The same within a host.", 200.0, "real",
            above=0, only_with="local_ranks"),
        Flag("add_bandwidth", "plan all_reduce", "Speed at which a rank adds, in GB/s.", 500.0,
            "real", above=0),
        Flag("sweep", "plan all_reduce", "Use the cost model fitted by `tfparallel bench … "
            "--report`.", shown="FILE.json"),
    ),
    "Measurements": (
        Flag("algorithms", "bench", "Algorithms to measure, by name.", ["all"], "list"),
        Flag("dtype", "bench", "Type of the elements.", "float32", choices=tuple(ITEM_BYTES),
            choices_elsewhere=words.DTYPES),
        Flag("min_bytes", "bench, plan all_reduce", "The smallest size; K, M and G are powers of "
            "1024.", "4K", shown="SIZE"),
        Flag("max_bytes", "bench", "The largest size.", "16M", shown="SIZE"),
        Flag("max_bytes", "plan all_reduce", "The largest size.", "256M", shown="SIZE"),
        Flag("step_factor", "bench", "Each size is this many times the last.", 4, "whole"),
        Flag("step_factor", "plan all_reduce", "Each size is this many times the last.", 16,
            "whole"),
        Flag("unalign", "bench", "Also measure each size with this many elements more, in each "
            "part, off the boundaries of cache lines and packets.", 0, "whole", least=0),
        Flag("iters", "bench", "Timed calls of each algorithm at each size.", 20, "whole", least=1),
        Flag("warmup_iters", "bench", "Calls before the timed ones.", MIN_WARMUP, "whole",
            least=MIN_WARMUP),
        Flag("link_gbits", "bench train", "Bandwidth of the link between hosts, in Gbit/s, for the "
            "verdict.", kind="real", above=0),
    ),
    "Checks": (
        Flag("quick", "doctor", "Skip the checks that take several seconds each.", False, "switch"),
        Flag("suggest", "doctor", "Instead, print the command to use on this machine, and why.",
            False, "switch"),
        Flag("upstream", "doctor", "Also test TensorFlow's own strategy on two workers; takes "
            "about ten seconds.", False, "switch"),
        Flag("min_free_mib", "doctor", "Free disk space that the job needs, in MiB; less counts as "
            "broken.", kind="real", least=0),
        Flag("peer_timeout", "doctor", "Seconds to wait for another worker's answer.", 3.0, "real",
            above=0),
        Flag("probe_timeout", "doctor", "Time limit of each trial, in seconds.", 120.0, "real",
            above=0),
    ),
    "Output files": (
        Flag("save", "train", "Save the model to this file (.keras).", shown="FILE.keras",
            ending=".keras"),
        Flag("checkpoint_dir", "train", "Save a checkpoint to this folder after each epoch, and "
            "resume from it.", shown="DIR"),
        Flag("checkpoint_dir", "doctor", "Where checkpoints will be saved. Default: the current "
            "folder.", shown="DIR"),
        Flag("checkpoint_every_steps", "train", "Also save a checkpoint every N steps; with "
            "--checkpoint_dir.", kind="whole", least=1, only_with="checkpoint_dir"),
        Flag("tensorboard", "train", "Write each epoch's losses and metrics to this folder, for "
            "`tensorboard --logdir=DIR`.", shown="DIR",
            needs_package=("tensorboard", "tensorboard")),
        Flag("report", f"{_IN_PARALLEL}, plan, plan all_reduce, doctor", "Write a report to this "
            "file (.json).", shown="FILE.json", ending=".json"),
        Flag("report", "bench, bench pipeline, bench train", "Write all figures to this file "
            "(.json).", shown="FILE.json", also=("json",), ending=".json"),
        Flag("csv", "bench", "Write the rows to this file (.csv).", shown="FILE.csv",
            ending=".csv"),
        Flag("plot", "check", "Plot the difference and the rounding floor at each step (.png).",
            shown="FILE.png", ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench", "Plot time and bus bandwidth (.png).", shown="FILE.png",
            ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench pipeline", "Plot the step times (.png).", shown="FILE.png",
            ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench train", "Plot the time split of a step, and the scaling (.png).",
            shown="FILE.png", ending=".png", needs_package=_MATPLOTLIB),
        Flag("draw", "plan", "For pipeline: draw the schedule (.png or .txt).", shown="FILE.png",
            ending=".png or .txt", only_with="parallel=pipeline"),
        Flag("trace", "train", "Write a timeline of all workers' last steps (.json), for "
            "chrome://tracing or ui.perfetto.dev: input, forward, backward, each reduction, "
            "update.", shown="FILE.json", ending=".json"),
        Flag("trace", "plan", "For pipeline: write the schedule as a trace for chrome://tracing "
            "(.json).", shown="FILE.json", ending=".json", only_with="parallel=pipeline"),
        Flag("output", "trace", "Write the timeline to this file (.json), for chrome://tracing or "
            "ui.perfetto.dev.", shown="FILE.json", ending=".json"),
        Flag("save_profile", "bench", "Save the sweep for --all_reduce=auto, for this host and "
            "these ranks and versions.", False, "switch"),
    ),
    "Job files": (
        Flag("emit", "launch", "Only print a file that submits this job. The default of "
            "--grace_seconds is then 60.",
            choices={
                "slurm": "a script for sbatch",
                "kubernetes": "a Service and an indexed Job for kubectl",
                "jobset": "a JobSet for kubectl",
                "trainjob": "a TrainingRuntime and a TrainJob of Kubeflow Trainer, for kubectl",
            }, choices_elsewhere=words.EMITTED),
        Flag("job_name", "launch", "The job's name, the same on all its hosts; hosts of another "
            "job are rejected. Default: the program's name.", shown="NAME"),
        Flag("gpus_per_node", "launch", "With --emit: GPUs per host.", 0, "whole",
            only_with="emit"),
        Flag("sbatch_args", "launch", "With --emit=slurm: an option for sbatch, such as "
            "--sbatch_args=--partition=long; repeatable.", [], "repeated", shown="OPTION",
            only_with="emit=slurm"),
        Flag("image", "launch", "On Kubernetes: the container image, which contains the program "
            "and tfparallel.", shown="IMAGE", only_with=_ON_KUBERNETES),
        Flag("volume", "launch", "On Kubernetes: CLAIM:/PATH, a persistent volume claim and its "
            "mount path in the pods, for example for checkpoints.", shown="CLAIM:/PATH",
            only_with=_ON_KUBERNETES),
        Flag("queue", "launch", "On Kubernetes: Kueue's LocalQueue, which admits the job.",
            shown="NAME", only_with=_ON_KUBERNETES),
    ),
    "Fault injection": (
        Flag("inject", "train", "Inject one fault into a worker: kill:worker=1,step=20, "
            "hang:worker=0,step=5, exit:worker=1,step=3,code=5, preempt:worker=1,step=20, "
            "slow:worker=1,ms=50, or corrupt_checkpoint:worker=0,step=20.", shown="FAULT",
            read=parse_fault),
        Flag("inject", "bench train", "Inject a fault into runs of several workers, as for train.",
            shown="FAULT", read=parse_fault),
    ),
}


def flags_of(command: str) -> dict[str, Flag]:
    """Returns the flags of a command by name, in the order of the topics."""
    return {
        flag.name: flag
        for rows in TABLE.values()
        for flag in rows
        if command in flag.commands.split(", ")
    }
