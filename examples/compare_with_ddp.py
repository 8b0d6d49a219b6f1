"""Train the same network twice, with torch's DistributedDataParallel (DDP) and with torchring, and compare the two.

    torchring run -np 2 examples/compare_with_ddp.py             two processes
    torchrun --nproc-per-node 3 examples/compare_with_ddp.py     three processes
    python examples/compare_with_ddp.py                          one process, without communication

Both trainings start from the same parameters and see the same batches. They take turns step by step, so that other load
on the machine slows down both. The exit code is 1 if the results differ:

- With one or two ranks every loss and every parameter has to be equal bit by bit. Halving a gradient is exact, and the
  sum of two numbers does not depend on their order.
- With more ranks DDP and torchring add gradients in different orders, so every step rounds differently. A loss may then
  differ by one fp32 rounding (of the first loss) for each rank and each step so far. A parameter may differ by as many
  roundings of the largest parameter. This bound holds because the network is smooth and its training is stable.
"""

import argparse
import copy
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import torchring

NUM_INPUTS, NUM_CLASSES = 32, 10
NUM_WARMUP = 3  # first steps, which are not timed: DDP and torchring build their buckets in these steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help=f"more than {NUM_WARMUP}, which are not timed")
    parser.add_argument("--batch-size", type=int, default=32, help="number of inputs per step and rank")
    parser.add_argument("--width", type=int, default=768, help="width of the three hidden layers")
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as torchrun sets it
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # there is no launcher
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0

    torch.manual_seed(0)  # the same network on every rank ...
    teacher, layers = torch.randn(NUM_INPUTS, NUM_CLASSES), []
    for num_inputs in (NUM_INPUTS, args.width, args.width):
        layers += [nn.Linear(num_inputs, args.width), nn.Tanh()]
    models = {"DDP": nn.Sequential(*layers, nn.Linear(args.width, NUM_CLASSES))}
    models["torchring"] = copy.deepcopy(models["DDP"])
    torch.manual_seed(1 + dist.get_rank())  # ... and different data

    optimizers = {name: torch.optim.SGD(models[name].parameters(), lr=args.lr, momentum=0.9) for name in models}
    wrapped = DistributedDataParallel(models["DDP"], gradient_as_bucket_view=True)
    optimizers["torchring"] = torchring.wrap(optimizers["torchring"], models["torchring"])
    forwards = {"DDP": wrapped, "torchring": models["torchring"]}

    losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    times_ms: dict[str, list[float]] = {name: [] for name in models}
    for step in range(args.steps):
        inputs = torch.randn(args.batch_size, NUM_INPUTS)
        labels = (inputs @ teacher).argmax(1)
        for name in models if step % 2 == 0 else reversed(models):
            dist.barrier()  # the time of a step should not include waiting for ranks that start late
            start = time.perf_counter()
            optimizers[name].zero_grad()
            loss = cross_entropy(forwards[name](inputs), labels)
            loss.backward()
            optimizers[name].step()
            times_ms[name].append((time.perf_counter() - start) * 1e3)
            losses[name].append(loss.detach())

    # Losses are means over ranks, differences are the largest of all ranks.
    of_ddp, of_torchring = (torchring.all_reduce(torch.stack(losses[name])) for name in models)
    rounding = num_ranks * torch.finfo(torch.float32).eps if num_ranks > 2 else 0.0  # of one step; see above
    parameters, others = (parameters_to_vector(model.parameters()).detach() for model in models.values())
    found = torchring.all_reduce(torch.stack([(parameters - others).abs().max(), parameters.abs().max()]), op="max")
    difference, largest = found.tolist()
    is_equal = (of_ddp - of_torchring).abs() <= torch.arange(args.steps) * rounding * of_ddp[0]  # false for NaN, too
    if is_first:
        print(f"{'step':>10}  {'DDP':>10}  {'torchring':>10}")
        for step in range(0, args.steps, max(1, args.steps // 8)):
            print(f"{step:10}  {of_ddp[step]:10.6f}  {of_torchring[step]:10.6f}")
        for name, times in times_ms.items():
            print(f"{name:10}  {statistics.median(times[NUM_WARMUP:]):.2f} ms per step on {num_ranks} rank(s)")
        print(f"parameters differ by {difference:.1e} at most" if difference else "parameters are equal bit by bit")
    torchring.shutdown()
    dist.destroy_process_group()
    if not is_equal.all() or not difference <= args.steps * rounding * largest:
        wrong = (~is_equal).nonzero().flatten().tolist()
        sys.exit(
            f"torchring does not compute what DDP computes: losses of steps {wrong}, parameters by {difference:.1e}"
        )
    if is_first:
        print("torchring computes what DDP computes")


if __name__ == "__main__":
    main()
