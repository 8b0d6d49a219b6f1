"""Train from Parquet files, stop in the middle of an epoch, and go on at the same row with other processes.

    torchring run -np 2 examples/train_parquet.py --stop-after 5     stops after 5 steps; or press Ctrl-C
    torchring run -np 3 examples/train_parquet.py --resume           goes on where it stopped
    python examples/train_parquet.py                                 one process, from the start

The script writes scikit-learn's handwritten digits as Parquet files into the folder `digits-parquet`. It counts how
often each row was used in an epoch, and fails if that is not once. Needs: pyarrow, scikit-learn.
"""

import argparse
import signal
from pathlib import Path

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import torchring


def write_digits(folder: Path) -> None:
    pixels, labels = load_digits(return_X_y=True)
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), 4)):
        columns = {
            "row": pyarrow.array(rows),
            "pixels": pyarrow.FixedSizeListArray.from_arrays(pixels[rows].astype(np.float32).ravel(), 64),
            "label": pyarrow.array(labels[rows]),
        }
        # RowGroups reads a row group as a whole. In real files it has some 10 MB.
        parquet.write_table(pyarrow.table(columns), folder / f"part-{number}.parquet", row_group_size=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("digits-parquet"), help="folder that the script fills")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", default="parquet.pt", help="file that is written when training stops")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--model", default="parquet-model.pt", help="file that is written at the end")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="stop after so many steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    is_first = torchring.rank() == 0
    if is_first and not args.data.exists():
        args.data.mkdir(parents=True)
        write_digits(args.data)
    torchring.barrier()  # the other ranks go on when the files are there

    data = torchring.data.RowGroups(args.data, batch_size=args.batch_size // torchring.size())
    batches = DataLoader(data, batch_size=None)  # RowGroups makes batches, and reads ahead in a thread
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torchring.wrap(torch.optim.AdamW(model.parameters(), lr=args.lr), model)
    num_rows = sum(parquet.read_metadata(file).num_rows for file in args.data.iterdir())
    used = torch.zeros(num_rows, dtype=torch.int64)  # how often this rank has used each row of the epoch
    if args.resume:  # all ranks read the file
        checkpoint = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        data.load_state_dict(checkpoint["data"])
        used += checkpoint["used"] if is_first else 0
        if is_first:
            print(f"goes on in epoch {data.epoch} after {int(used.sum())} of {num_rows} rows", flush=True)

    stop = torch.zeros(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.fill_(1))
    step = 0  # of this start
    for epoch in range(data.epoch, args.epochs):
        data.set_epoch(epoch)
        metrics = torchring.recipes.MeanMetric()
        rows = iter(batches)
        while True:
            batch = next(rows, None)
            # Ranks may have a batch more or less, and may get the signal in different steps. They stop together.
            num_batches, stops = torchring.all_reduce(torch.tensor([float(batch is not None), float(stop)]), op="sum")
            if num_batches == 0:
                break
            optimizer.zero_grad()
            if batch is None:
                optimizer.skip()
            else:
                optimizer.weigh(len(batch["row"]))  # the mean is over rows: the last batches are smaller
                output = model(batch["pixels"] / 16)
                loss = cross_entropy(output, batch["label"])
                loss.backward()
                used[batch["row"]] += 1
                accuracy = (output.argmax(1) == batch["label"]).float()
                metrics.update({"loss": loss.detach(), "accuracy": accuracy.mean()}, weight=len(batch["row"]))
            optimizer.step()
            step += 1
            if stops or step == args.stop_after:
                torchring.all_reduce(used, op="sum")
                if is_first:
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**states, "data": data.state_dict(), "used": used}, args.checkpoint)
                    print(f"stopped in epoch {epoch} after {int(used.sum())} of {num_rows} rows")
                return
        torchring.all_reduce(used, op="sum")
        if (used != 1).any():
            raise RuntimeError(f"rows {(used != 1).nonzero().flatten().tolist()} of epoch {epoch} were not used once")
        used.zero_()
        means = metrics.compute()
        if is_first and means:  # none if this start went on at the end of an epoch
            print(f"epoch {epoch}: loss {means['loss']:.3f}, accuracy {means['accuracy']:.1%} in training", flush=True)
        if is_first:
            print(f"each of {num_rows} rows was used once", flush=True)
    if is_first:
        torch.save(model.state_dict(), args.model)


if __name__ == "__main__":
    main()
