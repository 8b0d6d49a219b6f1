"""Train a small GPT on Python's own source code, character by character.

    python examples/train_char_gpt.py                             one process
    torchring run -np 2 examples/train_char_gpt.py                two processes

The lines marked "# torchring" make the training data-parallel. Accumulation, gradient clipping, warm-up and mixed
precision are written as for one process. At the end the model writes some code.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import torchring  # torchring

TRAINING_TEXT = """
    argparse ast calendar codecs configparser contextlib copy csv dataclasses difflib doctest enum ftplib functools
    gettext gzip inspect mailbox optparse os pickle platform pprint pydoc random shutil smtplib socket statistics
    string subprocess tarfile threading tokenize trace traceback typing uuid
"""
VALIDATION_TEXT = "bdb fractions pdb tempfile textwrap"  # other modules of the standard library


def read(modules: str) -> bytes:
    folder = Path(os.__file__).parent
    return "".join((folder / f"{name}.py").read_text("utf-8") for name in modules.split()).encode("ascii", "ignore")


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, num_characters: int, context: int, width: int = 64, num_heads: int = 4, num_layers: int = 2):
        super().__init__()
        self.characters, self.positions = nn.Embedding(num_characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.characters.weight, std=0.1)  # this is also the weight of the output layer
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.characters.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24, help="windows per step, of all ranks and micro-steps")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps per step")
    parser.add_argument("--context", type=int, default=64, help="number of characters that the model sees")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, where autocast allows")
    parser.add_argument("--checkpoint", default="gpt.pt", help="file that is written at the end")
    args = parser.parse_args()
    torch.manual_seed(torchring.rank())  # torchring: each rank draws windows of its own
    micro_batch_size = max(1, args.batch_size // (args.accumulate * torchring.size()))  # torchring

    train, test = read(TRAINING_TEXT), read(VALIDATION_TEXT)
    characters, ids = torch.frombuffer(bytearray(train + test), dtype=torch.uint8).unique(return_inverse=True)
    train_ids, test_ids = ids[: len(train)], ids[len(train) :]
    length = args.context + 1  # the targets are the inputs, shifted by one character
    test_windows = test_ids[: 512 * length].view(-1, length)[torchring.rank() :: torchring.size()]  # torchring

    model = CharGPT(len(characters), args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = torchring.wrap(optimizer, model, accumulate=args.accumulate)  # torchring
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    schedule = torchring.recipes.warm_up(schedule, steps=args.steps // 10 or 1)

    for step in range(args.steps):
        optimizer.zero_grad()
        for _ in range(args.accumulate):
            starts = torch.randint(len(train_ids) - length + 1, (micro_batch_size, 1))
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = model.loss(train_ids[starts + torch.arange(length)]) / args.accumulate
            loss.backward()  # after the last backward of a step, gradients are means over all ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == args.steps - 1:
            mean = torchring.all_reduce(loss.detach() * args.accumulate)  # torchring: only to print it
            if torchring.rank() == 0:  # torchring
                print(f"step {step:4}  loss {mean:.3f}  gradient norm {norm:.2f}", flush=True)

    metric = torchring.recipes.MeanMetric()  # torchring: the mean over the windows of all ranks
    with torch.no_grad():
        for windows in test_windows.split(64):
            metric.update({"loss": model.loss(windows)}, weight=len(windows))
    test_loss = metric.compute()["loss"]
    if torchring.rank() == 0:  # torchring
        print(f"test loss {test_loss:.3f}")
        torch.save({"model": model.state_dict(), "characters": characters}, args.checkpoint)
        written = (characters == ord("\n")).nonzero()[0]
        for _ in range(300):
            logits = model(written[None, -args.context :])[0, -1].detach()
            written = torch.cat([written, torch.multinomial(torch.softmax(logits / 0.8, 0), 1)])
        print(f"the model writes:\n{bytes(characters[written].tolist()).decode()}")


if __name__ == "__main__":
    main()
