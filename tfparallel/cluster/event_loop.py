"""Runs a coroutine to its end, whatever event loop the caller has.

`asyncio.run` refuses to work in a notebook, whose thread has a running loop,
and elsewhere leaves the main thread without the loop it had.
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Coroutine
from typing import Any

__all__ = ["run"]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in an event loop of its own.

    Args:
        coroutine: What to run. Tasks that it starts must end with it.

    Returns:
        Its result.
    """
    if not _has_running_loop():
        return _run_here(coroutine)
    return _run_in_another_thread(coroutine)  # A thread has one running loop at most.


def _has_running_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_another_thread(coroutine):
    begun = concurrent.futures.Future()

    async def announced():
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as other_thread:
        result = other_thread.submit(_run_here, announced())
        try:
            return result.result()
        except KeyboardInterrupt:  # It comes to the main thread; the other one must be told.
            loop, task = begun.result()
            with contextlib.suppress(RuntimeError):  # The loop has been closed meanwhile.
                loop.call_soon_threadsafe(task.cancel)
            raise


def _run_here(coroutine):
    # A loop of its own leaves the caller's as it is. The first Ctrl-C cancels the coroutine.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)
