"""Makes a program out of choices, each a number below a count: 0 is always the simplest.

    draw_program(choose)      choose(count) -> 0 … count - 1

`drawn(seed)` takes the choices from a seeded generator and keeps them; `run.shrink` hands them
to hypothesis, which makes them fewer and smaller for as long as the program still shows what it
showed.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from . import catalogue
from .program import Block, Head, Input, Program

MAX_SIZE = 200  # Elements of an example between layers: what takes long is tracing.

Choose = Callable[[int], int]


def drawn(seed: int | str, excluded: frozenset[str] = frozenset()) -> tuple[Program, list[int]]:
    """The program of a seed, and the choices that made it."""
    generator, choices = random.Random(seed), []

    def choose(count: int) -> int:
        choices.append(generator.randrange(count))
        return choices[-1]

    return draw_program(choose, excluded), choices


def pick(choose: Choose, choices):
    return choices[choose(len(choices))] if len(choices) > 1 else choices[0]


def often(choose: Choose, simple, choices, one_in: int = 3):
    """`simple`, or once in `one_in` times one of the choices."""
    return pick(choose, choices) if choose(one_in) == one_in - 1 else simple


def filled(choose, text: str, drawn: dict[str, str]) -> str:
    """The text of an entry with each of its fields drawn; `drawn` keeps what was."""
    for _, field, _, _ in string.Formatter().parse(text):
        if field and field not in ("layer", "x") and field not in drawn:
            drawn[field] = pick(choose, catalogue.FIELDS[field])
    return text.format(**{"layer": "{layer}", "x": "{x}", **drawn})


def layer_of(choose, shape, excluded: frozenset[str], of_sequences: bool = False):
    """A block that takes `shape`, and the shape that it puts out."""
    fitting = [
        entry
        for entry in catalogue.LAYERS
        if len(shape) in entry.ranks and entry.fits(shape) and not excluded & words(entry)
    ]
    # Drawn in any case: the fewer choices depend on others, the smaller a finding becomes.
    if choose(3) and of_sequences:
        preferred = [e for e in fitting if e.make.startswith(catalogue.OF_SEQUENCES)]
        fitting = preferred or fitting
    entry = pick(choose, fitting)
    drawn = {"same": str(shape[-1]), "first": str(shape[0])}
    make = filled(choose, entry.make, drawn)
    call = pick(choose, entry.call)
    after = filled(choose, entry.after, drawn) if entry.after else ""
    # What changes the shape cannot be added to its input.
    after_shape = entry.shape(shape, drawn)
    if after_shape != shape and call not in entry.call[:1]:
        call = entry.call[0]
    return Block(make, call, after.format(layer="{layer}")), after_shape


def words(entry: catalogue.Layer) -> set[str]:
    """The names by which a family of `known` may leave an entry out."""
    return {entry.make, entry.make.split("(")[0].removeprefix("layers."), entry.after}


def size_of(shape) -> int:
    return catalogue.flat(shape, {})[0]


def draw_program(choose: Choose, excluded: frozenset[str] = frozenset()) -> Program:
    style = pick(choose, catalogue.STYLES)
    start = often(choose, "function", ["built", "compiled"], 4)
    of_sequences = often(choose, False, [True], 4)
    inputs, shape = draw_inputs(choose, style, of_sequences)
    blocks = []
    while len(blocks) < 4 and choose(5):
        block, after = layer_of(choose, shape, excluded, of_sequences)
        stays = len(after) == 2 or not of_sequences
        if size_of(after) <= MAX_SIZE and stays:
            blocks, shape = [*blocks, block], after
    if len(inputs) == 1 and style == "functional" and len(inputs[0].shape) == 1:
        # Wide and deep: the head reads an input beside what was computed.
        if inputs[0].holds == "real" and len(shape) == 1:
            wide = Block("layers.Concatenate()", "{layer}([{x}, inputs])")
            blocks += often(choose, [], [[wide]], 4)
    heads = draw_heads(choose, style, shape, of_sequences)
    if style == "functional" and inputs[0].holds == "ids" and inputs[0].shape == (6,):
        if len(inputs) == len(heads) == 1 and shape[0] == 6 and choose(4) == 3:
            inputs, heads = tied(choose, inputs[0])
    if style == "sequential" or style == "nested" and not blocks:
        plain = all(block.call == "{layer}({x})" for block in (*inputs[0].blocks, *blocks))
        style = style if plain and blocks else "functional"
    if style == "subclassed":
        start = "function"
        blocks = [Block(block.make, block.call) for block in blocks]
    feed = often(choose, "arrays", ["tf.data", "endless", "PyDataset"], 3)
    if feed == "PyDataset" and (len(inputs) > 1 or len(heads) > 1):
        feed = "arrays"
    outputs = pick(choose, ["list", "dict"]) if len(heads) > 1 else "list"
    weights = often(choose, "", ["sample", "class"], 3)
    if weights == "class" and (len(heads) > 1 or heads[0].target != "labels" or heads[0].shape):
        weights = "sample"
    optimizer = pick(choose, catalogue.OPTIMIZERS)
    options = often(choose, "", catalogue.OPTIMIZER_OPTIONS, 2)
    fit = [f"epochs={pick(choose, [1, 2])}"]
    if choose(5) == 4:
        callbacks = catalogue.CALLBACKS[: 5 if "use_ema" in options and "{o}" in optimizer else 4]
        fit = ["epochs=3", f"callbacks=[{pick(choose, callbacks)}]"]
    if choose(10) == 9:
        fit = ["epochs=3", "initial_epoch=1"]
    validation = often(choose, "", catalogue.VALIDATION, 3)
    if "split" in validation and (feed != "arrays" or outputs == "dict"):
        validation = catalogue.VALIDATION[1]
    # Keras loads no Lambda, and no function, that it did not see before.
    makes = [block.make for each in (*inputs, *heads) for block in each.blocks]
    makes += [block.make for block in blocks] + [head.loss for head in heads]
    is_loadable = not any("Lambda" in make or "with_decay" in make for make in makes)
    then = tuple(each for each, one_in in catalogue.THEN if choose(one_in) == one_in - 1)
    return Program(
        inputs=tuple(inputs),
        blocks=tuple(blocks),
        heads=tuple(heads),
        style=style,
        outputs=outputs,
        start=start,
        optimizer=optimizer.format(o=options) if "{o}" in optimizer else optimizer,
        compile=often(choose, "", catalogue.COMPILE, 5),
        feed=feed,
        weights=weights,
        num_examples=pick(choose, [23, 10, 31, 17, 5]),
        batch_size=pick(choose, [9, 7, 16, 3, 2]),
        fit=", ".join(fit),
        validation=validation,
        then=tuple(each for each in then if each not in ("save", "resume") or is_loadable),
        replicas=pick(choose, [2, 3, 2, 3, 4]),
        schedule=pick(choose, ["1f1b", "gpipe", "interleaved"]),
        step=often(choose, "", catalogue.STEPS, 8) if style == "functional" else "",
    )


def draw_inputs(choose, style: str, of_sequences: bool):
    """One input, or two that end in vectors, and the shape of what the blocks take."""

    def one(entries):
        holds, shape, makes, after = pick(choose, entries)
        return Input(holds, shape, tuple(Block(make) for make in makes)), after

    first, shape = one(catalogue.SEQUENCES if of_sequences else catalogue.INPUTS)
    if style == "sequential" or len(shape) > 1 or choose(4) < 3:
        return [first], shape
    second, other = one(catalogue.SMALL_INPUTS)
    return [first, second], (shape[0] + other[0],)


def tied(choose, words: Input):
    """An input whose table the last layer reads once more, and that layer, for each of 6 steps."""
    table = Block(pick(choose, catalogue.TIED), "{layer}({x}, reverse=False)")
    last = Block("layer1", "{layer}({x}, reverse=True)")
    loss = "losses.SparseCategoricalCrossentropy(from_logits=True)"
    head = Head((Block("layers.Dense(4)"), last), "labels", (6,), loss, ("'accuracy'",), 6)
    return [Input(words.holds, words.shape, (table,))], [head]


def draw_heads(choose, style: str, shape, of_sequences: bool):
    count = 1 if style == "sequential" else often(choose, 1, [1, 2], 2)
    heads = []
    for _ in range(count):
        layers, target, target_shape, losses, metrics = pick(choose, catalogue.HEADS)
        blocks = [Block(make) for make in layers]
        a_step = len(shape) == 2 and choose(4) > (0 if of_sequences else 1)
        if a_step:
            target_shape = (shape[0], *target_shape)
        elif len(shape) > 1:
            blocks = [Block("layers.Flatten()"), *blocks]
        loss = pick(choose, losses).format(r=often(choose, "", catalogue.REDUCTION, 2))
        if a_step:
            metrics = [each for each in metrics if not each.startswith(catalogue.OF_TWO_AXES)]
        chosen = dict.fromkeys(often(choose, None, metrics, 2) for _ in range(2))
        chosen = tuple(each for each in chosen if each)
        steps = shape[0] if a_step else 0
        heads.append(Head(tuple(blocks), target, target_shape, loss, chosen, steps))
    return heads
