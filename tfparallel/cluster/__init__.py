"""Who takes part in a job, and the processes that do; imports no TensorFlow."""
