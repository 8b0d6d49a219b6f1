"""Train with FSDP inside a machine and data parallelism between machines, in a mesh of two dimensions.

    torchring run -np 4 examples/train_fsdp.py     2 copies of the model, each in halves on 2 ranks
    python examples/train_fsdp.py                  one process; the losses differ by rounding only

The data are scikit-learn's handwritten digits. docs/guides/mesh.md explains the functions.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
    parser.add_argument("--model", default="fsdp.pt", help="file that is written at the end")
    args = parser.parse_args()
    torchring.init(process_group=True)  # the mesh needs a process group of PyTorch's
    fsdp = min(2, torchring.size())
    mesh = init_device_mesh("cpu", (torchring.size() // fsdp, fsdp), mesh_dim_names=("dp", "fsdp"))

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDataset(images[:1440], labels[:1440])  # 15 batches of 96 images, so that ranks have equal shares
    sampler = torchring.data.Sampler(data, global_batch=args.batch_size)  # each rank has images of its own
    batches = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)  # all ranks build the same model, and keep their parts of it
    model = nn.Sequential(Block(), Block(), nn.Linear(64, 10))
    # --8<-- [start:fsdp]
    for module in (*model[:2], model):
        fully_shard(module, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = torchring.wrap(optimizer, model, group=mesh["dp"])
    # --8<-- [end:fsdp]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            metrics.update({"loss": loss.detach()})
        loss = metrics.compute()["loss"]
        if torchring.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # all ranks call it
    if torchring.rank() == 0:
        torch.save(state, args.model)  # loads into the model of one process


if __name__ == "__main__":
    main()
