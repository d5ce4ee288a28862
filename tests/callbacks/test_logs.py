"""What Keras does with the logs of a step."""

import keras
from keras.src import backend

from tfparallel import callbacks as ours
from tfparallel.callbacks.stall import StallGuard


def test_keras_reads_the_logs_of_each_execution_on_tensorflow():
    """With other backends it leaves them to a thread, so that the host need not wait.

    If this fails, `LogsWhereTheyAre` of `step/logs.py` may go.
    """
    assert not keras.callbacks.CallbackList([])._async_train


def test_keras_would_leave_them_to_a_thread_with_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "IS_THREAD_SAFE", True)

    def is_asynchronous(*callbacks):
        callback_list = keras.callbacks.CallbackList([*callbacks])
        return callback_list._async_train and callback_list._async_test

    assert is_asynchronous(ours.Checkpoint(tmp_path), ours.SentBytes(), StallGuard(60.0, 0))
    # These read the loss of each step, and how long it took.
    assert not is_asynchronous(ours.NaNGuard()) and not is_asynchronous(ours.StepTime())
