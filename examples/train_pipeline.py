"""Train with pipeline parallelism and data parallelism, in a mesh of two dimensions.

    torchring run -np 4 examples/train_pipeline.py     2 copies of the model, each in 2 stages
    python examples/train_pipeline.py                  one process; the losses differ by rounding only

The data are scikit-learn's handwritten digits. docs/guides/mesh.md explains the functions.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchring


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--micro-batches", type=int, default=4, help="per step")
    parser.add_argument("--model", default="pipeline", help="the files that are written at the end begin so")
    args = parser.parse_args()
    torchring.init(process_group=True)  # the mesh needs a process group of PyTorch's
    pp = min(2, torchring.size())
    mesh = init_device_mesh("cpu", (torchring.size() // pp, pp), mesh_dim_names=("dp", "pp"))

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDataset(
        images[:1440], labels[:1440]
    )  # 15 batches of 96 images: all micro-batches of a pipeline have one shape
    # The stages of a copy need the same images, those of a "dp" group need different ones.
    sampler = torchring.data.Sampler(data, global_batch=args.batch_size, group=mesh["dp"])
    batches = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)  # all ranks build the same model, and keep their part of it
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 10))
    # --8<-- [start:pp]
    index, count = mesh["pp"].get_local_rank(), mesh["pp"].size()
    first, last = (len(model) * i // count for i in (index, index + 1))
    part = model[first:last]
    group, num = mesh["pp"].get_group(), args.micro_batches
    stage = PipelineStage(part, index, count, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, num, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=args.lr)
    # Each micro-batch has a backward. The last one reduces gradients.
    optimizer = torchring.wrap(optimizer, part, group=mesh["dp"], accumulate=num)

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        inputs = [images] if stage.is_first else []
        target = labels if stage.is_last else None
        schedule.step(*inputs, target=target, losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean() if stage.is_last else torch.zeros(())
        return torchring.all_reduce(loss.detach(), op="sum", group=mesh["pp"])

    # --8<-- [end:pp]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric()
        for images, labels in batches:
            metrics.update({"loss": train_step(images, labels)})
        loss = metrics.compute()["loss"]
        if torchring.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)

    if torchring.rank(mesh["dp"]) == 0:  # each stage writes a file, with the parameters' names in the whole model
        torch.save(part.state_dict(), f"{args.model}-{index}.pt")


if __name__ == "__main__":
    main()
