"""What tells a program that it is to end soon, and how it says that it should be started again.

Schedulers send SIGTERM, or a signal of the user's choice, some time before they kill: Slurm and
Kubernetes do, and clouds that take a machine back. Python calls a signal's handler between two of
its own instructions, and so not while a step of TensorFlow's runs. But the signal's number is
written to a file at once, and a thread reads it there.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["SIGNALS", "TRY_AGAIN", "SignalWatch", "held_back"]

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: starting again may help.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def held_back(signals: Sequence[int]) -> Iterator[None]:
    """Holds signals back that this program handles: the first of them counts behind the block.

    One that it leaves to the system ends it at once, as before. In other threads than the main one
    nothing is held back.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in signals}
        handlers = {number: each for number, each in handlers.items() if callable(each)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        handlers[came[0]](came[0], None)


class SignalWatch:
    """Calls a function with each of these signals that comes, on a thread; a context manager.

    In it the signals do nothing else. It must be entered in the main thread; elsewhere Python takes
    no handlers, and nothing is watched.
    """

    def __init__(self, signals: Sequence[int], told: Callable[[int], None]):
        self._signals = tuple(signals)
        self._told = told
        self._stack, self._handlers = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        read, write = socket.socketpair()
        write.setblocking(False)
        self._stack.callback(write.close)  # Which ends the thread.
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in self._signals:
            handler = signal.signal(number, lambda *_: None)
            # Of one that C++ has set, Python knows nothing.
            self._handlers.callback(signal.signal, number, handler or signal.SIG_DFL)
        arguments = (read, before)
        threading.Thread(target=self._listen, args=arguments, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._handlers.close()
        self._stack.close()

    def ignore(self) -> None:
        """Has the signals do nothing until the process has ended, which leaving would undo."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                # Python gives other handlers up seconds before TensorFlow has come to its end.
                signal.signal(number, signal.SIG_IGN)
            self._handlers.pop_all()
            self._stack.close()  # Python would write to the socket's number, which others may get.

    def _listen(self, read, before):
        with read:
            while number := read.recv(1):
                if before >= 0:  # Somebody else listens, too.
                    with contextlib.suppress(OSError):
                        os.write(before, number)
                if number[0] in self._signals:
                    self._told(number[0])
