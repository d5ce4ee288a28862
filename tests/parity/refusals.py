"""What several cases expect a form to refuse, and in which words: see `Case.refused`.

A refusal is a promise as much as an exact result is: a case names each form that refuses it,
and a form that it does not name must train it. So an error that is new fails the tests, and
`make parity` writes no page.
"""

from __future__ import annotations

PLACED = ("model_parallel", "tensor_parallel", "pipeline_parallel")
REPLICATED = ("data_parallel", "MirroredStrategy", "workers")

NOT_BUILT = dict.fromkeys(PLACED, "is not built, so its layers have no sizes")
SUBCLASSED = dict.fromkeys(PLACED, "Placing layers needs a functional or Sequential model")
OWN_TRAIN_STEP = dict.fromkeys(PLACED, "A custom `train_step` uses a GradientTape")

MOMENTS_OF_A_BATCH = {
    "pipeline_parallel": "Batch normalization takes the statistics of the whole batch"
}
STATE_OF_A_CALL = {"pipeline_parallel": "A layer that changes its state in each call"}
ONE_NUMBER_A_BATCH = {"pipeline_parallel": "Loss '\\w+' returns one value for the whole batch"}
COMPARES_EXAMPLES = {"pipeline_parallel": "The loss compares examples of different micro-batches"}
NO_SUM_OF_PARTS = {"pipeline_parallel": "with a reduction of 'sum' or a mean, is required"}

LOOKS_AT_WHOLE_WEIGHTS = {"tensor_parallel": "optimizers that update each element independently"}
STATE_OF_A_ROW = dict.fromkeys(
    (*REPLICATED, "pipeline_parallel"), "Stateful recurrent layers keep a state for each row"
)
SCALES_BY_CALLS = dict.fromkeys(
    (*REPLICATED, "pipeline_parallel"), "A float8 layer scales by the largest values"
) | {"tensor_parallel": "Nothing in model '\\w+' can be split"}
MIXES_EXAMPLES = dict.fromkeys(
    (*REPLICATED, "pipeline_parallel"), "A layer mixes examples, so the batch cannot be divided"
)
