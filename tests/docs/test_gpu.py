"""The job of docs/gpu.md asks Slurm for what the page says; test_commands.py has its commands."""

import pathlib
import re

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_job_of_slurm_asks_for_what_the_page_says():
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)=(\S+)$", script, re.MULTILINE))
    assert int(options["--cpus-per-task"]) > 1 and options["--gpus-per-task"] == "1"
    assert re.search(
        r"^srun --cpus-per-task=\$SLURM_CPUS_PER_TASK --kill-on-bad-exit=1", script, re.M
    )
    assert all(f"`{option}" in PAGE for option in ("--cpus-per-task", "--kill-on-bad-exit=1"))
