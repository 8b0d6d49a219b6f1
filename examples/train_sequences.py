"""Train a transformer on sequences of different length, once with `optimizer.weigh` and once without; compare the two.

    torchring run -np 2 examples/train_sequences.py        two processes
    python examples/train_sequences.py                     one process, for which both are the same

A sequence is a line of Python's own source code. A rank's batch has lines of about the same length, which need little
padding. So in each step ranks have different numbers of tokens, and each rank's loss is the mean over its own tokens.
The mean of these means is not the mean over all tokens: tokens of short lines count more, tokens of long lines less.
`optimizer.weigh(number of tokens)` makes all tokens count the same.

The reference is the gradient that one process computes from the lines of all ranks. The exit code is 1 if gradients
with weights differ from the reference by more than rounding.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from train_char_gpt import TRAINING_TEXT, VALIDATION_TEXT, CharGPT, read

import torchring

Lines = Sequence[bytes]
LONGEST, IGNORED = 100, -100  # characters of a line, the rest is cut off; where a line has no token
TOLERANCE = 1e-5  # of gradients, relative to their norm; rounding alone makes some 1e-7


def read_lines(modules: str) -> list[bytes]:
    """The lines that are not blank, from the shortest to the longest."""
    lines = [line[:LONGEST] for line in read(modules).splitlines(keepends=True) if line.strip()]
    return sorted(lines, key=len)


def count_tokens(lines: Lines) -> int:
    """The characters that are predicted: all but the first of each line."""
    return sum(len(line) - 1 for line in lines)


def mean_loss(model: CharGPT, lines: Lines) -> torch.Tensor:
    """The mean cross-entropy over the tokens of `lines`. Padding does not count."""
    ids = pad_sequence([torch.tensor(list(line)) for line in lines], batch_first=True, padding_value=IGNORED)
    logits = model(ids[:, :-1].clamp(min=0))  # attention is causal, so no token sees the padding behind it
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=IGNORED)


@torch.no_grad()
def evaluate(model: CharGPT, lines: Lines) -> float:
    """The mean loss over the tokens of `lines`, of which every rank computes a share."""
    metric = torchring.recipes.MeanMetric()
    for first in range(64 * torchring.rank(), len(lines), 64 * torchring.size()):
        batch = lines[first : first + 64]
        metric.update({"loss": mean_loss(model, batch)}, weight=count_tokens(batch))
    return metric.compute()["loss"]


def draw(lines: Lines, batch_size: int, generator: torch.Generator) -> list[Lines]:
    """A batch for each rank: neighbours in `lines`, as they are about equally long."""
    starts = torch.randint(len(lines) - batch_size + 1, (torchring.size(),), generator=generator)
    return [lines[start : start + batch_size] for start in starts.tolist()]


def train(model: CharGPT, lines: Lines, args: argparse.Namespace, weighs: bool) -> list[float]:
    """Train the model. Returns the relative distances, in some steps, of its gradients from those of one process."""
    parameters = list(model.parameters())
    optimizer = torchring.wrap(torch.optim.AdamW(parameters, lr=args.lr), model)
    generator = torch.Generator().manual_seed(args.seed)  # all ranks know the batches of all ranks
    distances = []
    for step in range(args.steps):
        batches = draw(lines, args.batch_size, generator)
        mine = batches[torchring.rank()]
        optimizer.zero_grad()
        if weighs:
            optimizer.weigh(count_tokens(mine))  # this line makes the difference
        mean_loss(model, mine).backward()
        if step % max(1, args.steps // 12) == 0:
            everything = [line for batch in batches for line in batch]
            reference = parameters_to_vector(torch.autograd.grad(mean_loss(model, everything), parameters))
            actual = parameters_to_vector([p.grad for p in parameters])
            distances.append(float((actual - reference).norm() / reference.norm()))
        optimizer.step()
    optimizer.close()
    return distances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=16, help="lines per step and rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines, held_out = read_lines(TRAINING_TEXT), read_lines(VALIDATION_TEXT)[::8]  # enough for a comparison

    distances, losses = [], []
    for weighs in (True, False):
        torch.manual_seed(args.seed)  # both models start from the same parameters
        model = CharGPT(128, LONGEST)
        distances.append(train(model, lines, args, weighs))
        losses.append(evaluate(model, held_out))

    if torchring.rank() == 0:
        n = args.batch_size
        print(f"{torchring.size()} rank(s) x {n} lines per step")
        print(f"{n} lines have {count_tokens(lines[:n])} to {count_tokens(lines[-n:])} tokens")
        print(f"{'':33}  with weights  plain mean")
        for name, summary in (("median", statistics.median), ("largest", max)):
            weighted, plain = (summary(found) for found in distances)
            print(f"{name:7} distance from reference   {weighted:12.1e}  {plain:10.1e}")
        print(f"{'held-out loss per token':33}  {losses[0]:12.4f}  {losses[1]:10.4f}")
    if not all(distance <= TOLERANCE for distance in distances[0]):  # NaN is a failure, too
        sys.exit("gradients with weights are not those of the mean over all tokens")


if __name__ == "__main__":
    main()
