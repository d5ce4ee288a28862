"""A schedule as text: a line a step, each message with the blocks that it carries.

    >>> print(text(ring.schedule(3)))
    step 0  add   0 ─0─► 1   1 ─1─► 2   2 ─2─► 0
    step 1  add   0 ─2─► 1   1 ─0─► 2   2 ─1─► 0
    step 2  copy  1 ─2─► 0   2 ─0─► 1   0 ─1─► 2
    step 3  copy  1 ─0─► 0   2 ─1─► 1   0 ─2─► 2

What is shown is what runs: `scheduled.execute` follows the same steps.
"""

from tfparallel.collectives.algorithms.schedule import MessageSchedule


def text(schedule: MessageSchedule) -> str:
    """Returns the drawing. Blocks 2 to 4 are written 2-4; where there is one block, no number."""
    lines = []
    for number, step in enumerate(schedule.steps()):
        messages = [
            f"{source} ─{_blocks(start, stop, schedule)}─► {target}"
            for source, target, start, stop in step.messages()
        ]
        verb = "add " if step.adds else "copy"
        lines.append(f"step {number:<2} {verb}  {'   '.join(messages)}")
    return "\n".join(lines)


def _blocks(start, stop, schedule):
    if schedule.num_blocks == 1:
        return ""
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
