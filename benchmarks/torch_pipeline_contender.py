"""PyTorch's contenders of `pipeline.py` and `sharded.py`: the same transformer.

It runs alone, in the two stages of `torch.distributed.pipelining`, or on two workers: under
DistributedDataParallel (`ddp`) or FSDP2 (`fsdp`), with one unit per block. Processes are connected
by gloo. Runs in a Python that has PyTorch and NumPy.
"""

import dialog
import numpy as np
import torch
from torch import nn
from torch.nn import functional

SEED = 7
NUM_BYTES, SEQUENCE_LENGTH, NUM_SEQUENCES = 256, 64, 64
WIDTH, NUM_HEADS, NUM_BLOCKS = 384, 6, 6
NUM_BATCHES = 8


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a layer normalization."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


def parts():
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    half = NUM_BLOCKS // 2
    first = nn.Sequential(nn.Embedding(NUM_BYTES, WIDTH), *blocks[:half])
    last = nn.Sequential(*blocks[half:], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_BYTES))
    return [first, last]


def on_workers(kind):
    """The model, on all processes of the job."""
    torch.distributed.init_process_group("gloo")
    model = nn.Sequential(*parts())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(logits, y):
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main():
    order, reply = dialog.begin()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    is_pipeline = order["kind"] == "torch_pipeline"
    rank, schedule = 0, None
    if is_pipeline:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model = parts()[rank]
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, int(order["workload"]), loss_fn=loss_of)
    elif order["kind"] in ("ddp", "fsdp"):
        model = on_workers(order["kind"])
    else:
        model = nn.Sequential(*parts())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    generator = np.random.default_rng(SEED)
    size = (NUM_BATCHES, NUM_SEQUENCES, SEQUENCE_LENGTH)
    x, y = (torch.tensor(generator.integers(NUM_BYTES, size=size)) for _ in range(2))
    if order["kind"] in ("ddp", "fsdp"):  # A worker's rows.
        rank, number = torch.distributed.get_rank(), torch.distributed.get_world_size()
        x, y = (each.chunk(number, dim=1)[rank] for each in (x, y))
    reply(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        torch=torch.__version__,
    )

    def pipeline_step(batch, labels):
        if rank == 0:
            schedule.step(batch)
            return 0.0, 0
        losses = []
        logits = schedule.step(target=labels, losses=losses)
        # What Keras's `fit` reports at every step: the running loss and accuracy.
        return torch.stack(losses).mean().item(), int((logits.argmax(-1) == labels).sum())

    def plain_step(batch, labels):
        logits = model(batch)
        loss = loss_of(logits, labels)
        loss.backward()
        return loss.item(), int((logits.argmax(-1) == labels).sum())

    def step(index):
        optimizer.zero_grad()
        run = pipeline_step if is_pipeline else plain_step
        loss, _ = run(x[index % NUM_BATCHES], y[index % NUM_BATCHES])
        optimizer.step()
        if is_pipeline:  # Keras's `fit` ends a step once all of it is done.
            torch.distributed.barrier()
        return loss

    dialog.serve_steps(reply, step)


if __name__ == "__main__":
    main()
