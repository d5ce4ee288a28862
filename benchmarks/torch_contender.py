"""PyTorch's contender of `scaling.py`: the network of `workloads.build_cnn`, alone or under DDP.

Speaks as `contender.py` does, and runs in a Python that has PyTorch and NumPy.
"""

import json
import os
import sys
import time

import numpy as np
import torch
from torch import nn

SEED = 7
NUM_BATCHES = 16


def build_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main():
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**fields):
        print(json.dumps(fields), file=channel, flush=True)

    order = json.loads(sys.stdin.readline())
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = build_cnn()
    if order["kind"] == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss_of = nn.CrossEntropyLoss()
    size = int(order["workload"].rpartition("_")[2])
    generator = np.random.default_rng(SEED)
    x = torch.tensor(generator.standard_normal((NUM_BATCHES, size, 1, 28, 28)), dtype=torch.float32)
    y = torch.tensor(generator.integers(10, size=(NUM_BATCHES, size)))
    reply(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        torch=torch.__version__,
    )
    for line in sys.stdin:
        request = json.loads(line)
        ends, total, correct = [], 0.0, 0
        for step in range(request["steps"]):
            batch, labels = x[step % NUM_BATCHES], y[step % NUM_BATCHES]
            optimizer.zero_grad()
            logits = model(batch)
            loss = loss_of(logits, labels)
            loss.backward()
            optimizer.step()
            # What Keras's `fit` reports at every step: the running loss and accuracy.
            total += loss.item()
            correct += int((logits.argmax(1) == labels).sum())
            ends.append(time.perf_counter())
        ends = ends[max(request["skip"] - 1, 0) :]
        reply(
            step_seconds=[after - before for before, after in zip(ends, ends[1:], strict=False)],
            loss=total / request["steps"],
        )


if __name__ == "__main__":
    main()
