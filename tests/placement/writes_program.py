"""What processes run in test_processes.py: writes a variable of process 1, then adds 1 to it.

python writes_program.py
"""

import tensorflow as tf

import tfparallel
from tfparallel.placement.processes import after_writes


def main():
    device = tfparallel.connect_to_cluster(start_timeout=60)[1]
    with tf.device(device):
        variable = tf.Variable(0.0)

    @tf.function
    def add_one():
        with tf.device(device):
            variable.assign_add(1.0)

    def seen(function, value):
        with tf.device(device):
            late = tf.ones((600, 600))
            for _ in range(4):
                late = late @ late * 1e-3
            variable.assign(value + 0 * tf.reduce_sum(late))
        function()
        return variable.numpy()

    # A race: on busy cores it may take many tries until the function is the first.
    for name, function, tries in (
        ("plain", add_one, 500),
        ("after writes", after_writes(add_one), 30),
    ):
        function()
        lost = any(seen(function, value) != value + 1 for value in range(tries))
        print(f"{name}: {'some' if lost else 'none'} lost")


if __name__ == "__main__":
    main()
