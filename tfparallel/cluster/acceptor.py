"""Accepts the callers of a rendezvous, of launchers or of workers, and authenticates them.

An admitted caller has proved that it belongs to the job (wire.py). All others are disconnected
without effect: a silent one blocks nothing, and is dropped after some seconds.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tfparallel.cluster import wire
from tfparallel.cluster.connection import Connection
from tfparallel.cluster.wire import Secret

# The time limit for a caller to identify itself, and for a listener to answer.
GREETING_SECONDS = 5.0
RETRY_SECONDS = 0.2
# The maximum of unidentified callers; beyond it the oldest is disconnected.
_MAX_STRANGERS = 256


class Acceptor:
    """Serves a listening socket within an event loop. An async context manager, which closes it.

    Args:
        listening: The socket.
        secret: The job's secret.
        job: The job's name.
        admit: Called with a caller's connection and first message, once it has authenticated. The
            connection is closed afterwards, unless it returns True.
        refused: Called with the connection, the reason, and the unproved message of a caller that
            is of another job, version, or token.
        num_expected: How many callers may come at the same moment.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: Secret,
        job: str,
        admit: Callable[[Connection, dict[str, Any]], Awaitable[bool | None]],
        refused: Callable[[Connection, str, dict[str, Any]], None],
        num_expected: int,
    ):
        self._listening, self._secret, self._job = listening, secret, job
        self._admit, self._refused = admit, refused
        self._max_strangers = _MAX_STRANGERS + num_expected
        self._tasks: set[asyncio.Task] = set()
        self._strangers: dict[asyncio.Task, None] = {}  # In order of arrival.

    async def __aenter__(self) -> "Acceptor":
        self._listening.setblocking(False)
        self._listen()
        return self

    async def __aexit__(self, *_):
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        """Starts a task that is cancelled when the rendezvous ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen(self):
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self):
        """Accepts a caller; a cancelled `loop.sock_accept` may lose one."""
        loop = asyncio.get_running_loop()
        try:
            caller, (address, *_) = self._listening.accept()
        except OSError:
            # The caller has left; or this process is out of descriptors, and must not spin.
            loop.remove_reader(self._listening)
            loop.call_later(RETRY_SECONDS, self._listen)
            return
        if len(self._strangers) >= self._max_strangers:
            # At once: a task ends some turns of the loop after it was cancelled, and until then
            # every newcomer would cancel that same one.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        connection = Connection(caller, address)
        task = self.spawn(self._answer(connection))
        self._strangers[task] = None

        def answered(done):
            self._strangers.pop(done, None)
            # Also if the task was cancelled before it began.
            if done.cancelled() or done.exception() is not None or not done.result():
                connection.close()

        task.add_done_callback(answered)

    async def _answer(self, connection):
        """Answers a caller of this job, and hangs up on any other; returns whether to keep it."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(GREETING_SECONDS):
                message = await self._authenticated(connection)
            if message is not None:
                self._strangers.pop(asyncio.current_task(), None)
                return await self._admit(connection, message)
        return False

    async def _authenticated(self, connection):
        """Returns the caller's first message; None if it does not belong to the job."""
        greeting = wire.parsed(await connection.receive_line())
        if not wire.is_greeting(greeting):
            return None
        reason, claim = "", {}
        if greeting["job"] != self._job:
            reason = f"belongs to job {greeting['job']!r}"
        elif not wire.is_of_this_version(greeting):
            reason = "different version of tfparallel"
        else:
            reply = wire.greeting(self._job)
            await connection.send(reply)
            line = await connection.receive_line()
            nonces = greeting["nonce"], reply["nonce"]
            session = wire.Session(self._secret, self._job, nonces, is_caller=False)
            if (message := session.opened(line)) is not None:
                connection.session = session
                return message
            reason, claim = "different TFPARALLEL_JOB_TOKEN", wire.unproved(line)
        self._refused(connection, reason, claim)
        await connection.send({"refused": self._job})
        return None
