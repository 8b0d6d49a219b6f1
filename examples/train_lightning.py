"""Train with Lightning: `import torchring.lightning` and `Trainer(strategy="torchring")`, nothing else is torchring's.

    python examples/train_lightning.py                       one process
    torchring run -np 2 examples/train_lightning.py          two processes

The Trainer shares out the data, averages what is logged with sync_dist=True, and writes checkpoints on rank 0.
Needs: lightning, scikit-learn.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchring.lightning  # noqa: F401 - this registers the strategy


class Digits(lightning.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        same_on_all_ranks = torch.Generator().manual_seed(0)
        self.train, self.test = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2], same_on_all_ranks)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 256)


class Classifier(lightning.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=48, help="images per step of each rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", default="lightning-checkpoints", help="folder of the checkpoint")
    parser.add_argument("--resume", metavar="FILE", help="go on from this checkpoint")
    args = parser.parse_args()
    lightning.seed_everything(0)

    best = ModelCheckpoint(args.out, "best", monitor="accuracy", mode="max", enable_version_counter=False)
    trainer = lightning.Trainer(
        strategy="torchring",
        max_epochs=args.epochs,
        callbacks=[best],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args.lr), Digits(args.batch_size), ckpt_path=args.resume)
    if trainer.is_global_zero:
        print(f"accuracy {float(best.best_model_score):.2%}, in {best.best_model_path}")


if __name__ == "__main__":
    main()
