"""Train a small network in two dimensions: torchring averages gradients over "dp", PyTorch has the other dimension.

    torchring run -np 4 examples/train_mesh.py tp      tensor parallelism: each layer is cut in two
    torchring run -np 4 examples/train_mesh.py pp      pipeline parallelism: two stages
    torchring run -np 4 examples/train_mesh.py ep      expert parallelism: each rank has one of two experts
    torchring run -np 4 examples/train_mesh.py fsdp    two ranks have a half of each parameter; two such pairs
    python examples/train_mesh.py tp                   one process, with the same losses

docs/guides/mesh.md explains the functions.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import torchring

Step = Callable[[Tensor, Tensor], Tensor]  # runs forward and backward, and returns the loss
Parts = tuple[list[torchring.DistributedOptimizer], Step]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Two blocks. Each sample goes to the rank that has its expert, and comes back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.router, both = mesh, nn.Linear(16, 2), [Block(), Block()]
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


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def ordinary(model: nn.Module) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return step


# --8<-- [start:tp]
def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> Parts:
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return [torchring.wrap(adamw([*model.parameters()]), model, group=mesh["dp"])], ordinary(model)


# --8<-- [end:tp]
# --8<-- [start:pp]
def pipeline_parallel(model: nn.Sequential, mesh: DeviceMesh) -> Parts:
    index, count, micro_batches = mesh["pp"].get_local_rank(), mesh["pp"].size(), 4
    part = model[index * len(model) // count : (index + 1) * len(model) // count]
    stage = PipelineStage(part, index, count, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=mse_loss)
    # Each micro-batch has a backward of its own. Gradients are reduced in the last one.
    optimizer = torchring.wrap(adamw([*part.parameters()]), part, group=mesh["dp"], accumulate=micro_batches)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(*[x][index:], target=y if stage.is_last else None, losses=losses)
        loss = torch.stack(losses).mean() if stage.is_last else torch.zeros(())
        return torchring.all_reduce(loss.detach(), op="sum", group=mesh["pp"])

    return [optimizer], step


# --8<-- [end:pp]
# --8<-- [start:ep]
def expert_parallel(model: nn.Sequential, mesh: DeviceMesh) -> Parts:
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    for p in experts:  # which get gradients of the losses of all ranks of mesh["ep"]: their mean is wanted
        p.register_hook(lambda grad: grad / mesh["ep"].size())
    optimizers = [
        torchring.wrap(adamw(experts), model, group=mesh["dp"]),  # the ranks that have the same expert
        torchring.wrap(adamw(others), model),  # all ranks
    ]
    return optimizers, ordinary(model)


# --8<-- [end:ep]
# --8<-- [start:fsdp]
def sharded(model: nn.Sequential, mesh: DeviceMesh) -> Parts:
    for module in (*model[1:3], model):
        fully_shard(module, mesh=mesh["fsdp"])
    return [torchring.wrap(adamw([*model.parameters()]), model, group=mesh["dp"])], ordinary(model)


# --8<-- [end:fsdp]
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"tp": tensor_parallel, "pp": pipeline_parallel, "ep": expert_parallel, "fsdp": sharded}
    parser.add_argument("kind", choices=kinds)
    kind = parser.parse_args().kind
    torch.set_num_threads(1)
    torchring.init(process_group=True)
    inner = min(2, torchring.size())
    mesh = init_device_mesh("cpu", (torchring.size() // inner, inner), mesh_dim_names=("dp", kind))

    torch.manual_seed(0)  # all ranks build the same model
    x = torch.randn(64, 8)
    y = x.prod(1, keepdim=True).sign()
    blocks = [Experts(mesh[kind]) if kind == "ep" else Block() for _ in range(2)]
    optimizers, step = kinds[kind](nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1)), mesh)

    # Ranks that compute one forward together have the same data. With experts or FSDP, each rank has data of its own.
    group = mesh["dp"] if kind in ("tp", "pp") else None
    x, y = (each[torchring.rank(group) :: torchring.size(group)] for each in (x, y))
    for number in range(1, 21):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = torchring.all_reduce(step(x, y), group=group)
        for optimizer in optimizers:
            optimizer.step()
        if torchring.rank() == 0 and number % 10 == 0:
            print(f"step {number}: loss {loss:.5f}")


if __name__ == "__main__":
    main()
