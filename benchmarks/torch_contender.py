"""PyTorch's contender of `scaling.py`: the network of `workloads.build_cnn`, alone or under DDP.

Runs in a Python that has PyTorch and NumPy.
"""

import dialog
import numpy as np
import torch
from torch import nn

SEED = 7
NUM_BATCHES = 16


def build_cnn(num_units):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, num_units),
        nn.ReLU(),
        nn.Linear(num_units, 10),
    )


def main():
    order, reply = dialog.begin()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = build_cnn(1024 if order["workload"].startswith("wide") else 128)
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

    def step(index):
        batch, labels = x[index % NUM_BATCHES], y[index % NUM_BATCHES]
        optimizer.zero_grad()
        logits = model(batch)
        loss = loss_of(logits, labels)
        loss.backward()
        optimizer.step()
        # What Keras's `fit` reports at every step: the running loss and accuracy.
        int((logits.argmax(1) == labels).sum())
        return loss.item()

    dialog.serve_steps(reply, step)


if __name__ == "__main__":
    main()
