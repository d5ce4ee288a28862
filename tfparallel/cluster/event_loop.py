"""Runs a coroutine to its end, whatever event loop the caller has.

`asyncio.run` refuses to work in a notebook, whose thread has a running loop,
and elsewhere leaves the main thread without the loop it had.
"""

import asyncio
import concurrent.futures
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
    # A thread has one running loop at most.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(_run_here, coroutine).result()


def _has_running_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_here(coroutine):
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                # It may have hit any task, whose end asyncio would report once more.
                loop.set_exception_handler(lambda loop, context: None)
            # Ctrl-C comes out of the loop and leaves the task in the middle.
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
            # Looked at, so that asyncio does not report it as forgotten.
            task.cancelled() or task.exception()
            raise
    finally:
        loop.close()
