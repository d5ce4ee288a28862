"""`tfparallel launch [--flags] -- COMMAND`: runs the workers of a job, on this host or on Ray."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence

from absl import flags

from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.environment import available_cores, core_shares
from tfparallel.cluster.job_files import JobFile, job_name_of, slurm_script
from tfparallel.cluster.kubernetes_files import RESTARTED_BY_JOBSET, kubernetes_objects
from tfparallel.cluster.launcher.supervisor import StopRequest
from tfparallel.cluster.launcher.warm_spares import imports_tfparallel
from tfparallel.cluster.launcher_env import node_rank_of, parse_nnodes
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN
from tfparallel.cluster.wire import is_word
from tfparallel.commands.launching import TOKEN, launched, say
from tfparallel.commands.launching_on_ray import launched_on_ray

_NO_COMMAND = (
    "A command is required after `--`. Received: none. Example: tfparallel launch "
    "--nproc_per_node=2 -- python my_script.py"
)
_GRACE_OF_A_SCHEDULER = 60.0  # Schedulers allow minutes, and a save may take one.
_RESTARTS_OF_A_JOBSET = 3
_START_OF_PODS = 600.0  # Seconds; some must still be scheduled, and pull their image.
# Flags that are passed to the launcher of each host.
_HANDED_ON = (
    *("nproc_per_node", "independent", "max_restarts", "standby", "start_timeout"),
    *("log_dir", "transport"),
)
_MIN_TOKEN = 16  # Characters; must be hard to guess.


def run(values: flags.FlagValues, command: Sequence[str]) -> int:
    """Starts the workers, or prints the job's file.

    Returns:
        The exit code: the culprit's, or 128 + n after signal n.
    """
    if values.emit is not None:
        print(_job_file(values, command, parse_nnodes(values.nnodes)), end="")
        return 0
    try:
        if values.on == "ray":
            return launched_on_ray(values, command)
        with _signals_raise():
            return launched(values, command, parse_nnodes(values.nnodes))
    except StopRequest as request:
        name = signal.Signals(request.signum).name
        if request.has_saved:
            say(f"stopped by {name}; the workers saved their state")
            return TRY_AGAIN
        say(f"stopped by {name}")
        return 128 + request.signum
    except BrokenPipeError:
        raise  # The output's reader has gone; `run_command` ends quietly.
    except (OSError, RuntimeError) as error:
        say(str(error))
        return 1


def _job_file(values: flags.FlagValues, command: Sequence[str], nnodes: int) -> str:
    """Returns the job file."""
    # Keep words such as "gpu": the submitting host may have other devices.
    forwarded = {
        name: getattr(values[name].value, "text", values[name].value)
        for name in _HANDED_ON
        if values[name].present
    }
    if values.emit != "slurm":
        forwarded.setdefault("start_timeout", _START_OF_PODS)
    max_restarts = _RESTARTS_OF_A_JOBSET
    if values.emit in RESTARTED_BY_JOBSET:
        max_restarts = forwarded.pop("max_restarts", max_restarts)
    grace = values.grace_seconds if values["grace_seconds"].present else _GRACE_OF_A_SCHEDULER
    job = JobFile(
        name=values.job_name or job_name_of(command),
        command=command,
        launch_flags=[f"--{name}={value}" for name, value in forwarded.items()],
        nnodes=nnodes,
        grace_seconds=grace,
        gpus_per_node=values.gpus_per_node,
        sbatch_args=values.sbatch_args,
        image=values.image,
        volume=values.volume,
        queue=values.queue,
        max_restarts=max_restarts,
    )
    return slurm_script(job) if values.emit == "slurm" else kubernetes_objects(job, values.emit)


def problems(values: flags.FlagValues, command: Sequence[str]) -> list[str]:
    """Returns the problems of the flags, and of the command after `--`."""
    problems = _common_problems(values)
    if values.emit is not None:
        if not command:
            problems.append(_NO_COMMAND)
        else:
            with _collect_problems(problems):
                _job_file(values, command, _nnodes(values) or 1)
        return problems
    if values.on is not None and values.num_workers is None:
        problems.append(
            f"--on={values.on} needs the number of workers. Received: no --num_workers. Add "
            "--num_workers=2, or MIN:MAX."
        )
    if values.standby and command and not imports_tfparallel(command):
        problems.append(
            "--standby needs a command that imports tfparallel itself: `tfparallel train …`, or "
            "`python SCRIPT` with `import tfparallel` at the top level of the script. Received: "
            f"{' '.join(command)}. Drop --standby, or write such a command."
        )
    if (nnodes := _nnodes(values)) is not None:
        with _collect_problems(problems):
            problems += _node_problems(values, nnodes, node_rank_of(values.node_rank, nnodes))
        problems += _identity_problems(values, nnodes)
    if values.bind_cores and values.nproc_per_node >= 1:
        if not hasattr(os, "sched_setaffinity"):
            problems.append("--bind_cores needs Linux. Received: another system. Drop the flag.")
        else:
            with _collect_problems(problems):
                core_shares(available_cores(), values.nproc_per_node)
    if values.log_dir is not None:
        try:
            os.makedirs(values.log_dir, exist_ok=True)
        except OSError as error:
            problems.append(
                "The folder for the workers' output cannot be created. Received: "
                f"--log_dir={values.log_dir} ({error.strerror})."
            )
        else:
            if not os.access(values.log_dir, os.W_OK | os.X_OK):
                problems.append(
                    "The folder for the workers' output must be writable. "
                    f"Received: --log_dir={values.log_dir}."
                )
    problems += _command_problems(command)
    return problems


def _nnodes(values: flags.FlagValues) -> int | None:
    """Parses --nnodes; None if it is invalid, which the flag's row reports."""
    with contextlib.suppress(ValueError):
        return parse_nnodes(values.nnodes)
    return None


def _common_problems(values: flags.FlagValues) -> list[str]:
    """Returns the problems of flags that apply with and without --emit."""
    problems = []
    number = values.nproc_per_node
    text = getattr(number, "text", number)
    if number < 1 and not (values.emit and text != number):  # A word is resolved on each host.
        no_gpu = ", and this host has no GPU" if text == "gpu" else ""
        problems.append(
            f"--nproc_per_node must be at least 1. Received: --nproc_per_node={text}{no_gpu}."
        )
    if values.standby and not values.max_restarts:
        problems.append(
            "--standby is only for a job that may restart. Received: --standby without "
            "--max_restarts. Add --max_restarts=3, or drop --standby."
        )
    return problems


def _node_problems(values, nnodes, rank):
    problems = []
    if nnodes == 1:
        if rank not in (None, 0):
            problems.append(
                f"--node_rank must be less than --nnodes. Received: --node_rank={rank}, --nnodes=1."
            )
        elif rank is not None and values.rdzv_endpoint is None:
            problems.append(
                "--node_rank is for a job on several hosts and needs --nnodes and "
                f"--rdzv_endpoint=HOST:PORT. Received: --node_rank={rank} alone."
            )
    else:
        if rank is None or values.rdzv_endpoint is None:
            problems.append(
                "Several hosts need --node_rank and --rdzv_endpoint=HOST:PORT. Received: "
                f"--nnodes={nnodes}, --node_rank={rank}, --rdzv_endpoint={values.rdzv_endpoint}."
            )
        if rank is not None and not 0 <= rank < nnodes:
            problems.append(
                f"--node_rank must be from 0 to {nnodes - 1}. Received: --node_rank={rank}, "
                f"--nnodes={nnodes}."
            )
    if values.rdzv_endpoint is not None:
        with _collect_problems(problems):
            split_address(values.rdzv_endpoint)
    if values.local_addr is not None:
        if nnodes == 1:
            problems.append(
                "--local_addr is for a job on several hosts and needs --nnodes. Received: "
                f"--local_addr={values.local_addr} alone."
            )
        with _collect_problems(problems):
            split_address(join_address(values.local_addr, 1))
    return problems


def _identity_problems(values, nnodes):
    problems = []
    if values.job_name is not None and not is_word(values.job_name):
        problems.append(
            "--job_name must have at most 64 printable ASCII characters and no spaces. Received: "
            f"--job_name={values.job_name}."
        )
    token = os.environ.get(TOKEN, "")
    if nnodes > 1 and len(token) < _MIN_TOKEN:
        received = f"{len(token)} characters" if token else "none"
        problems.append(
            "The launchers of a job on several hosts need a shared secret of at least "
            f"{_MIN_TOKEN} characters, so that nobody else can join. Received: {received} in "
            f"{TOKEN}. Generate one on one host with `export {TOKEN}=$(openssl rand -hex 16)`, and "
            "copy its value to every other host."
        )
    return problems


def _command_problems(command):
    if not command:
        return [_NO_COMMAND]
    if shutil.which(command[0]) is not None:
        return []
    if os.path.isfile(command[0]):
        hint = f"Use `-- python {command[0]}`." if command[0].endswith(".py") else "Use `chmod +x`."
        return [f"The command must be executable. Received: {command[0]!r}. {hint}"]
    return [f"The command does not exist. Received: {command[0]!r}. Check its path or PATH."]


@contextlib.contextmanager
def _collect_problems(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        problems.append(str(error))


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns termination signals into `StopRequest`; ignored signals stay ignored.

    After the first signal only Ctrl-C has an effect: the workers need time to save their state.
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
        # Ignored under `nohup`, or with `&` in a script.
        if handler is not signal.SIG_IGN:
            signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
