"""Parity on GPUs: every case and form, held against one GPU.

    python -m tests.parity.on_gpus --seconds=600 --json=rows.jsonl

The GPUs are split until there are four devices, TF32 is off and operations are deterministic. Of
several processes side by side each takes a share (`--share=0/8`) and `--memory_mib` a device.
Exit code 1 if a pair is not what its case says, or none ran. What one GPU
cannot do, an operation without a deterministic kernel, is nobody's fault: "one GPU fails".
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import warnings
import zlib

import tfparallel

NUM_DEVICES = 4
ONE_GPU_FAILS, WRONG = "one GPU fails", "wrong"


def four_gpus(memory_mib: int | None) -> list[str]:
    """Returns four logical GPUs, of one or several that this host has."""
    count = len(tfparallel.devices.list_devices("GPU"))
    if not count:
        print("skipped: parity on GPUs needs one that TensorFlow sees; this host shows none")
        sys.exit(0)
    parts = -(-NUM_DEVICES // count)
    if parts > 1 or memory_mib:
        for index in range(min(count, NUM_DEVICES)):
            names = tfparallel.devices.split_gpu(parts, memory_mib, f"GPU:{index}")
    else:
        names = tfparallel.devices.list_devices("GPU")
    return names[:NUM_DEVICES]


def rows(names: list[str], share: int, num_shares: int, seconds: float):
    """Yields (case, form, size, verdict, detail, seconds) for each pair of this share."""
    import tensorflow as tf

    from . import test_parity
    from .cases import ALL

    end = time.monotonic() + seconds
    # By the name's hash: each share, and the beginning of each, is a sample of all groups.
    cases = sorted(ALL, key=lambda case: zlib.crc32(case.name.encode()))[share::num_shares]
    for case in cases:
        if time.monotonic() > end:
            return
        failed = None
        try:
            test_parity.expected_of(case.name)
        except Exception as error:  # noqa: BLE001  (told, with what was tried)
            has_no_kernel = isinstance(error, tf.errors.UnimplementedError)
            failed = (ONE_GPU_FAILS if has_no_kernel else WRONG, said(error), 0.0)
        for form, size in test_parity.WAYS:
            if not case.runs_under(form) or time.monotonic() > end:
                continue
            begin = time.monotonic()
            if failed is not None:
                yield case.name, form, size, *failed
                break
            try:
                verdict, detail = test_parity.judge(case, test_parity.form_on(form, names, size))
            except Exception as error:  # noqa: BLE001  (a finding, and the next pair runs)
                verdict, detail = WRONG, said(error)
            yield case.name, form, size, verdict, detail, round(time.monotonic() - begin, 1)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, help="after which none begins")
    parser.add_argument("--share", default="0/1", help="which of how many")
    parser.add_argument("--memory_mib", type=int, help="of each device")
    parser.add_argument("--json", help="a file of one line for each pair")
    arguments = parser.parse_args()
    share, num_shares = map(int, arguments.share.split("/"))
    begin = time.monotonic()
    names = four_gpus(arguments.memory_mib)

    from tfparallel.diagnostics.check import make_deterministic

    make_deterministic()
    import keras

    keras.utils.set_random_seed(0)
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    remaining_seconds = arguments.seconds - (time.monotonic() - begin)
    with open(arguments.json or "/dev/null", "w") as file:
        for row in rows(names, share, num_shares, remaining_seconds):
            counts[row[3]] += 1
            print(json.dumps(row), file=file, flush=True)
            if row[3] == WRONG:
                print(*row[:3], row[4].splitlines()[0][:300], sep=" | ", flush=True)
    print(dict(counts))
    sys.exit(1 if counts[WRONG] or not counts.total() - counts[ONE_GPU_FAILS] else 0)


if __name__ == "__main__":
    main()
