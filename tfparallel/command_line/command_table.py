"""All commands: their summaries, arguments and modules.

Their flags are in `flag_table.TABLE`.
"""

import dataclasses

from tfparallel.bench.sizes import COLLECTIVES

__all__ = ["COMMANDS", "Command"]


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
        "Writes a task file: a small model, how it is compiled, and its data, a sample or a file "
        "of your own. It runs at once with `tfparallel train`. At a terminal, what no flag says is "
        "asked.",
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
        "batches, and compares every variable, beside what rounding alone makes of the model. Exit "
        "code 1 if one differs.",
        "tfparallel check models/digits_cnn.py --parallel=data --num_devices=3 --steps=20",
        "check",
        rules="command_line.contradictions:check",
        loads_tensorflow=True,
        workers="num_workers",
    ),
    "plan": Command(
        "Ranks every mesh of so many devices by its predicted step, with the memory of a device, "
        "and names the command for the first. Without --num_trials nothing is trained, and the "
        "model is never held whole.",
        "tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
        "plan",
        rules="command_line.contradictions:plan",
        loads_tensorflow=True,
    ),
    "plan all_reduce": Command(
        "Predicts the time of every all-reduce algorithm at any size and number of ranks, by "
        "formula and by a simulated cluster; says from which size on which is the fastest. Ranks "
        "of a host share a fast wire, each has a slow one of its own to other hosts.",
        "tfparallel plan all_reduce --ranks=4096 --local_ranks=8",
        "plan_all_reduce",
        "[--flags]",
        rules="commands.plan_all_reduce:problems",
    ),
    "launch": Command(
        "Starts the workers of a job on this host, shows their output line by line, and stops all "
        "when one fails. Each worker finds its place in TF_CONFIG and in torchrun's variables.",
        "tfparallel launch --nproc_per_node=2 -- "
        "tfparallel train models/digits_cnn.py --parallel=data --epochs=3",
        "launch",
        "[--flags] -- PROGRAM [ARGUMENTS]",
        rules="commands.launch:problems",
    ),
    "trace": Command(
        "Reads the flight records of a job's workers: what each did last, which one the others "
        "waited for, and where the time of a step goes. Writes a timeline of all on one clock.",
        "tfparallel trace logs --output=trace.json",
        "trace",
        "FOLDER [--flags]",
        rules="commands.trace:problems",
    ),
    "doctor": Command(
        "Looks at versions, devices, the cluster that the environment names, ports, peers, disk, "
        "memory and cores, starts TensorFlow and two workers, and says first whether training "
        "works here; known faults of TensorFlow's own strategies come last. Exit code 1 if "
        "something is broken.",
        "tfparallel doctor --checkpoint_dir=ckpt --report=doctor.json",
        "doctor",
        "[--flags]",
    ),
    "bench": Command(
        "Measures every algorithm of a collective at every size, interleaved, and checks every "
        "element. With a task file: at the sizes of the model's gradients, with advice. "
        "`tfparallel bench train TASK.py` measures how a training scales over workers, and "
        "`tfparallel bench pipeline TASK.py` stages and micro-batches; they have flags of their "
        "own.",
        "tfparallel bench all_reduce --num_devices=4 --min_bytes=4K --max_bytes=16M "
        "--report=a.json --plot=a.png",
        "bench",
        f"{'|'.join(COLLECTIVES)} [TASK.py] [--flags]",
        rules="command_line.contradictions:bench",
        loads_tensorflow=True,
        workers="nproc_per_node",
    ),
    "bench pipeline": Command(
        "Measures a task's step for each number of stages, of micro-batches and schedule: each "
        "stage is a process on a core of its own. Beside each the step that the schedule should "
        "take with the stages' measured times, and the bubble; and plain Keras in one process on "
        "one core.",
        "tfparallel bench pipeline models/transformer.py --num_devices=2 "
        "--num_micro_batches=2,4,8 --schedule=gpipe,1f1b --report=pipeline.json "
        "--plot=pipeline.png",
        "bench_pipeline",
        rules="command_line.contradictions:bench_pipeline",
    ),
    "bench train": Command(
        "Trains a task for some steps on each number of workers, all with the same threads each: "
        "with the same batch in all (strong scaling), and with the same rows a worker (weak). Says "
        "where the time of a step goes, and what holds it up.",
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
