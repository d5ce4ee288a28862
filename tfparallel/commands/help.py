"""What `--help` shows: an example first, then the flags by topic, each choice named once."""

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from absl import flags

__all__ = ["Command", "define_choice", "help_text"]

# In the order in which a person decides.
_TOPICS = {
    "The parallelism": "parallel mesh num_trials",
    "Devices": "num_devices devices device_type split_gpu",
    "Workers": "nproc_per_node num_workers num_ps strategy allow_independent_workers transport "
    "bind_cores start_timeout stall_timeout",
    "Several hosts": "nnodes node_rank rdzv_endpoint local_addr",
    "When a worker fails, and what is kept": "max_restarts standby grace_seconds log_dir",
    "Training": "prove epochs steps_per_epoch steps global_batch_size seed callbacks stop_on_nan",
    "Numbers and compilation": "precision jit_compile",
    "Sums of gradients, and when weights are updated": "all_reduce calibrate bucket_bytes "
    "compression sync shard_optimizer",
    "Stages and micro-batches": "num_micro_batches schedule chunks_per_device recompute "
    "batch_normalization balance device_memory",
    "Split layers": "convolutions",
    "The task": "kind data target force",
    "The cluster": "ranks local_ranks latency_us bandwidth local_latency_us local_bandwidth "
    "add_bandwidth sweep",
    "What is measured": "algorithms dtype min_bytes max_bytes step_factor iters warmup_iters "
    "link_gbits",
    "What is examined": "quick suggest upstream min_free_mib peer_timeout probe_timeout",
    "GPU trials": "gpu trials total_timeout",
    "Files to write": "save checkpoint_dir checkpoint_every_steps tensorboard report csv plot "
    "draw trace output save_profile",
    "Job files": "emit job_name gpus_per_node sbatch_args image volume",
    "Tests of failures": "inject",
}
_TOPIC_OF = {name: topic for topic, names in _TOPICS.items() for name in names.split()}

# What stands behind "=", where the flag's type does not say it.
_PLACEHOLDERS = {
    "all_reduce": "NAME",
    "bucket_bytes": "SIZE",
    "checkpoint_dir": "DIR",
    "compression": "HOW",
    "csv": "FILE.csv",
    "data": "sample|FILE",
    "device_memory": "SIZE",
    "devices": "GPU:0,GPU:1",
    "draw": "FILE.png",
    "image": "IMAGE",
    "inject": "FAULT",
    "job_name": "NAME",
    "local_addr": "ADDRESS",
    "log_dir": "DIR",
    "max_bytes": "SIZE",
    "mesh": "data=2,pipeline=2",
    "min_bytes": "SIZE",
    "nnodes": "N|MIN:MAX",
    "output": "FILE.json",
    "plot": "FILE.png",
    "rdzv_endpoint": "HOST:PORT",
    "report": "FILE.json",
    "save": "FILE.keras",
    "sbatch_args": "OPTION",
    "sweep": "FILE.json",
    "sync": "WHEN",
    "tensorboard": "DIR",
    "trace": "FILE.json",
    "volume": "CLAIM:/PATH",
}
_WIDEST = 100
_COLUMN = 28  # Where the text of a flag begins.


@dataclasses.dataclass(frozen=True)
class Command:
    """What `--help` says about one program.

    Attributes:
        name: The sub-command.
        summary: What it does, one sentence.
        example: A command line that can be pasted.
        arguments: What stands behind the name.
    """

    name: str
    summary: str
    example: str
    arguments: str = "TASK.py [--flags]"


def define_choice(
    values: flags.FlagValues,
    name: str,
    default: str | None,
    choices: Mapping[str, str],
    text: str,
    *,
    if_absent: str | None = None,
) -> None:
    """Adds a flag that takes one of some words, of which `--help` explains each.

    Args:
        values: The flags.
        name: The flag's name.
        default: Its default.
        choices: What each word means.
        text: What the flag is for.
        if_absent: Which of them an absent flag means, where the default is None.
    """
    flags.DEFINE_enum(name, default, tuple(choices), text, values)
    values[name].meanings = choices
    values[name].if_absent = default or if_absent


def help_text(command: Command, values: flags.FlagValues) -> str:
    """Returns what `--help` shows, as wide as the terminal, or as a page."""
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    lines = [
        f"usage: tfparallel {command.name} {command.arguments}",
        "",
        "example:",
        # In one line, so that it can be pasted.
        f"  {command.example}",
        "",
        *textwrap.wrap(command.summary, width),
    ]
    for topic, names in _by_topic(values).items():
        lines += ["", f"{topic}:"]
        for name in names:
            lines += _described(values, name, width)
    return "\n".join(lines)


def _by_topic(values) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for topic, names in _TOPICS.items():
        of_topic = [name for name in names.split() if _is_shown(values, name)]
        if of_topic:
            found[topic] = of_topic
    others = [name for name in sorted(values) if name not in _TOPIC_OF and _is_shown(values, name)]
    return found | ({"Others": others} if others else {})


def _is_shown(values, name):
    # An alias stands beside the flag that it is another name of.
    return name in values and not _is_alias(values[name])


def _is_alias(flag) -> bool:
    return _text(flag).startswith("Alias for --")


def _text(flag) -> str:
    """What was written about a flag, without what absl adds: choices, and how to repeat it."""
    return re.sub(r"^<[^>]*>: |;\s+repeat this option to specify.*", "", flag.help, flags=re.DOTALL)


def _described(values, name, width) -> Iterator[str]:
    flag = values[name]
    aliases = [n for n in values if _is_alias(values[n]) and f"--{name}." in values[n].help]
    head = "  " + ", ".join([_head(flag), *(f"--{alias}" for alias in sorted(aliases))])
    meanings = getattr(flag, "meanings", {})
    # A default of 0 is worth telling, and equals False.
    is_told = flag.default is not None and flag.default is not False and flag.default != []
    is_told &= not meanings
    text = _text(flag) + (f" (default: {_as_typed(flag.default)})" if is_told else "")
    room = max(width - _COLUMN, 30)
    body = textwrap.wrap(text, room)
    longest = max(map(len, meanings), default=0)
    for word, meaning in meanings.items():
        first = f"  {word.ljust(longest)}  "
        meaning += " (default)" * (word == flag.if_absent)
        rest = " " * len(first)
        body += textwrap.wrap(
            meaning, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    if len(head) > _COLUMN - 2:
        yield head
    else:
        body[0] = head.ljust(_COLUMN) + body[0]
        yield body.pop(0)
    yield from (" " * _COLUMN + line for line in body)


def _head(flag) -> str:
    if flag.boolean:
        return f"--[no]{flag.name}" if flag.default is not False else f"--{flag.name}"
    return f"--{flag.name}={_placeholder(flag)}"


def _placeholder(flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices and not hasattr(flag, "meanings"):
        return "|".join(choices)
    if choices:
        return "NAME"
    if hasattr(flag.parser, "placeholder"):
        return flag.parser.placeholder
    if flag.name in _PLACEHOLDERS:
        return _PLACEHOLDERS[flag.name]
    if flag.name.endswith(("_timeout", "_seconds")):
        return "SECONDS"
    kind = flag.flag_type()
    if "list" in kind or "comma" in kind:
        return "A,B"
    return "N" if kind in ("int", "float") else "TEXT"


def _as_typed(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # With spaces, where a line may end.
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
