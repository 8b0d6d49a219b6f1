"""Train a mixture of two experts with expert parallelism and data parallelism, in a mesh of two dimensions.

    torchring run -np 4 examples/train_experts.py     each rank has one expert, each expert is on 2 ranks
    python examples/train_experts.py                  one process; the losses differ by rounding only

The data are scikit-learn's handwritten digits. docs/guides/mesh.md explains the functions.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchring


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Two blocks. Each sample goes to the rank that has its expert, and comes back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.router, both = mesh, nn.Linear(64, 2), [Block(), Block()]
        self.experts = nn.ModuleList(both if mesh.size() == 1 else both[mesh.get_local_rank() :][:1])

    def forward(self, x: Tensor) -> Tensor:
        gate, expert = self.router(x).softmax(-1).max(-1)
        order, to_expert = expert.argsort(stable=True), expert.bincount(minlength=2)
        dist.all_to_all_single(came := torch.empty_like(to_expert), to_expert, group=self.mesh.get_group())
        sent, got = (counts.view(self.mesh.size(), -1).sum(1).tolist() for counts in (to_expert, came))
        x = all_to_all_single_autograd(x[order], got, sent, self.mesh.get_group())
        shares = x.split(came.tolist()) if len(self.experts) == 2 else [x]
        x = torch.cat([block(share) for block, share in zip(self.experts, shares, strict=True)])
        x = all_to_all_single_autograd(x, sent, got, self.mesh.get_group())
        return torch.empty_like(x).index_copy(0, order, x) * gate.unsqueeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--model", default="experts", help="the files that are written at the end begin so")
    args = parser.parse_args()
    torchring.init(process_group=True)  # the mesh needs a process group of PyTorch's
    ep = min(2, torchring.size())
    mesh = init_device_mesh("cpu", (torchring.size() // ep, ep), mesh_dim_names=("dp", "ep"))

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDataset(images[:1440], labels[:1440])  # 15 batches of 96 images, so that ranks have equal shares
    sampler = torchring.data.Sampler(data, global_batch=args.batch_size)  # each rank has images of its own
    batches = DataLoader(data, batch_sampler=sampler)

    torch.manual_seed(0)  # all ranks build the same model, and keep their part of it
    model = nn.Sequential(Experts(mesh["ep"]), nn.Linear(64, 10))
    # --8<-- [start:ep]
    experts = list(model[0].experts.parameters())
    others = [*model[0].router.parameters(), *model[1].parameters()]
    for p in experts:  # they get the sum of gradients of mesh["ep"]'s ranks
        p.register_hook(lambda grad: grad / mesh["ep"].size())
    optimizer1 = torch.optim.AdamW(experts, lr=args.lr)
    optimizer2 = torch.optim.AdamW(others, lr=args.lr)
    optimizers = [
        torchring.wrap(optimizer1, model, group=mesh["dp"]),  # same expert
        torchring.wrap(optimizer2, model),  # all ranks
    ]
    # --8<-- [end:ep]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric()
        for images, labels in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            metrics.update({"loss": loss.detach()})
        loss = metrics.compute()["loss"]
        if torchring.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)

    if torchring.rank(mesh["dp"]) == 0:  # a file for each expert; the rest of the model is the same in both
        torch.save(model.state_dict(), f"{args.model}-{torchring.rank(mesh['ep'])}.pt")


if __name__ == "__main__":
    main()
