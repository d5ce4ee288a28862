"""All commands: their summaries, arguments and modules.

Their flags are in `flag_table.TABLE`.
"""

import dataclasses

from tfparallel.bench.sizes import COLLECTIVES


@dataclasses.dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        summary: What it does.
        example: A command line to paste.
        module: The module in `commands` whose `run(values, positional)` returns the exit code.
        arguments: The usage after the command's name.
        rules: The function, as "module:name", that returns problems beyond the rows of the flags;
            called with the flags and the positional arguments. Its module imports no TensorFlow.
        loads_tensorflow: Whether the module imports TensorFlow.
        workers: The flag that makes the command start itself as several workers.
    """

    summary: str
    example: str
    module: str
    arguments: str = "TASK.py [--flags]"
    rules: str | None = None
    loads_tensorflow: bool = False
    workers: str | None = None

    @property
    def is_on_task(self) -> bool:
        """Whether its only positional argument is a task file."""
        return self.arguments.startswith("TASK.py")

    @property
    def runs_program(self) -> bool:
        """Whether the arguments after `--` are another program."""
        return "PROGRAM" in self.arguments


COMMANDS = {
    "init": Command(
        "Writes a task file: a small model, how it is compiled, and its data, either a sample or "
        "your own file. You can run it at once with `tfparallel train`. At a terminal, it asks for "
        "settings that no flag gives.",
        "tfparallel init task.py --kind=table --data=measurements.csv",
        "init",
        "[FILE.py] [--flags]",
        rules="commands.init:problems",
    ),
    "train": Command(
        "Trains a task file with the parallelism that --parallel names. Batch sizes are global: "
        "the weights do not depend on the number of devices.",
        "tfparallel train models/digits_cnn.py --parallel=data --num_devices=2 --epochs=3",
        "train",
        rules="command_line.contradictions:train",
        loads_tensorflow=True,
        workers="num_workers",
    ),
    "check": Command(
        "Trains a task file on one device and in parallel, from the same weights on the same "
        "batches, and compares every variable, relative to the effect of rounding alone. Exits "
        "with code 1 if any differs.",
        "tfparallel check models/digits_cnn.py --parallel=data --num_devices=3 --steps=20",
        "check",
        rules="command_line.contradictions:check",
        loads_tensorflow=True,
        workers="num_workers",
    ),
    "plan": Command(
        "Ranks every mesh of the given number of devices by predicted step time, with the memory "
        "per device, and prints the command for the best. Without --num_trials nothing is trained, "
        "and the whole model is never in memory.",
        "tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
        "plan",
        rules="command_line.contradictions:plan",
        loads_tensorflow=True,
    ),
    "plan all_reduce": Command(
        "Predicts the time of every all-reduce algorithm at any size and number of ranks, by "
        "formula and by a simulated cluster; shows which algorithm is fastest from which size on. "
        "Ranks on one host share a fast link; each has its own slow link to other hosts.",
        "tfparallel plan all_reduce --ranks=4096 --local_ranks=8",
        "plan_all_reduce",
        "[--flags]",
        rules="commands.plan_all_reduce:problems",
    ),
    "launch": Command(
        "Starts the workers of a job on this host, or with --on=ray on a Ray cluster, shows their "
        "output line by line, and stops all of them when one fails. Each worker finds its place in "
        "TF_CONFIG and in torchrun's variables.",
        "tfparallel launch --nproc_per_node=2 -- "
        "tfparallel train models/digits_cnn.py --parallel=data --epochs=3",
        "launch",
        "[--flags] -- PROGRAM [ARGUMENTS]",
        rules="commands.launch:problems",
    ),
    "trace": Command(
        "Reads the flight records of a job's workers: what each did last, which one the others "
        "waited for, and where the time of a step goes. Writes a timeline of all workers on one "
        "clock.",
        "tfparallel trace logs --output=trace.json",
        "trace",
        "FOLDER [--flags]",
        rules="commands.trace:problems",
    ),
    "doctor": Command(
        "Checks versions, devices, the cluster named by the environment, ports, peers, disk, "
        "memory and cores; starts TensorFlow and two workers; and reports whether training works "
        "here. Known bugs of TensorFlow's own strategies come last. Exits with code 1 if something "
        "is broken.",
        "tfparallel doctor --checkpoint_dir=ckpt --report=doctor.json",
        "doctor",
        "[--flags]",
    ),
    "bench": Command(
        "Measures every algorithm of a collective at every size, interleaved, and checks every "
        "element. With a task file, measures at the sizes of the model's gradients and recommends "
        "an algorithm. `tfparallel bench train TASK.py` measures scaling over workers, and "
        "`tfparallel bench pipeline TASK.py` stages and micro-batches; both have their own flags.",
        "tfparallel bench all_reduce --num_devices=4 --min_bytes=4K --max_bytes=16M "
        "--report=a.json --plot=a.png",
        "bench",
        f"{'|'.join(COLLECTIVES)} [TASK.py] [--flags]",
        rules="command_line.contradictions:bench",
        loads_tensorflow=True,
        workers="nproc_per_node",
    ),
    "bench pipeline": Command(
        "Measures a task's step time for each number of stages, number of micro-batches and "
        "schedule; each stage is a process on its own core. Also shows the step time that the "
        "schedule predicts from the measured stages, the bubble, and plain Keras in one process on "
        "one core.",
        "tfparallel bench pipeline models/transformer.py --num_devices=2 "
        "--num_micro_batches=2,4,8 --schedule=gpipe,1f1b --report=pipeline.json "
        "--plot=pipeline.png",
        "bench_pipeline",
        rules="command_line.contradictions:bench_pipeline",
    ),
    "bench train": Command(
        "Trains a task for some steps on each number of workers, with the same number of threads "
        "per worker: once with a fixed global batch (strong scaling), and once with a fixed batch "
        "per worker (weak scaling). Shows where the time of a step goes, and what limits it.",
        "tfparallel bench train models/digits_cnn.py --nproc_per_node=1,2 --plot=scaling.png",
        "bench_train",
        rules="command_line.contradictions:bench_train",
    ),
    # Started by `bench pipeline` in separate processes.
    "bench pipeline_job": Command(
        "Measures one pipeline, or plain Keras in one process.",
        "tfparallel bench pipeline models/transformer.py",
        "bench_pipeline_job",
        rules="command_line.contradictions:in_parallel",
        loads_tensorflow=True,
    ),
}
