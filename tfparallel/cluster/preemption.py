"""Preemption: the signals that announce it, and the exit code that requests a restart.

Schedulers (Slurm, Kubernetes, clouds that reclaim a machine) send SIGTERM, or a signal chosen by
the user, some time before they kill. Python runs a signal's handler between two bytecode
instructions, and so not during a TensorFlow step. But it writes the signal's number to the wake-up
file descriptor at once, which a thread reads.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a restart may help.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def held_back(signals: Sequence[int]) -> Iterator[None]:
    """Defers signals that this program handles: the first is delivered after the block.

    Signals without a Python handler act at once. Outside of the main thread, nothing is deferred.
    """
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in signals}
        handlers = {number: each for number, each in handlers.items() if callable(each)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        handlers[received[0]](received[0], None)


class SignalWatch:
    """Calls a function on a thread with each of these signals; a context manager.

    Inside it the signals have no other effect. Enter it in the main thread; in other threads Python
    does not allow handlers, and it does nothing.
    """

    def __init__(self, signals: Sequence[int], on_signal: Callable[[int], None]):
        self._signals = tuple(signals)
        self._on_signal = on_signal
        self._stack, self._handlers = contextlib.ExitStack(), contextlib.ExitStack()

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        read, write = socket.socketpair()
        write.setblocking(False)
        self._stack.callback(write.close)  # Ends the thread.
        before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in self._signals:
            handler = signal.signal(number, lambda *_: None)
            # None if the previous handler was set from C++.
            self._handlers.callback(signal.signal, number, handler or signal.SIG_DFL)
        arguments = (read, before)
        threading.Thread(target=self._listen, args=arguments, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._handlers.close()
        self._stack.close()

    def ignore(self) -> None:
        """Ignores the signals until the process ends, even after the context."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                # At exit Python drops other handlers seconds before TensorFlow has shut down.
                signal.signal(number, signal.SIG_IGN)
            self._handlers.pop_all()
            self._stack.close()  # Python would write to its file descriptor, which may be reused.

    def _listen(self, read, before):
        with read:
            while number := read.recv(1):
                if before >= 0:  # Another listener was installed before.
                    with contextlib.suppress(OSError):
                        os.write(before, number)
                if number[0] in self._signals:
                    self._on_signal(number[0])
