"""Train a small decoder-only transformer on Python's own source code, character by character.

    python examples/train_char_gpt.py                             one process
    torchring run -np 2 examples/train_char_gpt.py                two processes
    torchrun --nproc-per-node 3 examples/train_char_gpt.py        three processes

The lines marked "# torchring" make the training data-parallel. Accumulation, gradient clipping, warm-up and mixed
precision are written as for one process: when the last backward() of a step returns, gradients are means over all
ranks.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import torchring  # torchring

# The model trains on the source of some modules of the standard library, and is tested on the source of others.
TRAINING_TEXT = """
    argparse ast calendar codecs configparser contextlib copy csv dataclasses difflib doctest enum ftplib functools
    gettext gzip inspect mailbox optparse os pickle platform pprint pydoc random shutil smtplib socket statistics
    string subprocess tarfile threading tokenize trace traceback typing uuid
"""
VALIDATION_TEXT = "bdb fractions pdb tempfile textwrap"


def read(modules: str) -> bytes:
    folder = os.path.dirname(os.__file__)
    sources = [Path(folder, f"{name}.py").read_text(encoding="utf-8") for name in modules.split()]
    return "".join(sources).encode("ascii", errors="ignore")


class Block(nn.Module):
    """Causal self-attention, then a two-layer network, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, num_characters: int, context: int, width: int = 64, num_heads: int = 4, num_layers: int = 2):
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.characters.weight, std=0.1)  # this is also the weight of the output layer
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.characters.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, in nats, of predicting each character of `windows` from the characters before it."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def random_windows(ids: torch.Tensor, num_windows: int, length: int) -> torch.Tensor:
    starts = torch.randint(len(ids) - length + 1, (num_windows, 1))
    return ids[starts + torch.arange(length)]


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def is_bf16_faster(model: CharGPT, windows: torch.Tensor) -> bool:
    """Whether bf16 takes at most 80% of the time of fp32, which depends on the processor and on the model's size."""
    seconds = torch.full((2, 5), math.inf)
    for i in range(seconds.shape[1]):
        for enabled in (False, True):
            start = time.perf_counter()
            with autocast(enabled):
                loss = model.loss(windows)
            torch.autograd.grad(loss, list(model.parameters()))
            seconds[int(enabled), i] = time.perf_counter() - start
    fp32, bf16 = torchring.all_reduce(seconds.amin(1)).tolist()  # torchring: all ranks make the same decision
    return bf16 < 0.8 * fp32


@torch.no_grad()
def evaluate(model: CharGPT, windows: torch.Tensor) -> float:
    """The mean loss over `windows`. Every rank computes its share; sums and counts are added up."""
    mine = windows[torchring.rank() :: torchring.size()]  # torchring
    total = torch.tensor([sum(float(model.loss(part)) * len(part) for part in mine.split(64)), len(mine)])
    torchring.all_reduce(total, op="sum")  # torchring
    return float(total[0] / total[1])


@torch.no_grad()
def sample(model: CharGPT, ids: torch.Tensor, num_characters: int) -> torch.Tensor:
    """Continue `ids` by `num_characters` characters."""
    for _ in range(num_characters):
        logits = model(ids[None, -model.context :])[0, -1]
        ids = torch.cat([ids, torch.multinomial(torch.softmax(logits / 0.8, 0), 1)])
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small transformer on Python's own source code.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24, help="windows per step, over all ranks and micro-steps")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps per step")
    parser.add_argument("--context", type=int, default=64, help="number of characters that the model sees")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--amp", choices=("auto", "on", "off"), default="auto", help="bf16 autocast; auto: if faster")
    parser.add_argument("--sample", type=int, default=400, help="number of characters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads hardly speed up such a small model
    torch.manual_seed(args.seed + torchring.rank())  # torchring: each rank draws windows of its own
    is_first = torchring.rank() == 0  # torchring
    micro_batch_size = max(1, args.batch_size // (args.accumulate * torchring.size()))  # torchring

    train, validation = read(TRAINING_TEXT), read(VALIDATION_TEXT)
    characters, ids = torch.frombuffer(bytearray(train + validation), dtype=torch.uint8).unique(return_inverse=True)
    train_ids, validation_ids = ids[: len(train)], ids[len(train) :]
    length = args.context + 1  # the targets are the inputs, shifted by one character
    validation_windows = validation_ids[: 512 * length].view(-1, length)

    model = CharGPT(len(characters), args.context)
    use_bf16 = args.amp == "on"
    if args.amp == "auto":
        use_bf16 = is_bf16_faster(model, random_windows(train_ids, micro_batch_size, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = torchring.wrap(optimizer, model, accumulate=args.accumulate)  # torchring
    num_warmup = max(1, args.steps // 10)

    def lr_factor(step: int) -> float:
        """Linear warm-up over the first tenth of the steps, then half a cosine down to 0."""
        return min((step + 1) / num_warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    first_loss = evaluate(model, validation_windows)
    if is_first:
        print(f"{len(train):,} characters, {sum(p.numel() for p in model.parameters()):,} parameters")
        print(f"{torchring.size()} rank(s) x {args.accumulate} micro-steps x {micro_batch_size} windows per step")
        print(f"computing in {'bf16, where autocast allows' if use_bf16 else 'fp32'}")

    console = Console()
    start = time.perf_counter()
    with Progress(console=console, disable=not (is_first and console.is_terminal)) as progress:
        for step in progress.track(range(args.steps), description="training"):
            optimizer.zero_grad()
            step_loss = torch.zeros(())
            for _ in range(args.accumulate):
                windows = random_windows(train_ids, micro_batch_size, length)
                with autocast(use_bf16):
                    loss = model.loss(windows) / args.accumulate
                loss.backward()  # after the last backward of a step, gradients are means over all ranks
                step_loss += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 25 == 0 or step == args.steps - 1:
                torchring.all_reduce(step_loss)  # torchring: only to print the mean
                if is_first:
                    print(f"step {step:4}  loss {step_loss:.3f}  gradient norm {norm:.2f}")
    seconds = time.perf_counter() - start

    last_loss = evaluate(model, validation_windows)
    if is_first:
        stats = optimizer.stats()
        num_characters = args.steps * args.accumulate * micro_batch_size * torchring.size() * args.context
        print(f"validation loss        {first_loss:.3f} before, {last_loss:.3f} after training")
        print(f"speed                  {num_characters / seconds:,.0f} characters/s on {torchring.size()} rank(s)")
        print(f"exposed communication  {stats.mean_exposed_ms:.2f} ms per step ({stats.algorithm}, {stats.overlap})")
        prompt = (characters == ord("\n")).nonzero()[0]
        text = characters[sample(model, prompt, args.sample)]
        print(f"the model writes:\n{bytes(text.tolist()).decode()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
