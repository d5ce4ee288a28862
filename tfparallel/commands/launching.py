"""The body of `tfparallel launch`: runs the workers until the job succeeds or gives up."""

import contextlib
import glob
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from tfparallel.chatter import has_nvidia_gpu, wants_quiet
from tfparallel.cluster.address import split_address
from tfparallel.cluster.differences import name_workers
from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.cluster.job_files import job_name_of
from tfparallel.cluster.launcher.back_off import RestartBackOff
from tfparallel.cluster.launcher.local_workers import (
    host_programs,
    meet_alone,
    programs_with_servers,
)
from tfparallel.cluster.launcher.output import Prefixer, WorkerLog
from tfparallel.cluster.launcher.output_filter import OutputFilter
from tfparallel.cluster.launcher.supervisor import Job, Program, StopRequest
from tfparallel.cluster.launcher.warm_spares import WarmSpares
from tfparallel.cluster.launcher_env import node_rank_of
from tfparallel.cluster.listener import LISTEN_ADDR
from tfparallel.cluster.own_folder import OwnFolder
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN
from tfparallel.cluster.rendezvous import Rendezvous, meet
from tfparallel.cluster.trained_alone import trained_alone, watched
from tfparallel.cluster.worker_error import WORKER_ERROR
from tfparallel.cluster.worker_exit import Outcome
from tfparallel.flight.culprit import lost_by, waited_for, with_errors
from tfparallel.flight.record import FOLDER, SUFFIX
from tfparallel.texts import counted

TOKEN = "TFPARALLEL_JOB_TOKEN"
# Between two attempts; also at most half of the time that other hosts wait for this one.
_MOST_WAIT_SECONDS = 60.0


def launched(values: flags.FlagValues, command: Sequence[str], nnodes: int) -> int:
    """Runs the workers of this host, and returns the exit code of `launch`.

    Args:
        values: The validated flags.
        command: The command of each worker.
        nnodes: The number of hosts.

    Raises:
        RuntimeError: If the hosts cannot meet.
        StopRequest: On a signal.
    """
    environment = dict(os.environ)
    environment[WORKER_ERROR] = "1"
    if values.transport is not None:
        environment[ALL_REDUCE] = values.transport
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(OwnFolder("tfparallel_flight_"))
        folder = environment.get(FOLDER) or os.path.abspath(values.log_dir or temporary.path)
        environment[FOLDER] = folder
        watches = os.path.join(temporary.path, "python")
        if not values.independent and values.num_ps is None:
            environment = watched(watches, environment)
        code = 1
        try:
            ready = WarmSpares(tell=say) if values.standby else contextlib.nullcontext()
            with ready as standbys:
                code = _run_with_restarts(values, command, nnodes, environment, standbys)
            if not code and os.path.isdir(watches):
                code = _joined(trained_alone(watches), nnodes)
            return code
        except StopRequest as request:
            code = 0 if request.has_saved else 1
            raise
        finally:
            shutil.rmtree(watches, ignore_errors=True)
            if code and any(glob.iglob(os.path.join(folder, f"*{SUFFIX}"))):
                say(f"what each worker did last: tfparallel trace {folder}")
                if folder == temporary.path:
                    temporary.keep()


def _joined(alone: Sequence[int], nnodes: int) -> int:
    """Reports workers that trained alone, and returns the exit code."""
    # The others may wait for a single one. On several hosts, each launcher sees its own workers.
    if len(alone) < 2 and (nnodes == 1 or alone in ([], [0])):
        return 0
    say(
        f"{name_workers(alone)} never joined the job. All workers must train one model together. "
        f"Received: {counted(len(alone), 'model')}, each trained by one worker alone. Workers join "
        "when their program calls `tfparallel.data_parallel(model)` or another function for "
        "parallel models, or creates a multi-worker strategy of `tf.distribute`: wrap the model, "
        "`model = tfparallel.data_parallel(model)`. If you want separate trainings, add "
        "--independent."
    )
    return 1


def _run_with_restarts(values, command, nnodes, environment, standbys):
    back_off = RestartBackOff(min(_MOST_WAIT_SECONDS, values.start_timeout / 2))
    outcome = None
    for attempt in range(values.max_restarts + 1):
        if standbys is not None and attempt == values.max_restarts:
            standbys.stop_preparing()
        between = _between_attempts(outcome)
        outcome = _run_once(values, command, nnodes, attempt, environment, standbys, between)
        if outcome.departure is not None:
            # The others cannot meet again without it.
            _report(outcome.departure.describe(), outcome)
            has_saved = all(exit_.returncode == TRY_AGAIN for exit_ in outcome.exits)
            return TRY_AGAIN if has_saved else outcome.departure.exit_code
        if outcome.culprit is None:
            return 0
        _report(outcome.culprit.explain(), outcome)
        if attempt < values.max_restarts:
            seconds = back_off.failed(outcome.culprit.time_seconds)
            when = f" in {seconds:g} s" if seconds else ""
            say(f"restarting all workers{when} ({attempt + 1} of {values.max_restarts})")
            with _between_attempts(outcome):
                time.sleep(seconds)
    return outcome.culprit.exit_code


@contextlib.contextmanager
def _between_attempts(outcome: Outcome | None):
    """No worker runs in the block; those that ended with TRY_AGAIN before have saved their state.

    Args:
        outcome: That of the last attempt, if there was one.
    """
    try:
        yield
    except StopRequest as request:
        can_go_on = outcome is not None and outcome.culprit.returncode == TRY_AGAIN
        request.has_saved |= can_go_on and request.signum in SIGNALS
        raise


def _run_once(values, command, nnodes, attempt, environment, standbys, between):
    if values.num_ps is not None:
        programs = programs_with_servers(
            command,
            environment,
            num_workers=values.nproc_per_node,
            num_servers=values.num_ps,
            restart_count=attempt,
        )
        return _run(values, programs, attempt)
    with between:
        meeting = _meet(values, command, nnodes, attempt)
    with meeting.news:
        programs = _programs(values, command, meeting, environment, attempt)
        return _run(values, programs, attempt, meeting, standbys)


def _meet(values, command, nnodes, attempt):
    if nnodes == 1:
        return meet_alone(values.nproc_per_node)
    *ports, master_port = free_ports(values.nproc_per_node + 1)
    return meet(
        values.rdzv_endpoint,
        nnodes=nnodes,
        node_rank=node_rank_of(values.node_rank, nnodes),
        ports=ports,
        master_port=master_port,
        attempt=attempt,
        token=os.environ[TOKEN],
        job=values.job_name or job_name_of(command),
        local_address=values.local_addr,
        timeout_seconds=values.start_timeout,
    )


def _programs(
    values: flags.FlagValues,
    command: Sequence[str],
    meeting: Rendezvous,
    environment: Mapping[str, str],
    attempt: int,
) -> list[Program]:
    programs = host_programs(
        meeting, command, environment, restart_count=attempt, bind_cores=values.bind_cores
    )
    listens_on = programs[0].environment.get(LISTEN_ADDR)
    if LISTEN_ADDR not in environment and listens_on is not None:
        host, _ = split_address(meeting.addresses[meeting.node][0])
        say(
            f"{host} is not an address of this host, so probably a gateway's; listening on "
            f"{listens_on}"
        )
    return programs


def _run(
    values,
    programs,
    attempt,
    meeting: Rendezvous | None = None,
    standbys: WarmSpares | None = None,
) -> Outcome:
    names = {program.worker: program.name for program in programs if program.name}
    screen = Prefixer(sys.stdout.buffer, sys.stderr.buffer, names)
    began, folder = time.time(), programs[0].environment[FOLDER]
    with contextlib.ExitStack() as stack:
        output_filter = OutputFilter(
            screen.write,
            _log_writer(values, programs, attempt, stack),
            has_gpu=has_nvidia_gpu(),
            is_quiet=wants_quiet(),
        )
        job = Job(
            programs,
            on_output=output_filter.write,
            grace_seconds=values.grace_seconds,
            news=None if meeting is None else meeting.news,
            on_lost=lambda exit_: say(
                f"{exit_.describe()}; the job continues with the remaining workers"
            ),
            lost_by=lambda worker: lost_by(worker, folder, attempt, began),
            standbys=standbys,
        )
        outcome = job.wait()
        output_filter.finish()
        screen.finish()
    why = waited_for(outcome, folder, attempt, began)
    if why:
        say(why)
    return with_errors(outcome, output_filter.errors, values.log_dir)


def _log_writer(
    values: flags.FlagValues,
    programs: Sequence[Program],
    attempt: int,
    stack: contextlib.ExitStack,
) -> Callable[[int, bytes], None]:
    """Returns a function that writes each worker's output to its log, if --log_dir is given."""
    if values.log_dir is None:
        return lambda worker, text: None

    has_reported = False

    def tell(error: OSError) -> None:
        nonlocal has_reported
        if not has_reported:
            say(f"the logs in --log_dir={values.log_dir} are incomplete ({error.strerror})")
        has_reported = True

    suffix = f".restart_{attempt}" if attempt else ""
    logs = {}
    for program in programs:
        name = program.name.replace(" ", "_") or f"worker_{program.worker}"
        path = os.path.join(values.log_dir, f"{name}{suffix}.log")
        logs[program.worker] = stack.enter_context(WorkerLog(path, tell))
    return lambda worker, text: logs[worker].write(text)


def _report(cause: str, outcome: Outcome) -> None:
    say(cause)
    stopped = [exit_.name or str(exit_.worker) for exit_ in outcome.exits if exit_.stopped]
    if stopped and any(exit_.name for exit_ in outcome.exits):
        say(f"stopped {', '.join(stopped)}")
    elif stopped:
        say(f"stopped worker{'s' * (len(stopped) > 1)} {', '.join(stopped)}")


def say(text: str) -> None:
    """Prints a message of the launcher."""
    with contextlib.suppress(BrokenPipeError):
        print(f"tfparallel launch: {text}", file=sys.stderr, flush=True)
