"""The flags of what a plan is asked for: what devices hold, where models are cut, what is tried."""

from absl import flags

from tfparallel.commands.help import define_choice
from tfparallel.size_text import parse_bytes

__all__ = ["device_memory", "plan_flags", "plan_problems"]


def plan_flags(values: flags.FlagValues) -> None:
    """Adds these flags."""
    flags.DEFINE_integer(
        "num_trials",
        0,
        "For auto: train the first N meshes of the plan for a moment each, on a batch of the "
        "task's data, and take the fastest of them.",
        flag_values=values,
    )
    define_choice(
        values,
        "balance",
        "memory",
        {
            "memory": "bytes that a stage holds",
            "time": "seconds of a stage, measured first",
            "both": "the larger of the two shares",
        },
        "For model, pipeline and hybrid: what the cut between the devices spreads evenly. Without "
        "the flag pipeline and hybrid are cut by time.",
    )
    flags.DEFINE_string(
        "device_memory",
        None,
        "For model, pipeline and hybrid: what a stage may hold, such as 16GiB; for auto: what any "
        "device may. No limit if absent.",
        flag_values=values,
    )


def device_memory(values: flags.FlagValues) -> int | None:
    """Returns what --device_memory says, in bytes."""
    return None if values.device_memory is None else parse_bytes(values.device_memory)


def plan_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with --device_memory and --num_trials."""
    problems = []
    try:
        device_memory(values)
    except ValueError as error:
        problems.append(f"--device_memory: {error}")
    if values.num_trials < 0:
        problems.append(
            f"The number of trials must be 0 or more. Received: --num_trials={values.num_trials}."
        )
    elif values.num_trials and values.parallel != "auto":
        problems.append(
            "--num_trials belongs to --parallel=auto, which ranks meshes. Received: --num_trials="
            f"{values.num_trials} with --parallel={values.parallel}. Take --parallel=auto, or drop "
            "--num_trials."
        )
    return problems
