"""The body of `tfparallel launch`: runs rounds of workers until the job succeeds or gives up."""

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
from tfparallel.cluster.back_off import RestartBackOff
from tfparallel.cluster.differences import name_workers
from tfparallel.cluster.elastic import ElasticMeetings, JobEndedError
from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.cluster.job_files import job_name_of
from tfparallel.cluster.launcher_env import NodeRange, node_rank_of, without_counts
from tfparallel.cluster.listener import LISTEN_ADDR
from tfparallel.cluster.local_workers import host_programs, meet_alone, programs_with_servers
from tfparallel.cluster.output import Prefixer, WorkerLog
from tfparallel.cluster.output_filter import OutputFilter
from tfparallel.cluster.own_folder import OwnFolder
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN
from tfparallel.cluster.rendezvous import Rendezvous, meet
from tfparallel.cluster.supervisor import Job, Program, StopRequest
from tfparallel.cluster.trained_alone import trained_alone, watched
from tfparallel.cluster.warm_spares import WarmSpares
from tfparallel.cluster.worker_error import WORKER_ERROR
from tfparallel.cluster.worker_exit import Outcome
from tfparallel.flight.culprit import has_lost_another, lost_by, waited_for, with_errors
from tfparallel.flight.record import FOLDER, SUFFIX
from tfparallel.texts import counted

__all__ = ["TOKEN", "launched", "say"]

TOKEN = "TFPARALLEL_JOB_TOKEN"
_USAGE_EXIT_CODE = 2
# Between two attempts; also at most half of the time that other hosts wait for this one.
_MOST_WAIT_SECONDS = 60.0


def launched(values: flags.FlagValues, command: Sequence[str], nodes: NodeRange) -> int:
    """Runs the workers of this host, and returns the exit code of `launch`.

    Args:
        values: The validated flags.
        command: The command of each worker.
        nodes: The number of hosts.

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
                start = _run_elastic if nodes.is_elastic else _run_with_restarts
                code = start(values, command, nodes, environment, standbys)
            if not code and os.path.isdir(watches):
                code = _joined(trained_alone(watches), nodes)
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


def _joined(alone: Sequence[int], nodes: NodeRange) -> int:
    """Reports workers that trained alone, and returns the exit code."""
    # The others may wait for a single one. On several hosts, each launcher sees its own workers.
    if len(alone) < 2 and (nodes.are_one or alone in ([], [0])):
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


def _run_with_restarts(values, command, nodes, environment, standbys):
    back_off = RestartBackOff(min(_MOST_WAIT_SECONDS, values.start_timeout / 2))
    for attempt in range(values.max_restarts + 1):
        if standbys is not None and attempt == values.max_restarts:
            standbys.stop_preparing()
        outcome = _run_once(values, command, nodes, attempt, environment, standbys)
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
            try:
                time.sleep(seconds)
            except StopRequest as request:
                # No worker is running, and workers that end with this code have saved their state.
                can_go_on = outcome.culprit.returncode == TRY_AGAIN
                request.has_saved |= can_go_on and request.signum in SIGNALS
                raise
    return outcome.culprit.exit_code


def _run_once(values, command, nodes, attempt, environment, standbys):
    if values.num_ps is not None:
        programs = programs_with_servers(
            command,
            environment,
            num_workers=values.nproc_per_node,
            num_servers=values.num_ps,
            restart_count=attempt,
        )
        return _run(values, programs, attempt)
    meeting = _meet(values, command, nodes, attempt)
    with meeting.news:
        programs = _programs(values, command, meeting, environment, attempt)
        return _run(values, programs, attempt, meeting, standbys)


def _run_elastic(values, command, nodes, environment, standbys):
    environment = without_counts(environment)
    meetings = ElasticMeetings(
        values.rdzv_endpoint.split(","),
        min_nodes=nodes.minimum,
        max_nodes=nodes.maximum,
        node_rank=node_rank_of(values.node_rank, nodes),
        token=os.environ[TOKEN],
        job=values.job_name or job_name_of(command),
        timeout_seconds=values.start_timeout,
        local_address=values.local_addr,
    )
    patience = _Patience(values, nodes, environment)
    back_off = RestartBackOff(min(_MOST_WAIT_SECONDS, values.start_timeout / 2))
    seconds = 0.0
    if standbys is not None:
        alone = meet_alone(values.nproc_per_node)
        standbys.prepare_now(_programs(values, command, alone, environment, 0))
    with meetings:
        while True:
            try:
                if seconds:
                    say(f"the next round begins in {seconds:g} s")
                    time.sleep(seconds)
                meeting = _next_round(values, meetings)
            except JobEndedError:
                say("the job has ended")
                return 0
            except StopRequest as request:
                # Between two rounds, the state of the last one has been saved.
                request.has_saved |= patience.num_nodes > 0 and request.signum in SIGNALS
                raise
            with meeting.news as news:
                patience.begin(news)
                programs = _programs(values, command, meeting, environment, meeting.attempt)
                outcome = _run(values, programs, meeting.attempt, meeting, standbys)
                if not (outcome.culprit or outcome.departure or outcome.has_newcomer):
                    meetings.end()
                    return 0
                _delay_newcomers(outcome, meetings, news)
                code = _report_change(outcome, news)
                if code is None:
                    code = patience.end(outcome.culprit, meeting)
                if code is not None:
                    return code
                seconds = 0.0
                if outcome.culprit is not None and news.node == 0:  # The others wait for it.
                    seconds = back_off.failed(outcome.culprit.time_seconds)
                news.tell_coming_again()


def _delay_newcomers(outcome, meetings, news):
    """Makes joining hosts wait, if the round failed at a host that had just joined."""
    node, departure = None, outcome.departure
    if outcome.culprit is not None:
        node = news.node if outcome.culprit.node is None else outcome.culprit.node
    elif departure is not None and departure.signum is None:
        node = departure.node
    seconds = 0.0 if node is None else meetings.note_failure(node)
    if seconds:
        say(f"node {node} had just joined; new hosts must wait {seconds:g} s")


def _next_round(values, meetings):
    *ports, master_port = free_ports(values.nproc_per_node + 1)
    meeting = meetings.meet(ports, master_port)
    num_nodes = meeting.news.num_nodes
    say(f"round {meeting.attempt}: node {meeting.node} of {counted(num_nodes, 'host')}")
    return meeting


class _Patience:
    """Counts the failures of this host's workers, and decides whether the job continues.

    Attributes:
        num_nodes: The number of hosts in the last round; 0 before the first.
    """

    def __init__(self, values, nodes, environment):
        self._values, self._nodes, self._environment = values, nodes, environment
        self._num_failures, self._tries_again = 0, False
        self._began = time.time()
        self.num_nodes = 0

    def begin(self, news):
        """Records the start of a round."""
        # When a host is stopped, its workers take down those of all other hosts. But if all hosts
        # are back, the workers failed on their own, and may do so once more.
        self._tries_again &= news.num_nodes == self.num_nodes
        self.num_nodes = news.num_nodes
        news.leaves_on_failure = self._num_failures == self._values.max_restarts

    def end(self, culprit, meeting) -> int | None:
        """Returns this launcher's exit code if it, or the whole job, ends with this round."""
        news = meeting.news
        if culprit is not None and culprit.node is None and news.departure is None:
            folder = self._environment[FOLDER]
            lost = has_lost_another(culprit, folder, meeting.attempt, self._began)
            tries_again = culprit.returncode == TRY_AGAIN or lost
            self._num_failures += self._tries_again or not tries_again
            self._tries_again = tries_again
        if self._num_failures > self._values.max_restarts:
            say("this host leaves the job")
            return culprit.exit_code
        leaving = _leaving(culprit, news)
        news.gone |= leaving
        num_left = news.num_nodes - len(news.gone)
        if leaving and num_left < self._nodes.minimum:
            say(
                f"--nnodes={self._values.nnodes}, but only {counted(num_left, 'host')} would be "
                "left"
            )
            return culprit.exit_code
        return None


def _report_change(outcome: Outcome, news) -> int | None:
    """Reports why a round ended; returns the exit code if it was the last."""
    if news.departure is not None:
        _report(f"{news.departure.describe()}; the job continues with the remaining hosts", outcome)
        return None
    if outcome.culprit is None:
        _report("a new host is joining; the workers were asked to save their state", outcome)
        return None
    _report(outcome.culprit.explain(), outcome)
    is_usage = outcome.culprit.returncode == _USAGE_EXIT_CODE
    return _USAGE_EXIT_CODE if is_usage else None


def _leaving(culprit, news):
    """Returns the host that leaves because it has failed too often, if any."""
    if culprit is None or culprit.node not in news.leaving or culprit.returncode == TRY_AGAIN:
        return set()
    return {culprit.node}


def _meet(values, command, nodes, attempt):
    if nodes.are_one:
        return meet_alone(values.nproc_per_node)
    *ports, master_port = free_ports(values.nproc_per_node + 1)
    return meet(
        values.rdzv_endpoint,
        nnodes=nodes.maximum,
        node_rank=node_rank_of(values.node_rank, nodes),
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
