"""The actors of a job, one for each worker that Ray has placed."""

import os
import time
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfparallel.cluster.launcher.sent_function import module_path
from tfparallel.ray.placement import Placement, Slot
from tfparallel.ray.storage import describe_unseen
from tfparallel.ray.worker_host import Place, WorkerHost

_POLL_SECONDS = 0.1
# At first, further slots and actors are waited for this long once nothing has changed.
_SETTLE_SECONDS = 2.0
_RETRY_SECONDS = 2.0  # Before the next try after an actor that did not start.
_UNSEEN_SECONDS = 60.0  # Before the next look at a node that does not see the storage path.
# A new actor takes a second or two; on a busy host more.
_ACTOR_SECONDS = 15.0


class Member:
    """An actor, as the driver sees it.

    Attributes:
        slot: Its bundle.
        node: The id of its node.
        actor: Its handle.
        place: Where it runs, once it has answered.
        is_doubtful: Whether its node may be dead; nobody waits for it then.
    """

    def __init__(self, slot: Slot, node: str, actor, is_doubtful: bool):
        self.slot, self.node, self.actor = slot, node, actor
        self.place: Place | None = None
        self.is_doubtful = is_doubtful
        self.since = time.monotonic()
        self._answer = actor.place.remote()

    def has_answered(self) -> bool:
        """Whether the actor has started; `RayError` if it has died."""
        if self.place is None and ray.wait([self._answer], timeout=0)[0]:
            self.place = ray.get(self._answer)
        return self.place is not None


class Crew:
    """Creates and replaces the actors. A context manager, which kills them.

    Args:
        placement: The job's placement groups.
        resources: The resources of each worker.
        say: Prints a message of the driver itself.
        marker: A file in the storage path, if there is one.
    """

    def __init__(
        self,
        placement: Placement,
        resources: Mapping[str, float],
        say: Callable[[str], None],
        marker: str | None = None,
    ):
        self._placement, self._say, self._marker = placement, say, marker
        self._resources = dict(resources)
        resources = dict(resources)
        num_cpus, num_gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        # Several threads: one starts, looks and ends, each at any time.
        self._options = {
            "num_cpus": num_cpus, "num_gpus": num_gpus, "max_concurrency": 4, "max_restarts": 0,
        }  # fmt: skip
        if "memory" in resources:
            self._options["memory"] = resources.pop("memory")
        self._options["resources"] = resources
        self._arguments = (module_path(), os.getcwd(), num_cpus, num_gpus, marker)
        self._members: dict[Slot, Member] = {}
        self._doubtful: set[str] = set()  # Nodes that have lost an actor, and may be dead.
        self._unseeing: set[str] = set()  # Nodes that do not see the storage path.
        self._not_before: dict[Slot, float] = {}  # When a lost actor may be replaced.
        self._trouble = ""  # Why the last actor that did not start has failed.
        self._changed_at = time.monotonic()
        self._has_gathered = False

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_):
        for member in self._members.values():
            ray.kill(member.actor)

    def gather(
        self,
        least: int,
        most: int,
        timeout_seconds: float,
        check: Callable[[], None],
    ) -> list[Member]:
        """Waits until at least `least` actors have answered; returns all that have, by node.

        Raises:
            RuntimeError: If there are too few in time; or if one does not see the storage path. A
                node that arrives later and does not see it is left out.
        """
        began, has_said = time.monotonic(), False
        while True:
            check()
            ready = self.ready()
            now = time.monotonic()
            if len(ready) == most or len(ready) >= least and not self._is_changing(now):
                self._has_gathered = True
                return ready
            if now - began > timeout_seconds:
                raise RuntimeError(self._too_few(ready, least, timeout_seconds))
            if now - began > _ACTOR_SECONDS and not has_said:
                has_said = True
                self._say(f"waiting for Ray to place {least - len(ready)} more of {least} workers")
            time.sleep(_POLL_SECONDS)

    def ready(self) -> list[Member]:
        """Creates the actors of new slots; returns all that have answered, by node."""
        placed = self._placement.placed()
        self._doubtful &= set(placed.values())
        for slot in [slot for slot, each in self._members.items() if placed.get(slot) != each.node]:
            self.drop(self._members[slot], node_may_be_dead=False)
        for slot, node in placed.items():
            is_due = time.monotonic() >= self._not_before.get(slot, 0.0)
            if slot not in self._members and is_due:
                self._members[slot] = self._create(slot, node)
        ready = []
        for member in list(self._members.values()):
            before = member.place
            try:
                if member.has_answered() and self._is_usable(member):
                    ready.append(member)
            except RayError as error:
                self._trouble = str(error).strip()
                self._not_before[member.slot] = time.monotonic() + _RETRY_SECONDS
                self.drop(member, node_may_be_dead=True)
            if member.place is not before:
                self._changed_at = time.monotonic()
                self._doubtful.discard(member.node)
        return sorted(ready, key=lambda member: (member.node, member.slot.bundle))

    def drop(self, member: Member, node_may_be_dead: bool) -> None:
        """Forgets an actor that is lost, and makes sure that it ends."""
        if self._members.get(member.slot) is member:
            del self._members[member.slot]
        if node_may_be_dead:
            self._doubtful.add(member.node)
        ray.kill(member.actor)

    def _is_usable(self, member):
        """Whether an actor sees the storage path; it is dropped otherwise."""
        if member.place.sees_storage:
            return True
        self._trouble = describe_unseen(self._marker, member.place.address)
        if not self._has_gathered:
            raise RuntimeError(self._trouble)
        if member.node not in self._unseeing:
            self._unseeing.add(member.node)
            self._say(self._trouble)
        self._not_before[member.slot] = time.monotonic() + _UNSEEN_SECONDS
        self.drop(member, node_may_be_dead=False)
        return False

    def _create(self, slot, node):
        self._changed_at = time.monotonic()
        strategy = PlacementGroupSchedulingStrategy(slot.group, slot.bundle)
        actor_class = ray.remote(WorkerHost).options(**self._options, scheduling_strategy=strategy)
        return Member(slot, node, actor_class.remote(*self._arguments), node in self._doubtful)

    def _is_changing(self, now):
        """Whether more actors may answer in a moment."""
        waited_for = [
            member
            for member in self._members.values()
            if member.place is None and not member.is_doubtful
            if now - member.since < _ACTOR_SECONDS
        ]
        settles = not self._has_gathered and now - self._changed_at < _SETTLE_SECONDS
        return bool(waited_for) or settles

    def _too_few(self, ready, least, timeout_seconds):
        available = {
            name: number
            for name, number in sorted(ray.cluster_resources().items())
            if not name.startswith(("node:", "object_store_memory"))
        }
        return (
            f"Ray placed {len(ready)} workers within {timeout_seconds:g} s; at least {least} are "
            f"required. Received: resources_per_worker={self._resources}, in a cluster that has "
            f"{available}. Ask for fewer resources or workers, add nodes, "
            "end other jobs, or pass a longer start_timeout_seconds."
            + (f"\nThe last worker that failed to start: {self._trouble}" if self._trouble else "")
        )
