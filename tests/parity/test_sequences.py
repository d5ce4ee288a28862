"""The cases with sequences on meshes that divide them, against one device.

All others say that nothing can be divided, but for those that a pipeline refuses.
"""

import pytest

from . import table
from .case import EXACT, HYBRID, form_on
from .cases import ALL
from .test_parity import DEVICES, judge

MESHES = ["1 x 1 x 1 x 2", "2 x 1 x 1 x 2"]
WITH_SEQUENCES = {
    "LoRA inside of attention",
    "a mask for each head",
    "attention with an activity regularizer",
    "dropout of a kernel",
    "dropout of a kernel, eagerly",
    "dropout of a time-major tensor",
    "dropout of positions",
    "dropout of positions, eagerly",
    "frozen projections of attention",
    "ignore_class",
    "jit_compile attention",
    "jit_compile sparse gradients",
    "layer GroupQueryAttention",
    "layer MultiHeadAttention",
    "layer MultiHeadAttention of masked input",
    "layer MultiHeadAttention of masked input, with skips",
    "lora_alpha in attention",
    "mask and sample weights a token",
    "mask of a label a row",
    "mask of a label a row under mean_with_sample_weight",
    "mask of a label a token",
    "other masks per output",
    "positions and tokens in one table",
    "positions by arange",
    "positions by arange, clipped",
    "positions by arange, eagerly",
    "positions held by the layer",
    "positions in the graph of a functional model",
    "positions of each row",
    "random MultiHeadAttention with dropout",
    "shares of an embedding's optimizer",
    "sparse gradients under Adam with clipping",
    "sparse gradients under SGD with momentum",
    "sparse gradients under accumulation",
    "three steps an update, of a mask",
}
CASES = [case for case in ALL if case.name in WITH_SEQUENCES and table.is_asked_for(case.feature)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_trains_as_one_device_does(case, mesh):
    verdict, detail = judge(case, form_on(HYBRID, DEVICES, mesh))
    assert verdict == EXACT, detail
