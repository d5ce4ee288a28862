"""What Keras does with the logs of a step."""

import keras


def test_keras_reads_the_logs_of_each_execution_on_tensorflow():
    """With other backends it leaves them to a thread, so that the host need not wait.

    If this fails, callbacks of ours that look at the end of a batch have all steps wait for them:
    they must say that they are `async_safe`, and be so.
    """
    assert not keras.callbacks.CallbackList([])._async_train
