"""Pipeline schedules: GPipe, 1F1B and interleaved.

Three devices, four micro-batches; `F2` is the forward pass of micro-batch 2, `B2` its backward
pass, drawn twice as long:

    gpipe     0 │F0F1F2F3            B0--B1--B2--B3--│
              1 │  F0F1F2F3      B0--B1--B2--B3--    │
              2 │    F0F1F2F3B0--B1--B2--B3--        │

    1f1b      0 │F0F1F2        B0--F3B1--  B2--  B3--│
              1 │  F0F1    B0--F2B1--F3B2--  B3--    │
              2 │    F0B0--F1B1--F2B2--F3B3--        │

One object, the `Schedule`, is drawn, simulated and executed: it lists each device's instructions in
order. It holds no times; a device waits until its inputs have arrived.

References: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019 (arXiv 1811.06965). Narayanan et al., "PipeDream", SOSP 2019, and
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021 (arXiv
2104.04473), for 1F1B and the interleaved schedule.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator


class ScheduleError(ValueError):
    """A schedule, the devices and the micro-batches do not fit together."""


@dataclasses.dataclass(frozen=True, order=True)
class Instruction:
    """One pass of a stage on a micro-batch.

    Attributes:
        kind: "forward" or "backward".
        stage: The index of the stage, from 0.
        micro_batch: The index of the micro-batch, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind[0].upper()}{self.micro_batch}"


def forward(stage: int, micro_batch: int) -> Instruction:
    """Returns the forward pass of a stage on a micro-batch."""
    return Instruction("forward", stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Instruction:
    """Returns the backward pass of a stage on a micro-batch."""
    return Instruction("backward", stage, micro_batch)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The instructions of each device, in order.

    Attributes:
        name: "gpipe", "1f1b" or "interleaved".
        num_micro_batches: M.
        chunks_per_device: v, the number of stages per device; stage s is on device s mod K.
        instructions: The instructions of each of the K devices.
    """

    name: str
    num_micro_batches: int
    chunks_per_device: int
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def num_devices(self) -> int:
        """K."""
        return len(self.instructions)

    @property
    def num_stages(self) -> int:
        """K·v."""
        return self.num_devices * self.chunks_per_device

    def device_of(self, stage: int) -> int:
        """Returns the index of the device that holds a stage."""
        return stage % self.num_devices

    def needs(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that must run before this one, on any device.

        A stage's forward pass needs that of the previous stage; its backward pass needs its own
        forward pass and the backward pass of the next stage.
        """
        stage, micro_batch = instruction.stage, instruction.micro_batch
        if instruction.kind == "forward":
            return [forward(stage - 1, micro_batch)] if stage > 0 else []
        behind = [backward(stage + 1, micro_batch)] if stage + 1 < self.num_stages else []
        return [forward(stage, micro_batch), *behind]

    def in_order(self) -> Iterator[tuple[int, Instruction]]:
        """Yields `(device, instruction)`, each after all that it needs.

        The devices take turns; each runs as many instructions as it can.

        Raises:
            ScheduleError: If the devices would deadlock.
        """
        done: set[Instruction] = set()
        position = [0] * self.num_devices
        while any(at < len(passes) for at, passes in zip(position, self.instructions, strict=True)):
            before = len(done)
            for device, passes in enumerate(self.instructions):
                while position[device] < len(passes):
                    instruction = passes[position[device]]
                    if not done.issuperset(self.needs(instruction)):
                        break
                    done.add(instruction)
                    position[device] += 1
                    yield device, instruction
            if len(done) == before:
                waiting = [
                    str(passes[at])
                    for passes, at in zip(self.instructions, position, strict=True)
                    if at < len(passes)
                ]
                raise ScheduleError(
                    f"The devices of schedule {self.name} would wait for each other forever. "
                    f"Received: {waiting}, none of which can begin."
                )

    def most_in_flight(self) -> list[int]:
        """Returns the most activations in flight on each device, one per micro-batch and stage.

        1F1B: at most K − d on device d of K. GPipe: M.
        """
        return [int(most_held(passes, lambda stage: (1, 0))) for passes in self.instructions]


def most_held(
    instructions: Iterable[Instruction], sizes: Callable[[int], tuple[float, float]]
) -> float:
    """Returns the largest size that a device holds of the micro-batches in flight.

    Args:
        instructions: The instructions of the device, in order.
        sizes: Returns, for a stage, the size kept from a micro-batch's forward pass to its backward
            pass, and the temporary size during each of the two.
    """
    in_flight = largest = 0.0
    for instruction in instructions:
        activations, temporary = sizes(instruction.stage)
        if instruction.kind == "forward":
            in_flight += activations
            largest = max(largest, in_flight + temporary)
        else:
            largest = max(largest, in_flight + temporary)
            in_flight -= activations
    return largest


def gpipe(num_devices: int, num_micro_batches: int) -> Iterator[list[Instruction]]:
    """Yields each device's instructions: all forward passes, then all backward passes."""
    micro_batches = range(num_micro_batches)
    for stage in range(num_devices):
        yield [forward(stage, m) for m in micro_batches] + [
            backward(stage, m) for m in micro_batches
        ]


def one_forward_one_backward(
    num_devices: int, num_micro_batches: int
) -> Iterator[list[Instruction]]:
    """Yields each device's instructions: fill the pipeline, then alternate forward and backward.

    Device d of K runs K − d − 1 forward passes ahead; from then on one forward, one backward. So it
    holds the activations of at most K − d micro-batches, whatever M is.
    """
    for stage in range(num_devices):
        ahead = min(num_devices - stage - 1, num_micro_batches)
        passes = [forward(stage, m) for m in range(ahead)]
        for m in range(num_micro_batches - ahead):
            passes += [forward(stage, ahead + m), backward(stage, m)]
        passes += [backward(stage, m) for m in range(num_micro_batches - ahead, num_micro_batches)]
        yield passes


def interleaved(
    num_devices: int, num_micro_batches: int, chunks_per_device: int
) -> Iterator[list[Instruction]]:
    """Yields each device's instructions if it holds v stages, K apart.

    Micro-batches run in groups of K: a device takes a group through its first stage, then through
    its second, and so on; then the next group. The backward passes start with the last stage. A
    device runs 2(K − d − 1) + (v − 1)K forward passes ahead. The bubble is v times smaller than
    1F1B's.
    """
    num_passes = num_micro_batches * chunks_per_device

    def at(position: int, kind: str) -> tuple[int, int]:
        """Returns the stage and the micro-batch of this device's pass at a position."""
        group, inside = divmod(position, num_devices * chunks_per_device)
        chunk, member = divmod(inside, num_devices)
        if kind == "backward":
            chunk = chunks_per_device - 1 - chunk
        return chunk * num_devices + device, group * num_devices + member

    for device in range(num_devices):
        ahead = 2 * (num_devices - device - 1) + (chunks_per_device - 1) * num_devices
        ahead = min(ahead, num_passes)
        passes = [forward(*at(n, "forward")) for n in range(ahead)]
        for n in range(num_passes - ahead):
            passes += [forward(*at(ahead + n, "forward")), backward(*at(n, "backward"))]
        passes += [backward(*at(n, "backward")) for n in range(num_passes - ahead, num_passes)]
        yield passes


SCHEDULES = ("gpipe", "1f1b", "interleaved")


def make_schedule(
    name: str,
    num_devices: int,
    num_micro_batches: int,
    chunks_per_device: int | None = None,
) -> Schedule:
    """Makes a schedule.

    Args:
        name: "gpipe", "1f1b" or "interleaved".
        num_devices: K.
        num_micro_batches: M.
        chunks_per_device: v, for "interleaved" only; 2 if None.

    Raises:
        ScheduleError: If the name is unknown, a number is below 1, or they do not fit together.

    Example:
        >>> [" ".join(map(str, each)) for each in make_schedule("1f1b", 2, 3).instructions]
        ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    problems = list(_problems(name, num_devices, num_micro_batches, chunks_per_device))
    if problems:
        raise ScheduleError("\n".join(problems))
    if name == "interleaved":
        chunks = chunks_per_device or 2
        lists = interleaved(num_devices, num_micro_batches, chunks)
    else:
        chunks = 1
        make = gpipe if name == "gpipe" else one_forward_one_backward
        lists = make(num_devices, num_micro_batches)
    return Schedule(name, num_micro_batches, chunks, tuple(map(tuple, lists)))


def _problems(name, num_devices, num_micro_batches, chunks) -> Iterator[str]:
    if name not in SCHEDULES:
        yield f"`schedule` must be one of {', '.join(SCHEDULES)}. Received: schedule={name!r}."
    counts = {"num_devices": num_devices, "num_micro_batches": num_micro_batches}
    for argument, value in counts.items():
        if not _is_count(value):
            yield f"`{argument}` must be a whole number of at least 1. Received: {value!r}."
    if chunks is not None and name in SCHEDULES and name != "interleaved":
        yield (
            "`chunks_per_device` requires schedule='interleaved'; the others have one stage per "
            f"device. Received: chunks_per_device={chunks}, schedule={name!r}. Drop it."
        )
    if name != "interleaved" or not all(map(_is_count, counts.values())):
        return
    if chunks is not None and (not _is_count(chunks) or chunks < 2):
        yield (
            "schedule='interleaved' needs at least two stages per device. Received: "
            f"chunks_per_device={chunks!r}. For one, use schedule='1f1b'."
        )
    if num_devices < 2:
        yield (
            "schedule='interleaved' needs at least two devices, whose stages alternate. Received: "
            f"num_devices={num_devices}. Use schedule='1f1b'."
        )
    elif num_micro_batches % num_devices:
        above = -(-num_micro_batches // num_devices) * num_devices
        yield (
            "schedule='interleaved' takes micro-batches in groups of one per device; their number "
            f"must be a multiple of the devices'. Received: num_micro_batches={num_micro_batches} "
            f"on {num_devices} devices. Use {above}, or schedule='1f1b'."
        )


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
