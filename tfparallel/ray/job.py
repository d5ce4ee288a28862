"""A job on Ray: attempts of its workers, until one succeeds or the job gives up.

    place and start the actors ──> attempt on as many workers as there is room for
        ▲                             │ a worker fails, an actor or a node is lost: restart
        └─────────────────────────────┤ a node arrives: save, and continue on more
                                      └ all succeed: the chief's result

A restart continues from the program's checkpoint. Losses and arrivals are Ray's own news: a call of
a lost actor fails, and the bundle of a slot appears on a node.
"""

import dataclasses
import time
from collections.abc import Callable

from tfparallel.cluster.launcher.back_off import RestartBackOff
from tfparallel.cluster.launcher.supervisor import StopRequest
from tfparallel.ray.attempt import Attempt, Work
from tfparallel.ray.crew import Crew
from tfparallel.ray.options import RayOptions
from tfparallel.ray.placement import Placement
from tfparallel.ray.screen import Screen
from tfparallel.ray.storage import marked
from tfparallel.texts import counted

_ARRIVAL_POLL_SECONDS = 1.0
# Several nodes often arrive together, and each change of size costs a restart.
_ARRIVAL_SETTLE_SECONDS = 2.0
_USAGE_EXIT_CODE = 2  # A restart would end in the same way.


class RayJobError(RuntimeError):
    """The job has failed; `exit_code` is that of the worker at fault."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def run_job(
    work: Work,
    options: RayOptions,
    screen: Screen,
    check: Callable[[], None] = lambda: None,
) -> bytes | None:
    """Runs the workers on the connected Ray cluster.

    Args:
        work: What they run.
        options: The options of the job.
        screen: Shows their output.
        check: Called often; raises to stop the job.

    Returns:
        The chief's pickled result, if there is one.

    Raises:
        RayJobError: If a worker has failed more often than `max_failures` allows.
        RuntimeError: If Ray cannot place enough workers, or one does not see the storage path.
    """
    least, most = options.num_workers
    strategy = options.placement_strategy
    back_off = RestartBackOff()
    number, num_failures = 0, 0
    with (
        marked(options.storage_path) as marker,
        Placement(least, most, options.resources, strategy) as placement,
        Crew(placement, options.resources, screen.say, marker) as crew,
    ):
        while True:
            timeout = options.start_timeout_seconds
            members = crew.gather(least, most, timeout, check)
            if len(members) < most or number:
                screen.say(f"attempt {number + 1}: {counted(len(members), 'worker')}")
            with screen.showing(number, len(members)) as shown:
                attempt = Attempt(members, work, number, shown.write)
                has_arrived = _watch(attempt, crew, len(members), options, check)
            number += 1
            attempt.drop_lost(crew)
            if not attempt.has_failed:
                return attempt.result
            if has_arrived and not attempt.lost and attempt.outcome().culprit is None:
                screen.say("Ray has placed more workers; the others were asked to save their state")
                continue
            failure = _failure(attempt, screen)
            is_counted = not attempt.lost or least == most
            num_failures += is_counted
            is_last = 0 <= options.max_failures < num_failures
            if is_last or failure.exit_code == _USAGE_EXIT_CODE:
                raise failure
            screen.say(str(failure))
            seconds = back_off.failed(attempt.lasted_seconds) if is_counted else 0.0
            of = "" if options.max_failures < 0 else f" of {options.max_failures}"
            count = f" ({num_failures}{of})" if is_counted else ""
            screen.say(f"restarting all workers{f' in {seconds:g} s' * bool(seconds)}{count}")
            time.sleep(seconds)


def _watch(attempt, crew, num_workers, options, check) -> bool:
    """Waits until the attempt has ended; returns whether it did because workers have arrived."""
    has_arrived = False
    arrivals = _Arrivals(num_workers, options.num_workers[1])
    try:
        while attempt.is_running and not attempt.has_failed and not has_arrived:
            attempt.listen()
            check()
            has_arrived = arrivals.are_complete(crew)
        attempt.stop(options.grace_seconds)
    except BaseException as error:
        attempt.stop(options.grace_seconds)
        if isinstance(error, StopRequest):
            error.has_saved = attempt.has_saved
        raise
    return has_arrived


@dataclasses.dataclass
class _Arrivals:
    """Notices that more workers could take part."""

    num_workers: int
    most: int
    num_seen: int = 0
    looked_at: float = 0.0
    changed_at: float = 0.0

    def are_complete(self, crew: Crew) -> bool:
        """Whether actors have arrived, and no further ones a while after."""
        now = time.monotonic()
        if self.num_workers == self.most or now - self.looked_at < _ARRIVAL_POLL_SECONDS:
            return False
        self.looked_at = now
        num_ready = len(crew.ready())
        if num_ready != self.num_seen:
            self.num_seen, self.changed_at = num_ready, now
        is_settled = now - self.changed_at >= _ARRIVAL_SETTLE_SECONDS
        return num_ready > self.num_workers and (is_settled or num_ready == self.most)


def _failure(attempt: Attempt, screen: Screen) -> RayJobError:
    """Returns the error that describes the root cause: a lost actor before any exit."""
    outcome = screen.explained(attempt.outcome())
    if attempt.lost:
        text, exit_code = attempt.describe_lost(), 1
    else:
        culprit = outcome.culprit
        text, exit_code = culprit.explain(), culprit.exit_code
    stopped = [str(exit_.worker) for exit_ in outcome.exits if exit_.stopped]
    if stopped:
        text += f"\nStopped worker{'s' * (len(stopped) > 1)} {', '.join(stopped)}."
    return RayJobError(f"{text[0].upper()}{text[1:]}", exit_code)
