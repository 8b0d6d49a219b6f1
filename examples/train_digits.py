"""Train a small convolutional network on handwritten digits; the lines marked "# torchring" make it data-parallel.

    python examples/train_digits.py                               one process
    torchring run -np 2 examples/train_digits.py                  two processes
    torchrun --nproc-per-node 3 examples/train_digits.py          three processes

The 1797 images of 8x8 pixels come with scikit-learn. Each batch is divided among the ranks, so the number of steps does
not depend on the number of ranks. The exit code is 1 if the accuracy is below the target.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchring  # torchring


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1437 images for training and 360 images for testing, the same on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    return tuple(TensorDataset(images[part], torch.tensor(labels[part])) for part in (train, test))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """The accuracy on all of `test`. Every rank evaluates its share of the images; then the right ones are added up."""
    model.eval()
    images, labels = test[torchring.rank() :: torchring.size()]  # torchring
    right = (model(images).argmax(1) == labels).sum()
    torchring.all_reduce(right, op="sum")  # torchring
    model.train()
    return right.item() / len(test)


def compare(file: Path, size: int, rate: float, accuracy: float, core: float) -> None:
    """Compare this run with the one that wrote `file`, or write `file`. `core`: how much of a core a process had."""
    if not file.exists():
        file.write_text(json.dumps([size, rate, accuracy, core]))
        return
    old_size, old_rate, old_accuracy, old_core = json.loads(file.read_text())
    same = "the same accuracy" if accuracy == old_accuracy else f"accuracy {accuracy:.2%} beside {old_accuracy:.2%}"
    print(f"{size} processes: {rate / old_rate:.1f} times the images per second of {old_size}, {same}")
    if min(core, old_core) < 0.9:
        print("This says little, as other programs used the cores meanwhile: run it again on an idle machine")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs")
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, in all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach, else the exit code is 1")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with the run that wrote FILE, or write FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads hardly speed up such a small model
    torch.manual_seed(args.seed)

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=torchring.size(), rank=torchring.rank())  # torchring
    batches = DataLoader(train, batch_size=max(1, args.batch_size // torchring.size()), sampler=sampler)  # torchring
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = torchring.wrap(optimizer, model)  # torchring
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    accuracy, rates, begun, begun_cpu = 0.0, [], time.perf_counter(), time.process_time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # shuffle differently in each epoch, but alike on all ranks
        start = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # when this returns, gradients are means over all ranks
            optimizer.step()
        rates.append(sampler.total_size / (time.perf_counter() - start))
        schedule.step()
        accuracy = evaluate(model, test)
        if torchring.rank() == 0:  # torchring
            print(f"epoch {epoch + 1:2}  test accuracy {accuracy:.2%}")

    core = torch.tensor((time.process_time() - begun_cpu) / (time.perf_counter() - begun))
    torchring.all_reduce(core, op="min")  # torchring
    if torchring.rank() == 0:  # torchring
        rate = statistics.median(rates)
        exposed, step = optimizer.stats().mean_exposed_ms, 1000 * args.batch_size / rate
        print(f"accuracy       {accuracy:.2%} of {len(test)} test images")
        print(f"speed          {rate:,.0f} images/s on {torchring.size()} rank(s)")
        print(f"communication  {exposed:.2f} ms of a step's {step:.1f} ms, waiting for other ranks included")
        if args.compare:
            compare(args.compare, torchring.size(), rate, accuracy, float(core))
        if accuracy < args.target:
            print(f"the accuracy should have reached {args.target:.0%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
