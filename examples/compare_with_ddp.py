"""Train the same network twice, with torch's DistributedDataParallel and with torchring, and compare the two.

    torchring run -np 2 examples/compare_with_ddp.py
    torchrun --nproc-per-node 3 examples/compare_with_ddp.py
    python examples/compare_with_ddp.py                           one process, without communication

Both trainings start from the same parameters and see the same batches. They take turns step by step, so that other load
on the machine slows down both. The exit code is 1 if the results differ:

- With one or two ranks every loss and every parameter has to be equal bit by bit. Halving a gradient is exact, and the
  sum of two numbers does not depend on their order.
- With more ranks DDP and torchring add gradients in different orders, so every step rounds differently. A loss may then
  differ by one fp32 rounding (of the first loss) for each rank and each step so far. A parameter may differ by as many
  roundings of the largest parameter. This bound holds because the network is smooth and its training is stable. With
  ReLU, one rounding can switch a unit off, and the difference then keeps growing.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import torchring

NUM_INPUTS, NUM_CLASSES = 32, 10
NUM_WARMUP = 3  # first steps, which are not timed: DDP and torchring build their buckets in these steps


def rounding_bound(num_steps: int, num_ranks: int, largest: float) -> float:
    """The largest allowed difference of two values after `num_steps` steps; see the top of this file."""
    return num_steps * num_ranks * torch.finfo(torch.float32).eps * largest if num_ranks > 2 else 0.0


def find_difference(expected: Sequence[float], actual: Sequence[float], num_ranks: int) -> str | None:
    """Compare two loss curves. Describes the first difference that rounding does not explain; None without any."""
    if len(expected) != len(actual):
        return f"one curve has {len(expected)} losses, the other {len(actual)}"
    for step, (a, b) in enumerate(zip(expected, actual, strict=True)):
        bound = rounding_bound(step, num_ranks, expected[0])
        if not abs(a - b) <= bound:  # false for NaN too
            return f"step {step}: loss {a!r} with DDP, {b!r} with torchring; they may differ by {bound:.1e}"
    return None


def compare_parameters(first: nn.Module, second: nn.Module) -> tuple[float, float]:
    """The largest difference between parameters, and the largest parameter, over all ranks."""
    a, b = (nn.utils.parameters_to_vector(model.parameters()).detach() for model in (first, second))
    largest = torch.stack([(a - b).abs().max(), a.abs().max()])
    return tuple(torchring.all_reduce(largest, op="max").tolist())


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, width), nn.Tanh(),
        nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, NUM_CLASSES),
    )  # fmt: skip


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., tuple[torch.Tensor, float]]:
    """Make a function that trains on one batch, and returns the loss and the time in milliseconds."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        dist.barrier()  # the time of a step should not include waiting for ranks that start late
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach(), (time.perf_counter() - start) * 1e3

    return step


def mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    return torchring.all_reduce(torch.stack(losses)).tolist()


def describe(name: str, times_ms: list[float]) -> str:
    timed = times_ms[NUM_WARMUP:]
    low, *_, high = statistics.quantiles(timed, n=5) if len(timed) > 1 else (timed[0], timed[0])
    return f"{name:10} {statistics.median(timed):8.2f} ms per step (20% to 80%: {low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare torchring with DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="number of inputs per step and rank")
    parser.add_argument("--width", type=int, default=768, help="width of the three hidden layers")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps <= NUM_WARMUP:
        parser.error(
            f"--steps must be more than {NUM_WARMUP}, as the first {NUM_WARMUP} steps are not timed; got {args.steps}"
        )

    torch.set_num_threads(1)  # as torchrun sets it
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # there is no launcher
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_first = dist.get_rank() == 0

    torch.manual_seed(args.seed)  # the same network on every rank ...
    teacher = torch.randn(NUM_INPUTS, NUM_CLASSES)
    ddp_model = make_model(args.width)
    ring_model = copy.deepcopy(ddp_model)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # ... and different data

    ddp_step = make_step(
        DistributedDataParallel(ddp_model, gradient_as_bucket_view=True),
        torch.optim.SGD(ddp_model.parameters(), lr=args.lr, momentum=0.9),
    )
    ring_optimizer = torchring.wrap(torch.optim.SGD(ring_model.parameters(), lr=args.lr, momentum=0.9), ring_model)
    ring_step = make_step(ring_model, ring_optimizer)

    results: dict[str, list[tuple[torch.Tensor, float]]] = {"ddp": [], "ring": []}
    console = Console()
    with Progress(console=console, disable=not (is_first and console.is_terminal)) as progress:
        for i in progress.track(range(args.steps), description="training twice"):
            inputs = torch.randn(args.batch_size, NUM_INPUTS)
            labels = (inputs @ teacher).argmax(1)
            turns = [("ddp", ddp_step), ("ring", ring_step)]
            for name, step in turns if i % 2 == 0 else reversed(turns):
                results[name].append(step(inputs, labels))

    ddp_losses, ring_losses = (mean_over_ranks([loss for loss, _ in results[name]]) for name in results)
    difference, largest = compare_parameters(ddp_model, ring_model)
    bound = rounding_bound(args.steps, dist.get_world_size(), largest)
    if is_first:
        print(f"{'step':>10}  {'DDP':>10}  {'torchring':>10}  {'difference':>10}")
        for i in sorted({*range(0, args.steps, max(1, args.steps // 8)), args.steps - 1}):
            print(f"{i:10}  {ddp_losses[i]:10.6f}  {ring_losses[i]:10.6f}  {ring_losses[i] - ddp_losses[i]:10.1e}")
        for name, key in (("DDP", "ddp"), ("torchring", "ring")):
            print(describe(name, [ms for _, ms in results[key]]))
        stats = ring_optimizer.stats()
        print(f"{'':10} on {dist.get_world_size()} rank(s); torchring reduces {stats.algorithm}, {stats.overlap}")
        found = f"differ by at most {difference:.1e}, of {bound:.1e} allowed" if difference else "are equal bit by bit"
        print(f"parameters {found}")

    problem = find_difference(ddp_losses, ring_losses, dist.get_world_size())
    if problem is None and not difference <= bound:
        problem = f"parameters differ by {difference:.1e} after {args.steps} steps; they may differ by {bound:.1e}"
    torchring.shutdown()
    dist.destroy_process_group()
    if is_first and problem:
        print(f"torchring does not compute what DDP computes: {problem}", file=sys.stderr)
        return 1
    if is_first:
        print("torchring computes what DDP computes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
