"""Train a ResNet on a folder of images: workers that decode, augmentation, a schedule, evaluation, checkpoints.

    python examples/train_images.py                                       one process
    torchring run -np 2 examples/train_images.py                          two processes
    torchring run -np 3 examples/train_images.py --resume --epochs 12     goes on, with any number of processes
    torchring run -np 2 examples/train_images.py --data photos --size 64  your images: photos/train/cat/1.jpg, ...

Without --data, the script writes scikit-learn's handwritten digits as PNG files into the folder `digits`. A step uses
--batch-size images on any number of processes, so the learning rate need not change. Needs: pillow, scikit-learn.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

import torchring


class ImageFolder(Dataset):  # torchvision.datasets.ImageFolder(folder, transform) takes its place
    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        self.size, self.augment = size, augment
        self.classes = sorted(entry.name for entry in folder.iterdir())
        self.samples = [(file, n) for n, name in enumerate(self.classes) for file in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.samples[index]
        pixels = np.array(Image.open(file).convert("RGB").resize((self.size, self.size)))
        image = torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1
        if self.augment:  # move by a pixel at most; each worker of each rank draws its own numbers
            image = image.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (1, 2))
        return image, label


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out))
        self.conv2 = nn.Sequential(nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(num_in, num_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("digits"), help="folder with train/CLASS/ and test/CLASS/")
    parser.add_argument("--size", type=int, default=8, help="images are resized to SIZE x SIZE pixels")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96, help="images per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=1, help="processes of each rank that decode images")
    parser.add_argument("--checkpoint", default="images.pt", help="file that is written after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    torch.manual_seed(torchring.rank())  # augmentation differs; wrap() copies the model of rank 0 to all ranks
    if torchring.rank() == 0 and not args.data.exists():
        from sklearn.datasets import load_digits

        for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
            file = args.data / ("train" if number % 5 else "test") / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.reshape(8, 8) * 15.9).astype(np.uint8)).save(file)
    torchring.barrier()  # the other ranks go on when the files are there

    train, test = (ImageFolder(args.data / part, args.size, augment=part == "train") for part in ("train", "test"))
    sampler = torchring.data.Sampler(train, global_batch=args.batch_size)  # each image once an epoch, on one rank
    batches = DataLoader(train, batch_sampler=sampler, num_workers=args.workers)
    mine = Subset(test, range(torchring.rank(), len(test), torchring.size()))
    test_batches = DataLoader(mine, batch_size=64, num_workers=args.workers)

    model = nn.Sequential(  # for large images: torchvision.models.resnet18(num_classes=len(train.classes))
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(train.classes)),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer = torchring.wrap(optimizer, model)
    start = 0
    if args.resume:  # all ranks read the file
        checkpoint = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"] + 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / args.epochs, last_epoch=start - 1)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric()  # over the samples of all ranks
        for images, labels in batches:
            optimizer.zero_grad()
            optimizer.weigh(num_images := sampler.weight())  # the mean is over images: shares may differ by one
            loss = cross_entropy(model(images), labels)
            loss.backward()  # when this returns, gradients are means over all ranks
            optimizer.step()
            metrics.update({"loss": loss.detach()}, weight=num_images)
        schedule.step()
        model.eval()
        with torch.no_grad():
            for images, labels in test_batches:
                metrics.update({"accuracy": (model(images).argmax(1) == labels).float()})
        model.train()
        means = metrics.compute()
        if torchring.rank() == 0:
            print(f"epoch {epoch}: loss {means['loss']:.4f}, test accuracy {means['accuracy']:.2%}", flush=True)
            checkpoint = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(checkpoint, args.checkpoint)


if __name__ == "__main__":
    main()
