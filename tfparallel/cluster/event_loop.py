"""Runs a coroutine to its end, whatever event loop the caller has.

`asyncio.run` refuses to work in a notebook, whose thread has a running loop,
and elsewhere leaves the main thread without the loop it had.
"""

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
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
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(coroutine)
        try:
            with _ctrl_c_cancels(task) as is_interrupted:
                result = _run_to_its_end(loop, task)
        except asyncio.CancelledError:
            if is_interrupted():
                raise KeyboardInterrupt from None
            raise
        if is_interrupted():  # When the task had its result already.
            raise KeyboardInterrupt
        return result
    finally:
        loop.close()


def _run_to_its_end(loop, task):
    try:
        return loop.run_until_complete(task)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            # A second Ctrl-C, or the caller's own handler: it may have hit any task, whose end
            # asyncio would report once more.
            loop.set_exception_handler(lambda loop, context: None)
        # An exception that comes out of the loop itself leaves the task in the middle.
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        # Looked at, so that asyncio does not report it as forgotten.
        task.cancelled() or task.exception()
        raise


@contextlib.contextmanager
def _ctrl_c_cancels(task):
    """Has the first Ctrl-C cancel a task; gives a function that says whether it came.

    Python's own handler raises an exception wherever the loop is just then. Between the moment
    when the loop takes a callback from its queue and the moment when it calls it, that loses the
    callback, and a task that it was to wake waits for ever. A second Ctrl-C is Python's own.

    Where the caller handles Ctrl-C, and in a thread that receives no signals, nothing changes.
    """
    count = 0

    def cancel(number, frame):
        nonlocal count
        count += 1
        if count > 1:
            signal.default_int_handler(number, frame)
        task.get_loop().call_soon_threadsafe(task.cancel)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, cancel)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
