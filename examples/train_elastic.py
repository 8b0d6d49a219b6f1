"""Train on handwritten digits while processes come and go; the lines marked "# torchring" make that possible.

    torchring run --elastic -np 3 --min-np 1 --max-np 3 examples/train_elastic.py     kill any process: training goes on
    torchrun --nproc-per-node 2 --max-restarts 9 examples/train_elastic.py            all restart, from the checkpoint
    sbatch examples/slurm/requeue.sbatch                                              the same after a preemption
    sbatch examples/slurm/elastic.sbatch                                              training goes on without a node
    kubectl apply -f examples/kubernetes/job.yaml                                     the same in pods

A step uses 96 images, however many processes there are, and each image is used once in an epoch. So the accuracy does
not depend on who comes and goes. The exit code is 1 if the accuracy is below the target.
"""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchring  # torchring


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1437 images for training and 360 images for testing, the same on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return tuple(TensorDataset(images[part], torch.tensor(labels[part])) for part in (train, test))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


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
    parser = argparse.ArgumentParser(description="Train on handwritten digits while processes come and go.")
    parser.add_argument("--epochs", type=int, default=8, help="number of epochs, 1 or more")
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, in all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", metavar="DIR", help="write checkpoints there, and begin with the newest")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to have time to kill")
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy to reach, else the exit code is 1")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {args.epochs}")
    torch.set_num_threads(1)  # more threads hardly speed up such a small model
    torch.manual_seed(0)

    data, test = load_data()
    model = make_model()
    optimizer = torchring.wrap(torch.optim.AdamW(model.parameters(), lr=args.lr), model)  # torchring
    sampler = torchring.elastic.Sampler(data, global_batch=args.batch_size)  # torchring
    state = torchring.elastic.State(  # torchring
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        epoch=0,
        checkpoint=args.checkpoint,
        every=args.every,
    )

    @torchring.elastic.run  # torchring: calls train() again when ranks have changed
    def train(state: torchring.elastic.State) -> float:
        is_first = torchring.rank() == 0  # torchring
        if is_first:
            print(f"epoch {state.epoch}, image {sampler.position}: {torchring.size()} ranks", flush=True)
        batches = DataLoader(data, batch_sampler=sampler)  # torchring
        accuracy = evaluate(model, test)
        for state.epoch in range(state.epoch, args.epochs):  # torchring: goes on where the state is
            sampler.set_epoch(state.epoch)
            for images, labels in batches:
                optimizer.weigh(sampler.weight())  # torchring: shares of a step may differ by an image
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(args.pause)
            accuracy = evaluate(model, test)
            if is_first:
                print(f"epoch {state.epoch}: {accuracy:.2%} of the test images are right", flush=True)
        return accuracy

    return 0 if train(state) >= args.target else 1


if __name__ == "__main__":
    sys.exit(main())
