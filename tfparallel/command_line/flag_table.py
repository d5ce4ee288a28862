"""All flags of all commands, one row each; a flag with two meanings has two rows.

absl's definitions, `--help` and usage errors are generated from these rows.
"""

from tfparallel.bench.sizes import ITEM_BYTES, MIN_WARMUP
from tfparallel.cluster.launcher_env import NodeRange
from tfparallel.cluster.supervisor import GRACE_SECONDS
from tfparallel.collectives import compression_name
from tfparallel.collectives.compression_name import CompressionName
from tfparallel.command_line.flag import Flag
from tfparallel.diagnostics.faults import parse_fault
from tfparallel.layout.layout import RECOMPUTES, SHARED_OUT
from tfparallel.layout.mesh import Mesh
from tfparallel.replication import sync_option
from tfparallel.replication.sync_option import Synchronization
from tfparallel.task_files.kinds import KINDS
from tfparallel.texts import parse_bytes

__all__ = ["TABLE", "flags_of"]

_IN_PARALLEL = "train, check, bench pipeline_job"
_STAGES = "parallel=pipeline|hybrid|auto"
_MATPLOTLIB = ("matplotlib", "'tfparallel[bench]'")
_OF_RECOMPUTES = ("holds the activations", "holds inputs alone", "but for the last micro-batch")
_PROCESSES = ("n", "np", "nproc", "nprocs", "num_processes", "workers")  # In other tools.

# Terms of PyTorch users and of papers.
_PARALLELISMS = {
    "ddp": "data", "dp": "data", "mirrored": "data", "horovod": "data", "pp": "pipeline",
    "tp": "tensor", "3d": "hybrid", "mesh": "hybrid", "single": "none",
    **dict.fromkeys(("sequence", "sp", "context", "cp"), "hybrid --mesh=sequence=2"),
    **dict.fromkeys(("fsdp", "zero3"), "data --shard=parameters"),
    **dict.fromkeys(("zero", "zero1", "zero2"), "data --shard=optimizer"),
}  # fmt: skip
_PRECISIONS = {
    "16": "mixed_float16", "bf16": "mixed_bfloat16", "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16", "fp16": "mixed_float16", "fp32": "float32", "fp64": "float64",
    "half": "mixed_float16", "mixed": "mixed_float16",
}  # fmt: skip

# Topics, in the order in which a user decides.
TABLE = {
    "The parallelism": (
        Flag("parallel", _IN_PARALLEL, "How the model is trained on several devices.", "data",
            choices={
                "none": "one device, plain Keras",
                "data": "each device, and each worker, has the model and its share of the batch",
                "model": "each device has some of the layers; they work one after the other",
                "tensor": "each device has a part of each large layer",
                "pipeline": "as model, with micro-batches, so that the devices work at the same "
                "time",
                "hybrid": "replicas of a model that is itself on several devices, as --mesh "
                "says",
                "auto": "what `tfparallel plan` puts first, measured here",
            }, elsewhere=("mode", "parallelism"), choices_elsewhere=_PARALLELISMS),
        Flag("parallel", "plan", "What is planned.", "auto",
            choices={
                "auto": "every mesh of the devices, the best first",
                "model": "how many devices are needed, and which layers go where",
                "pipeline": "what each device does, and when, with micro-batches",
            }, elsewhere=("mode", "parallelism"),
            choices_elsewhere=dict.fromkeys(("data", "hybrid", "tensor"), "auto")),
        Flag("parallel", "init", "The parallelism that the commands in the file name; the file "
            "itself suits all.",
            choices={
                "none": "one device",
                "data": "replicas of the model, on two devices",
                "model": "layers on two devices",
                "tensor": "layers split over two devices",
                "pipeline": "layers on two devices, with micro-batches",
            }, if_absent="data"),
        Flag("mesh", _IN_PARALLEL, "For hybrid: the number of devices along each axis: data, "
            "pipeline, tensor, sequence.", shown="data=2,pipeline=2", read=Mesh.parse,
            only_with="parallel=hybrid"),
        Flag("num_trials", f"{_IN_PARALLEL}, plan", "For auto: train the first N meshes of the "
            "plan for a moment each, on a batch of the task's data, and take the fastest of "
            "them.", 0, "whole", least=0, only_with="parallel=auto"),
    ),
    "Devices": (
        Flag("num_devices", _IN_PARALLEL, "How many devices; the CPU is split as needed.",
            kind="whole", elsewhere=("gpus", "n", "num_gpus"), least=1),
        Flag("num_devices", "plan", "How many devices there are.", 1, "whole",
            elsewhere=("gpus", "n", "num_gpus"), least=1),
        Flag("num_devices", "bench", "Ranks in one process; the CPU is split as needed.",
            kind="whole", elsewhere=("gpus", "n", "num_gpus"), least=2),
        Flag("num_devices", "bench pipeline", "Numbers of stages' processes.", ["2"], "list"),
        Flag("devices", _IN_PARALLEL, "Devices by name, such as GPU:0,GPU:2.", kind="list",
            shown="GPU:0,GPU:1"),
        Flag("device_type", f"{_IN_PARALLEL}, bench", "Which devices to count.", "auto",
            choices=("auto", "cpu", "gpu")),
        Flag("split_gpu", _IN_PARALLEL, "Split this machine's one GPU into --num_devices parts "
            "(2 if absent), to try things out.", False, "switch"),
    ),
    "Workers": (
        Flag("nproc_per_node", "launch", "Workers on this host: a number, one for each GPU, "
            "one for each core, or for each GPU if there is one and else for each core.", "1",
            "workers", elsewhere=("gpus", "num_gpus", *_PROCESSES)),
        Flag("nproc_per_node", "bench", "Start this many processes, a rank each.", kind="whole",
            elsewhere=_PROCESSES, least=2),
        Flag("nproc_per_node", "bench train", "Numbers of workers, each on this host.",
            ["1", "2"], "list", elsewhere=_PROCESSES),
        Flag("num_workers", _IN_PARALLEL, "Start this many workers on this host.", kind="whole",
            elsewhere=("nproc_per_node", *_PROCESSES[1:]), least=1,
            only_with="parallel=data|model|pipeline|hybrid"),
        Flag("num_ps", "launch", "For --sync=async: servers that hold the weights. They and a "
            "chief, which runs the program and deals out its batches, are started beside the "
            "workers.", kind="whole", least=1),
        Flag("strategy", _IN_PARALLEL, "For data: what takes part.", "auto",
            choices={
                "auto": "all workers, if this process is one of several; else its devices",
                "mirrored": "the devices of this process",
                "multi_worker": "all workers of the job",
            }, only_with="parallel=data"),
        Flag("allow_independent_workers", _IN_PARALLEL, "Let each worker of a job train a "
            "model of its own.", False, "switch"),
        Flag("transport", "launch", "What carries tensors between workers whose program does "
            "not say (--all_reduce). Default: MPI between CPUs of one host that has it, else "
            "TensorFlow.",
            choices={
                "tensorflow": "gRPC between CPUs, NCCL between GPUs",
                "mpi": "needs tfparallel[mpi], and no mpiexec",
            }),
        Flag("bind_cores", "launch", "Bind each worker to its share of the CPU cores (Linux); "
            "for a host that runs this job alone.", False, "switch"),
        Flag("start_timeout", _IN_PARALLEL, "Seconds to wait for the other workers.", 120.0,
            "real", above=0),
        Flag("start_timeout", "launch", "Seconds to wait for the other hosts.", 120.0, "real",
            above=0),
        Flag("stall_timeout", _IN_PARALLEL, "Seconds that a step, or the pause between two, "
            "may last before a worker of a job ends.", 1800.0, "real", above=0),
    ),
    "Several hosts": (
        Flag("nnodes", "launch", "Hosts of the job, which share a secret, "
            "TFPARALLEL_JOB_TOKEN. MIN:MAX for a job that goes on with fewer when a host is "
            "lost, and with more when one comes.", "1", read=NodeRange.parse, shown="N|MIN:MAX",
            elsewhere=("hosts", "nodes", "num_nodes")),
        Flag("node_rank", "launch", "This host's index, from 0; with --nnodes. Default: what "
            "Slurm (SLURM_NODEID) or an indexed Job of Kubernetes (JOB_COMPLETION_INDEX) says.",
            kind="whole"),
        Flag("rdzv_endpoint", "launch", "host:port on node 0, the same on every host; with "
            "--nnodes. With MIN:MAX it may be a list of them, by commas, of which the next "
            "takes over when a host is lost.", shown="HOST:PORT",
            elsewhere=("master_addr", "master_port")),
        Flag("local_addr", "launch", "This host's address, as the other hosts reach it; with "
            "--nnodes. Default: the one that it calls from. Node 0 listens on it.",
            shown="ADDRESS"),
    ),
    "When a worker fails, and what is kept": (
        Flag("max_restarts", "launch", "How often to restart all workers when one fails. With "
            "--nnodes=MIN:MAX, of this host's; the job goes on without it after more.", 0,
            "whole", least=0),
        Flag("standby", "launch", "Keep a process with TensorFlow loaded beside each worker, "
            "which takes its place in a restart: in 2 s instead of 5, for 0.3 GB of memory "
            "each. A script of your own must import tfparallel before it does anything else, "
            "and must not set variables for TensorFlow after that.", False, "switch"),
        Flag("grace_seconds", "launch", "Seconds that workers have between a signal to stop "
            "and SIGKILL; one at most where another has failed.", GRACE_SECONDS, "real", least=0),
        Flag("log_dir", "launch", "Keep each worker's whole output in this folder.", shown="DIR",
            elsewhere=("output_dir",)),
    ),
    "Training": (
        Flag("prove", "check", "Train nothing: prove on the operations of the model that it "
            "treats each example by itself, and print where the rows of the batch are in what "
            "each layer makes.", False, "switch"),
        Flag("epochs", "train", "How often the data is passed over. As often as EPOCHS in the "
            "task file says if absent, or once.", kind="whole", least=1),
        Flag("steps_per_epoch", "train", "Batches in an epoch; one pass if absent.",
            kind="whole", elsewhere=("steps",), least=1),
        Flag("steps", "check", "How many steps are trained.", 20, "whole", least=1),
        Flag("steps", "bench pipeline", "Timed steps of each.", 20, "whole", least=1),
        Flag("steps", "bench pipeline_job", "Timed steps.", 20, "whole", least=1),
        Flag("steps", "bench train", "Steps of each run.", 100, "whole", least=10),
        Flag("global_batch_size", f"{_IN_PARALLEL}, plan, bench pipeline, bench train",
            "Examples in a step, over all devices.", 64, "whole",
            elsewhere=("batch_size", "per_device_batch_size"), least=1),
        Flag("seed", _IN_PARALLEL, "Fixes the initial weights and the order of the data.", 0,
            "whole", least=0, most=2**32 - 1),
        Flag("callbacks", "train", "Whether the Keras callbacks that callbacks() in the task "
            "file returns take part. Default: if there is such a function. A checkpoint does "
            "not hold what they remember.", kind="switch"),
        Flag("stop_on_nan", "train", "Stop with exit code 1 when the loss is NaN; otherwise "
            "warn.", False, "switch"),
    ),
    "Numbers and compilation": (
        Flag("precision", "train, check", "The type to compute in. Default: Keras's own, which "
            "is float32 unless set.",
            choices={
                "float32": "all of it in 32 bits",
                "float64": "all of it in 64 bits, where `check` is sharpest",
                "mixed_float16": "computed in 16 bits, weights in 32; the loss is scaled",
                "mixed_bfloat16": "computed in 16 bits of float32's range, weights in 32",
            }, also=("dtype",), choices_elsewhere=_PRECISIONS),
        Flag("jit_compile", "train, check", "Whether XLA compiles what each device computes. "
            "Default: as the task file compiles the model. Not with --sync=async.", kind="switch"),
    ),
    "Sums of gradients, and when weights are updated": (
        Flag("all_reduce", _IN_PARALLEL, "For data: the algorithm that sums gradients, by name "
            "(`tfparallel bench all_reduce` lists those that run here), or auto for the "
            "fastest, measured; TensorFlow's default if absent. Between workers: ring, "
            "ring_tuned, nccl, mpi or one of MPI's algorithms.", shown="NAME",
            only_with="parallel=data|hybrid"),
        Flag("all_reduce", "bench train", "What sums the gradients; as for train.", shown="NAME"),
        Flag("calibrate", _IN_PARALLEL, "For --all_reduce=auto: measure at the first step if "
            "no profile was saved.", True, "switch", only_with="all_reduce=auto"),
        Flag("bucket_bytes", _IN_PARALLEL, "Between workers: sum gradients in pieces of this "
            "size, such as 4MiB, while the rest is computed; all at once if absent.",
            shown="SIZE", read=parse_bytes),
        Flag("compression", _IN_PARALLEL, "Between workers: send gradients in fewer bytes, which "
            f"is not exact: {compression_name.FORMS}.", shown="HOW", read=CompressionName.parse),
        Flag("sync", _IN_PARALLEL, "When the weights are updated, and workers agree: "
            f"{sync_option.FORMS}. Default: every_step. local_sgd, post_local_sgd and async "
            "are for several workers, and not exact; async needs `tfparallel launch --num_ps=1`. "
            "pipeline and hybrid take only every_step and accumulate:N.", shown="WHEN",
            read=Synchronization.parse),
        Flag("shard", _IN_PARALLEL, "What each replica keeps a share of. For data and hybrid: "
            "what the optimizer holds; for data: also the gradients that --sync=accumulate:N adds "
            "up; or the weights and all gradients.",
            choices=list(SHARED_OUT), only_with="parallel=data|hybrid"),
    ),
    "Stages and micro-batches": (
        Flag("num_micro_batches", f"{_IN_PARALLEL}, plan", "For pipeline: parts of a batch, 8 "
            "if absent; for hybrid: of a replica's rows, 4 if absent and the mesh has a "
            "pipeline.", kind="whole", least=1, only_with=_STAGES),
        Flag("num_micro_batches", "bench pipeline", "Numbers of micro-batches.", ["2", "4", "8"],
            "list"),
        Flag("schedule", f"{_IN_PARALLEL}, plan", "For pipeline and hybrid: which device does "
            "what, in which order.",
            choices={
                "gpipe": "all forward passes, then all backward passes; takes any loss",
                "1f1b": "one forward, one backward; holds fewer activations",
                "interleaved": "1F1B with several stages a device",
            }, if_absent="1f1b", only_with=_STAGES),
        Flag("schedule", "bench pipeline", "Of gpipe, 1f1b and interleaved.", ["gpipe", "1f1b"],
            "list"),
        Flag("chunks_per_device", f"{_IN_PARALLEL}, plan", "For interleaved: stages on each "
            "device; 2 if absent.", kind="whole", only_with="schedule=interleaved"),
        Flag("recompute", f"{_IN_PARALLEL}, plan", "For pipeline: whether a backward pass "
            "computes its forward pass again.",
            choices=dict(zip(RECOMPUTES, _OF_RECOMPUTES, strict=True)), if_absent="never",
            only_with=_STAGES),
        Flag("recompute", "bench pipeline", "Of never, always, except_last.", ["never"], "list"),
        Flag("batch_normalization", f"{_IN_PARALLEL}, plan", "For pipeline: normalize each "
            "micro-batch by its own statistics, move the averages once a step. Without the "
            "flag such layers raise an error.", choices=("deferred",), only_with=_STAGES),
        Flag("batch_normalization", "bench pipeline", "As for `train`.", choices=("deferred",)),
        Flag("balance", f"{_IN_PARALLEL}, plan", "For model, pipeline and hybrid: what the "
            "split points between the devices even out. Default: memory for model, time for "
            "pipeline and hybrid.",
            choices={
                "memory": "bytes that a stage holds",
                "time": "seconds of a stage, measured first",
                "both": "the larger of the two shares",
            }, only_with="parallel=model|pipeline|hybrid|auto"),
        Flag("device_memory", f"{_IN_PARALLEL}, plan", "For model, pipeline and hybrid: what a "
            "stage may hold, such as 16GiB; for auto: what any device may. No limit if absent.",
            shown="SIZE", read=parse_bytes, only_with="parallel=model|pipeline|hybrid|auto"),
    ),
    "Split layers": (
        Flag("convolutions", _IN_PARALLEL, "For tensor: what convolutions are split by.",
            "channels",
            choices={
                "channels": "channels, weights and all",
                "height": "rows of the image",
            }, only_with="parallel=tensor"),
    ),
    "The task": (
        Flag("kind", "init", "What the model predicts.",
            choices={name: kind.predicts for name, kind in KINDS.items()}),
        Flag("data", "init", "sample, or a file: .npz with arrays x and y, .csv with a line of "
            "names, .txt for text. Default: sample.", shown="sample|FILE"),
        Flag("target", "init", "For .csv: the column to predict. Default: the last; for series "
            "the first."),
        Flag("force", "init", "Write over a file that is there.", False, "switch"),
    ),
    "The cluster": (
        Flag("ranks", "plan all_reduce", "How many ranks there are.", kind="whole"),
        Flag("local_ranks", "plan all_reduce", "How many share a host; all if absent.",
            kind="whole"),
        Flag("latency_us", "plan all_reduce", "Microseconds a message takes between hosts.",
            10.0, "real", above=0),
        Flag("bandwidth", "plan all_reduce", "GB/s of a rank's wire between hosts.", 25.0,
            "real", above=0),
        Flag("local_latency_us", "plan all_reduce", "The same within a host.", 3.0, "real",
            above=0, only_with="local_ranks"),
        Flag("local_bandwidth", "plan all_reduce", "The same within a host.", 200.0, "real",
            above=0, only_with="local_ranks"),
        Flag("add_bandwidth", "plan all_reduce", "GB/s that a rank adds.", 500.0, "real", above=0),
        Flag("sweep", "plan all_reduce", "Take the numbers that a `bench … --report` fitted.",
            shown="FILE.json"),
    ),
    "What is measured": (
        Flag("algorithms", "bench", "Which, by name.", ["all"], "list"),
        Flag("dtype", "bench", "Type of the elements.", "float32", choices=tuple(ITEM_BYTES)),
        Flag("min_bytes", "bench, plan all_reduce",
            "The smallest size; K, M and G are powers of 1024.", "4K", shown="SIZE"),
        Flag("max_bytes", "bench", "The largest size.", "16M", shown="SIZE"),
        Flag("max_bytes", "plan all_reduce", "The largest size.", "256M", shown="SIZE"),
        Flag("step_factor", "bench", "Each size is this many times the last.", 4, "whole"),
        Flag("step_factor", "plan all_reduce", "Each size is this many times the last.", 16,
            "whole"),
        Flag("iters", "bench", "Timed calls of each algorithm at each size.", 20, "whole",
            least=1),
        Flag("warmup_iters", "bench", "Calls before the timed ones.", MIN_WARMUP, "whole",
            least=MIN_WARMUP),
        Flag("link_gbits", "bench train", "What the link between the workers' hosts carries, "
            "in Gbit/s, for the verdict.", kind="real", above=0),
    ),
    "What is examined": (
        Flag("quick", "doctor", "Leave out what is tried for seconds each.", False, "switch"),
        Flag("suggest", "doctor", "Print the command for this machine instead, with the reason "
            "in a line.", False, "switch"),
        Flag("upstream", "doctor", "Try TensorFlow's own strategy on two workers, too; some "
            "ten seconds.", False, "switch"),
        Flag("min_free_mib", "doctor", "Free disk that the job needs, in MiB; less is broken.",
            kind="real", least=0),
        Flag("peer_timeout", "doctor", "Seconds that another worker may take to answer.", 3.0,
            "real", above=0),
        Flag("probe_timeout", "doctor", "Seconds that each trial may take.", 120.0, "real",
            above=0),
    ),
    "Files to write": (
        Flag("save", "train", "Write the model here (.keras).", shown="FILE.keras",
            elsewhere=("output",), ending=".keras"),
        Flag("checkpoint_dir", "train", "Write the state here after each epoch, and resume "
            "from it.", shown="DIR", elsewhere=("output_dir",)),
        Flag("checkpoint_dir", "doctor", "Where checkpoints will go; else the folder here.",
            shown="DIR"),
        Flag("checkpoint_every_steps", "train", "Write the state after this many steps, too; "
            "with --checkpoint_dir.", kind="whole", least=1, only_with="checkpoint_dir"),
        Flag("tensorboard", "train", "Write losses and metrics of each epoch here, for "
            "`tensorboard --logdir=DIR`.", shown="DIR",
            needs_package=("tensorboard", "tensorboard")),
        Flag("report", f"{_IN_PARALLEL}, plan, plan all_reduce, doctor",
            "Write a report here (.json).", shown="FILE.json", elsewhere=("output",),
            ending=".json"),
        Flag("report", "bench, bench pipeline, bench train", "Write all figures here (.json).",
            shown="FILE.json", also=("json",), elsewhere=("output",), ending=".json"),
        Flag("csv", "bench", "Write the rows here (.csv).", shown="FILE.csv", ending=".csv"),
        Flag("plot", "check", "Draw how the difference and the rounding floor grow, step by "
            "step (.png).", shown="FILE.png", ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench", "Draw time and bus bandwidth here (.png).", shown="FILE.png",
            ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench pipeline", "Draw the steps here (.png).", shown="FILE.png",
            ending=".png", needs_package=_MATPLOTLIB),
        Flag("plot", "bench train", "Draw the split of a step, and the scaling (.png).",
            shown="FILE.png", ending=".png", needs_package=_MATPLOTLIB),
        Flag("draw", "plan", "For pipeline: draw the schedule here (.png or .txt).",
            shown="FILE.png", ending=".png or .txt", only_with="parallel=pipeline"),
        Flag("trace", "train", "Write a timeline of all workers' last steps here (.json), for "
            "chrome://tracing or ui.perfetto.dev: input, forward, backward, each reduction, "
            "update.", shown="FILE.json", ending=".json"),
        Flag("trace", "plan", "For pipeline: write it as a trace for chrome://tracing here "
            "(.json).", shown="FILE.json", ending=".json", only_with="parallel=pipeline"),
        Flag("output", "trace", "Where to write the timeline, which chrome://tracing and "
            "ui.perfetto.dev show (.json).", shown="FILE.json", ending=".json"),
        Flag("save_profile", "bench", "Keep the sweep for --all_reduce=auto, under this host, "
            "these ranks and versions.", False, "switch"),
    ),
    "Job files": (
        Flag("emit", "launch", "Print the file that submits this job, and start nothing. "
            "--grace_seconds is then 60 unless given.",
            choices={
                "slurm": "a script for sbatch",
                "kubernetes": "a Service and an indexed Job for kubectl",
            }),
        Flag("job_name", "launch", "The job's name, the same on all of its hosts; they refuse "
            "those of another job. Default: the program's.", shown="NAME"),
        Flag("gpus_per_node", "launch", "With --emit: GPUs of each host.", 0, "whole",
            only_with="emit"),
        Flag("sbatch_args", "launch", "With --emit=slurm: an option for sbatch, such as "
            "--sbatch_args=--partition=long; repeatable.", [], "repeated", shown="OPTION",
            only_with="emit=slurm"),
        Flag("image", "launch", "With --emit=kubernetes: the container image, with the program "
            "and tfparallel in it.", shown="IMAGE", only_with="emit=kubernetes"),
        Flag("volume", "launch", "With --emit=kubernetes: CLAIM:/PATH, a persistent volume "
            "claim and where pods see it. Checkpoints belong there.", shown="CLAIM:/PATH",
            only_with="emit=kubernetes"),
    ),
    "Tests of failures": (
        Flag("inject", "train", "Have a fault strike a worker, once: kill:worker=1,step=20, "
            "hang:worker=0,step=5, exit:worker=1,step=3,code=5, preempt:worker=1,step=20, "
            "slow:worker=1,ms=50, or corrupt_checkpoint:worker=0,step=20.", shown="FAULT",
            read=parse_fault),
        Flag("inject", "bench train", "A fault for runs of several workers; as for train.",
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
