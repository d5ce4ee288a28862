"""`tfparallel trace FOLDER`: shows what each worker did last, and which one the others awaited."""

import json
import os
from collections.abc import Sequence

from absl import flags

from tfparallel.command_line.exits import UsageError
from tfparallel.flight.job import behind, chrome_trace, doing, elsewhere, read_job, splits


def problems(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the folder."""
    problems = []
    if len(positional) != 1:
        problems.append(
            "One folder is required, such as the --log_dir of `tfparallel launch`. Received: "
            f"{' '.join(positional) or 'none'}. Example: tfparallel trace logs"
        )
    elif not os.path.isdir(positional[0]):
        what = "is a file" if os.path.exists(positional[0]) else "does not exist"
        problems.append(
            f"The folder {what}; a folder with a job's records is required, such as the --log_dir "
            f"of `tfparallel launch`. Received: {positional[0]}. Check the path."
        )
    return problems


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Prints the last events of each worker, and returns the exit code."""
    try:
        records = read_job(positional[0])
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    culprits, why = behind(records)
    print(why)
    for record in records:
        sign = "*" if record.worker in culprits else " "
        ended = record.about.get("ended")
        last = "ended well" if ended == "well" else doing(record)
        print(f"{sign} worker {record.worker} on {record.about['host']}: {last}")
        if ended not in (None, "well"):
            print(f"      {ended.splitlines()[0].partition('. ')[0]}")
        if record.worker in culprits and record.stack:
            print("      " + "\n      ".join(record.stack.splitlines()))
    if others := elsewhere(records):
        print(f"  workers {', '.join(map(str, others))}: on other hosts, where their records are")
    for split in splits(records):
        print(f"  worker {split.worker}: {split}")
    if values.output is not None:
        with open(values.output, "w", encoding="utf-8") as file:
            json.dump(chrome_trace(records), file)
        print(f"wrote {values.output}")
    return 0
