"""`tfparallel launch [--flags] -- COMMAND`: runs the workers of a job on this host."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence

from absl import flags

from tfparallel import cuda_driver
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.environment import available_cores, core_shares
from tfparallel.cluster.handshake import is_job
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN
from tfparallel.cluster.supervisor import GRACE_SECONDS, StopRequest
from tfparallel.cluster.warm_spares import imports_tfparallel
from tfparallel.commands.emit import emit_flags, emit_problems, emitted
from tfparallel.commands.flags import Command, UsageError, parse_positional, run_command
from tfparallel.commands.help import define_choice
from tfparallel.commands.job_numbers import nodes_of, number_problems
from tfparallel.commands.launching import TOKEN, launched, say

__all__ = ["main"]

_MIN_TOKEN = 16  # Characters; a stranger must not guess it.

_COMMAND = Command(
    name="launch",
    summary="Starts the workers of a job on this host, shows their output line by line, and stops "
    "all when one fails. Each worker finds its place in TF_CONFIG and in torchrun's variables.",
    example="tfparallel launch --nproc_per_node=2 -- "
    "tfparallel train models/digits_cnn.py --parallel=data --epochs=3",
    arguments="[--flags] -- PROGRAM [ARGUMENTS]",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code: the culprit's, or 128 + n after signal n."""
    return run_command("launch", lambda: _main(arguments), ())


class _Number(int):
    """What a word came to on this host; another host may have more."""

    text = ""


class _NumWorkers(flags.ArgumentParser):
    """Reads --nproc_per_node, as torchrun does."""

    syntactic_help = "a number, gpu, cpu or auto"
    placeholder = "N|gpu|cpu|auto"  # In `--help`.

    def parse(self, argument):
        """Returns the number of workers."""
        if str(argument).removeprefix("-").isdecimal():
            return int(argument)
        num_gpus = cuda_driver.num_gpus()
        numbers = {"gpu": num_gpus, "cpu": len(available_cores())}
        numbers["auto"] = num_gpus or numbers["cpu"]
        if argument not in numbers:
            raise ValueError(f"{self.syntactic_help} is required")
        number = _Number(numbers[argument])
        number.text = argument
        return number


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE(
        _NumWorkers(),
        "nproc_per_node",
        "1",
        "Workers on this host: a number, one for each GPU, one for each core, or for each GPU if "
        "there is one and else for each core.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_ps",
        None,
        "For --sync=async: servers that hold the weights. They and a chief, which runs the program "
        "and deals out its batches, are started beside the workers.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "nnodes",
        "1",
        "Hosts of the job, which share a secret, TFPARALLEL_JOB_TOKEN. MIN:MAX for a job that goes "
        "on with fewer when a host is lost, and with more when one comes.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "node_rank",
        None,
        "This host's index, from 0; with --nnodes. Default: what Slurm (SLURM_NODEID) or an "
        "indexed Job of Kubernetes (JOB_COMPLETION_INDEX) says.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "rdzv_endpoint",
        None,
        "host:port on node 0, the same on every host; with --nnodes. With MIN:MAX it may be a list "
        "of them, by commas, of which the next takes over when a host is lost.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "local_addr",
        None,
        "This host's address, as the other hosts reach it; with --nnodes. Default: the one that it "
        "calls from. Node 0 listens on it.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "start_timeout", 120.0, "Seconds to wait for the other hosts.", flag_values=values
    )
    flags.DEFINE_integer(
        "max_restarts",
        0,
        "How often to restart all workers when one fails. With --nnodes=MIN:MAX, of this host's; "
        "the job goes on without it after more.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "standby",
        False,
        "Keep a process with TensorFlow loaded beside each worker, which takes its place in a "
        "restart: in 2 s instead of 5, for 0.3 GB of memory each. A script of your own "
        "must import tfparallel before it does anything else, and must not set variables for "
        "TensorFlow after that.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "grace_seconds",
        GRACE_SECONDS,
        "Seconds that workers have between a signal to stop and SIGKILL; one at most where another "
        "has failed.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "log_dir", None, "Keep each worker's whole output in this folder.", flag_values=values
    )
    define_choice(
        values,
        "transport",
        None,
        {
            "tensorflow": "gRPC between CPUs, NCCL between GPUs",
            "mpi": "needs tfparallel[mpi], and no mpiexec",
        },
        "What carries tensors between workers whose program does not say (--all_reduce). Default: "
        "MPI between CPUs of one host that has it, else TensorFlow.",
    )
    flags.DEFINE_bool(
        "bind_cores",
        False,
        "Bind each worker to its share of the CPU cores (Linux); for a host that runs this job "
        "alone.",
        flag_values=values,
    )
    emit_flags(values)
    return values


def _parse(values: flags.FlagValues, arguments: Sequence[str]) -> list[str] | None:
    """Fills the flags and returns the command behind "--"; None if help was asked for."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    positional = parse_positional(_COMMAND, values, arguments[:separator])
    if positional is None:
        return None
    if positional:
        raise UsageError(
            "The workers' command must follow `--`. "
            f"Received: {positional} before it. Example: {_COMMAND.example}"
        )
    return list(arguments[separator + 1 :])


def _problems(values: flags.FlagValues, command: Sequence[str]) -> list[str]:
    problems = []
    if values.nproc_per_node < 1:
        text = getattr(values.nproc_per_node, "text", values.nproc_per_node)
        here = ", and this host has no GPU" if text == "gpu" else ""
        problems.append(
            f"--nproc_per_node must be at least 1. Received: --nproc_per_node={text}{here}."
        )
    problems += number_problems(values)
    if not 0 <= values.grace_seconds < float("inf"):
        problems.append(
            "--grace_seconds must be a number that is not negative. Received: "
            f"--grace_seconds={values.grace_seconds}."
        )
    problems += _server_problems(values)
    if values.standby and command and not imports_tfparallel(command):
        problems.append(
            "--standby needs a command that imports tfparallel itself: `tfparallel train …`, or "
            "`python SCRIPT` with `import tfparallel` at the top level of the script. Received: "
            f"{' '.join(command)}. Drop --standby, or write such a command."
        )
    try:
        nodes = nodes_of(values)
    except ValueError as error:
        problems.append(str(error))
    else:
        problems += [*_take_node_rank(values, nodes), *_node_problems(values, nodes)]
        problems += _identity_problems(values, nodes)
    if values.bind_cores and values.nproc_per_node >= 1:
        if not hasattr(os, "sched_setaffinity"):
            problems.append("--bind_cores needs Linux. Received: another system. Drop the flag.")
        else:
            with _collecting(problems):
                core_shares(available_cores(), values.nproc_per_node)
    if values.log_dir is not None:
        try:
            os.makedirs(values.log_dir, exist_ok=True)
        except OSError as error:
            problems.append(
                "The folder for the workers' output cannot be made. "
                f"Received: --log_dir={values.log_dir} ({error.strerror})."
            )
        else:
            if not os.access(values.log_dir, os.W_OK | os.X_OK):
                problems.append(
                    "The folder for the workers' output must be writable. "
                    f"Received: --log_dir={values.log_dir}."
                )
    problems += _command_problems(command)
    return problems


def _server_problems(values):
    if values.num_ps is None:
        return []
    if values.num_ps < 1:
        return [f"--num_ps must be at least 1. Received: --num_ps={values.num_ps}."]
    given = [name for name in ("bind_cores", "standby", "transport") if getattr(values, name)]
    if values.nnodes != "1":
        given.append("nnodes")
    return [
        f"--num_ps is for a job on this host, whose processes sum no gradients. Received: --{name} "
        f"with --num_ps={values.num_ps}. Drop --{name}; on several hosts, name all processes in "
        "TF_CONFIG."
        for name in given
    ]


def _take_node_rank(values, nodes) -> list[str]:
    """Fills in this host's index where a scheduler says it; what contradicts that is a problem."""
    if nodes.are_one:
        return []
    for name in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):
        told = os.environ.get(name, "")
        if not told.isdecimal():
            continue
        if values.node_rank is None:
            values.node_rank = int(told)
        elif values.node_rank != int(told):
            return [
                f"--node_rank must be what the scheduler says, {name}={told}. Received: "
                f"--node_rank={values.node_rank}. Leave the flag out."
            ]
        break
    return []


def _node_problems(values, nodes):
    problems = []
    if nodes.are_one:
        if values.node_rank not in (None, 0):
            problems.append(
                "--node_rank must be less than --nnodes. "
                f"Received: --node_rank={values.node_rank}, --nnodes=1."
            )
        elif values.node_rank is not None and values.rdzv_endpoint is None:
            problems.append(
                "--node_rank is for a job on several hosts and needs --nnodes and "
                f"--rdzv_endpoint=HOST:PORT. Received: --node_rank={values.node_rank} alone."
            )
    else:
        needs_rank = values.node_rank is None and not nodes.is_elastic
        if needs_rank or values.rdzv_endpoint is None:
            required = (
                "--rdzv_endpoint=HOST:PORT"
                if nodes.is_elastic
                else ("--node_rank and --rdzv_endpoint=HOST:PORT")
            )
            problems.append(
                f"Several hosts need {required}. Received: "
                f"--nnodes={values.nnodes}, --node_rank={values.node_rank}, "
                f"--rdzv_endpoint={values.rdzv_endpoint}."
            )
        if values.node_rank is not None and not 0 <= values.node_rank < nodes.maximum:
            problems.append(
                f"--node_rank must lie in 0 to {nodes.maximum - 1}. Received: "
                f"--node_rank={values.node_rank}, --nnodes={values.nnodes}."
            )
    if values.rdzv_endpoint is not None:
        endpoints = values.rdzv_endpoint.split(",") if nodes.is_elastic else [values.rdzv_endpoint]
        for endpoint in endpoints:
            with _collecting(problems):
                split_address(endpoint)
    if values.local_addr is not None:
        if nodes.are_one:
            problems.append(
                "--local_addr is for a job on several hosts and needs --nnodes. Received: "
                f"--local_addr={values.local_addr} alone."
            )
        with _collecting(problems):
            split_address(join_address(values.local_addr, 1))
    return problems


def _identity_problems(values, nodes):
    problems = []
    if values.job_name is not None and not is_job(values.job_name):
        problems.append(
            "--job_name must be of at most 64 printable characters of ASCII, without a space. "
            f"Received: --job_name={values.job_name}."
        )
    token = os.environ.get(TOKEN, "")
    if not nodes.are_one and len(token) < _MIN_TOKEN:
        received = f"{len(token)} characters" if token else "none"
        problems.append(
            f"The launchers of several hosts need a secret of at least {_MIN_TOKEN} characters, "
            f"the same on each of them, or strangers could join. Received: {received} in {TOKEN}. "
            f"Make a random one on one host, by `export {TOKEN}=$(openssl rand -hex 16)`, and copy "
            "its value to every other host."
        )
    return problems


def _command_problems(command):
    if not command:
        return [f"A command is required after `--`. Received: none. Example: {_COMMAND.example}"]
    if shutil.which(command[0]) is not None:
        return []
    if os.path.isfile(command[0]):
        hint = f"Use `-- python {command[0]}`." if command[0].endswith(".py") else "Use `chmod +x`."
        return [f"The command must be executable. Received: {command[0]!r}. {hint}"]
    return [f"The command does not exist. Received: {command[0]!r}. Check its path or PATH."]


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        problems.append(str(error))


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    command = _parse(values, arguments)
    if command is None:
        return 0
    if values.emit is not None:
        print(emitted(values, command), end="")
        return 0
    problems = [*emit_problems(values), *_problems(values, command)]
    if problems:
        raise UsageError("\n".join(problems))
    try:
        with _signals_raise():
            return launched(values, command, nodes_of(values))
    except StopRequest as request:
        name = signal.Signals(request.signum).name
        if request.has_saved:
            say(f"stopped by {name}; the workers have saved their state")
            return TRY_AGAIN
        say(f"stopped by {name}")
        return 128 + request.signum
    except BrokenPipeError:
        raise  # Nobody reads the output any more; `run_command` ends quietly.
    except (OSError, RuntimeError) as error:
        say(str(error))
        return 1


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns the signals that end a program into `StopRequest`; one that is ignored stays so.

    After the first of them only Ctrl-C has an effect: the workers have time to save their state.
    """
    is_stopping = False

    def stop(signum, frame):
        nonlocal is_stopping
        if not is_stopping or signum == signal.SIGINT:
            is_stopping = True
            raise StopRequest(signum)

    names = [signal.SIGINT, signal.SIGHUP, *SIGNALS]
    before = {name: signal.getsignal(name) for name in names}
    for name, handler in before.items():
        # `nohup`, or `&` in a script.
        if handler is not signal.SIG_IGN:
            signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
