"""Runs `tfparallel check` in two precisions, and writes `floor.json`."""

import json
import pathlib
import subprocess
import sys
import tempfile

TASK = "models/digits_cnn.py"
FLAGS = ("--parallel=data", "--num_devices=3", "--device_type=cpu", "--steps=200")
PRECISIONS = {"float32": (), "float64": ("--precision=float64",)}
KEPT = ("difference", "median_difference", "floor", "median_floor")


def condensed(reports):
    """What the picture shows of the reports of `check`, by their precision."""
    content = {"task": TASK, "reports": {}}
    for dtype, report in reports.items():
        versions = report["versions"]
        content["versions"] = f"TensorFlow {versions['tensorflow']}, Keras {versions['keras']}"
        content["reports"][dtype] = {
            "command": " ".join(["tfparallel check", TASK, *FLAGS, *PRECISIONS[dtype]]),
            **{name: report[name] for name in ("tolerance", "sharp_until")},
            "steps": [
                {"step": item["step"]} | {name: float(f"{item[name]:.4g}") for name in KEPT}
                for item in report["steps"]
            ],
        }
    return content


def main():
    """Runs both, some minutes in all; the figures do not depend on the machine's speed."""
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype, flags in PRECISIONS.items():
            path = pathlib.Path(folder) / f"{dtype}.json"
            command = [sys.executable, "-m", "tfparallel", "check", TASK, *FLAGS, *flags]
            subprocess.run([*command, f"--report={path}"], check=True)
            reports[dtype] = json.loads(path.read_text())
    write(reports)


def write(reports):
    """Writes them, a line a step."""
    text = json.dumps(condensed(reports), indent=1)
    text = text.replace("\n     ", " ").replace("\n    }", " }")
    pathlib.Path(__file__).with_name("floor.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
