"""Train a small convolutional network on handwritten digits; the lines marked "# torchring" make it data-parallel.

    python examples/train_digits.py                               one process
    torchring run -np 2 examples/train_digits.py                  two processes
    torchrun --nproc-per-node 3 examples/train_digits.py          three processes

The 1797 images of 8x8 pixels come with scikit-learn. Each batch is divided among the ranks, so the number of steps does
not depend on the number of ranks. The exit code is 1 if the accuracy is below the target.
"""

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy, pad
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
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(128, 10),
    )  # fmt: skip


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move each image by at most one pixel in each direction, at random."""
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # an image at all of its 3 x 3 places
    y, x = torch.randint(3, (2, len(images)))
    return windows[torch.arange(len(images)), :, y, x]


@torch.no_grad()
def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """The accuracy on all of `test`. Every rank evaluates its share of the images; then the counts are added up."""
    model.eval()
    images, labels = test[torchring.rank() :: torchring.size()]  # torchring
    counts = torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels))])
    torchring.all_reduce(counts, op="sum")  # torchring
    model.train()
    return int(counts[0]) / int(counts[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs, 1 or more")
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, in all ranks together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach, else the exit code is 1")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {args.epochs}")
    torch.set_num_threads(1)  # more threads hardly speed up such a small model
    torch.manual_seed(args.seed + torchring.rank())  # torchring: each rank shifts and drops out differently

    train, test = load_data(args.seed)
    sampler = DistributedSampler(train, num_replicas=torchring.size(), rank=torchring.rank())  # torchring
    batches = DataLoader(train, batch_size=max(1, args.batch_size // torchring.size()), sampler=sampler)  # torchring
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = torchring.wrap(optimizer, model)  # torchring
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    is_first = torchring.rank() == 0  # torchring
    console = Console()
    accuracy, rates = 0.0, []
    with Progress(console=console, disable=not (is_first and console.is_terminal)) as progress:
        bar = progress.add_task("training", total=args.epochs * len(batches))
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # shuffle differently in each epoch, but alike on all ranks
            start = time.perf_counter()
            for images, labels in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(shifted(images)), labels)
                loss.backward()  # when this returns, gradients are means over all ranks
                optimizer.step()
                progress.advance(bar)
            rates.append(sampler.total_size / (time.perf_counter() - start))
            schedule.step()
            accuracy = evaluate(model, test)
            if is_first:
                print(f"epoch {epoch + 1:2}  test accuracy {accuracy:.2%}")

    if is_first:
        stats = optimizer.stats()
        print(f"accuracy               {accuracy:.2%} of {len(test)} test images")
        print(f"speed                  {statistics.median(rates):,.0f} images/s on {torchring.size()} rank(s)")
        print(f"exposed communication  {stats.mean_exposed_ms:.2f} ms per step")
        print(f"hidden by backward     {stats.overlap_ratio:.0%} of {stats.mean_communication_ms:.2f} ms")
        print(f"algorithm              {stats.algorithm}, {stats.overlap}, {stats.bytes_per_step:,} bytes per step")
        if accuracy < args.target:
            print(f"the accuracy should have reached {args.target:.0%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
