"""The policies of `sync.py` and `slow_link.py`: when workers synchronize, and what they send.

Names are those of a table; values are arguments of `tfparallel.data_parallel`.
"""

START = 64  # Steps that sum gradients before `post_local_sgd` averages weights instead.
POST_LOCAL = f"post_local_sgd:{START},8"
POLICIES = {
    "every_step": {},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "topk:0.01": {"compression": "topk:0.01"},
    "powersgd:2": {"compression": "powersgd:2"},
    "accumulate:4": {"sync": "accumulate:4"},
    "accumulate:4, powersgd:2": {"sync": "accumulate:4", "compression": "powersgd:2"},
    "local_sgd:8": {"sync": "local_sgd:8"},
    "diloco:8": {"sync": "diloco:8"},
    POST_LOCAL: {"sync": POST_LOCAL},
}


def steps_that_trace(policy):
    """Returns the steps, from 0, that trace a program and so say nothing about a policy."""
    return (0, START) if policy == POST_LOCAL else (0,)
