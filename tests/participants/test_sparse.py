"""Sparse embeddings: whatever rows each rank touched, the result is that of a dense gradient averaged over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, digest
from tests.support.harness import ranks, run_ranks
from torchring.errors import GradientError, RingError

ROWS, WIDTH = 7, 3


class Model(torch.nn.Module):
    """A sparse embedding and a dense layer; the loss is linear in both, so that gradients are small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, rows: Sequence[int], factor: float = 1.0) -> Tensor:
        loss = self.head(torch.ones(WIDTH)).sum()
        if rows:
            weights = torch.arange(1.0, WIDTH + 1)
            loss = loss + factor * (self.table(torch.tensor(rows)) @ weights).sum()
        return loss


def dense_gradient(per_rank: Sequence[Sequence[int]]) -> Tensor:
    """Mean over ranks of what a dense embedding's gradient would be, by counting."""
    total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row in (row for rows in per_rank for row in rows):
        total[row] += torch.arange(1.0, WIDTH + 1)
    return (total / len(per_rank)).float()


def check_table(model: Model, expected: Tensor) -> None:
    grad = model.table.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert grad.is_coalesced()
    assert_bitwise(grad.to_dense(), expected)


def check_head(model: Model, total: float = 1.0) -> None:
    """The dense layer beside it: the same on all ranks, so its mean is what each has."""
    assert model.head.weight.grad is not None
    assert_bitwise(model.head.weight.grad, torch.full((2, WIDTH), total))


def wrapped(model: torch.nn.Module, op: str = "mean", **options: object) -> torchring.DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    return torchring.wrap(sgd, model, op=op, **options)  # type: ignore[arg-type]


CASES = {  # rows that each rank looks up
    "different rows": ([0, 3], [2, 6]),
    "the same rows": ([1, 4], [4, 1]),
    "duplicates on one rank": ([5, 5, 5, 0], [2]),
    "one row, twice": ([2, 2], [3]),
    "duplicates on both": ([3, 3, 1], [3, 1, 1, 3]),
    "empty on one rank": ([], [2, 2, 4]),
    "every row": (list(range(ROWS)), list(range(ROWS))[::-1]),
}


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@ranks(2)
def test_equals_the_dense_result(overlap: str, rank: int) -> None:
    model = Model()
    optimizer = wrapped(model, overlap=overlap)
    for rows in CASES.values():
        for per_rank in (rows, rows[::-1]):
            optimizer.zero_grad()
            model(per_rank[rank]).backward()
            check_table(model, dense_gradient(per_rank))
            check_head(model)
            optimizer.step()
            assert_same_everywhere(model.parameters())


@ranks(3)
def test_equals_the_dense_result_on_three_ranks(rank: int) -> None:
    """A third is not exact: one rounding of the exact sum, which is what the reference does, too."""
    model = Model()
    optimizer = wrapped(model)
    for rows in ([[0, 3], [3], [3, 3, 6]], [[], [1], []], [[2, 2], [], [2]]):
        optimizer.zero_grad()
        model(rows[rank]).backward()
        grad, expected = model.table.weight.grad, dense_gradient(rows)
        assert grad is not None
        error = (grad.to_dense() - expected).abs().max().item()
        assert error <= 4 * 2**-24 * expected.abs().max().item()
        assert ((grad.to_dense() != 0) == (expected != 0)).all()
        optimizer.step()
        assert_same_everywhere([*model.parameters(), grad.to_dense()])


@ranks(2)
def test_unused_on_all_ranks_stays_as_it_is() -> None:
    model = Model()
    optimizer = wrapped(model, op="sum")
    for _ in range(2):
        model([]).backward()
        assert model.table.weight.grad is None
        check_head(model, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    model([1]).backward()
    grad = model.table.weight.grad
    model.head.zero_grad()
    model([]).backward()
    assert model.table.weight.grad is grad  # untouched
    check_table(model, 2 * dense_gradient([[1], [1]]))
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model([1, 2]).backward()
    optimizer.zero_grad()
    model([]).backward()
    assert model.table.weight.grad is None  # what was local and has been set to None is gone


@ranks(2)
def test_accumulates_like_a_dense_one(rank: int) -> None:
    model = Model()
    optimizer = wrapped(model)
    rows = [[[0, 1, 1], [2]], [[1], [2, 2]], [[6], [0]]]
    for step, per_rank in enumerate(rows):
        if step == 1:
            with optimizer.no_sync():
                model(per_rank[rank]).backward()
            with pytest.raises(GradientError, match=r"(table|head)\.\w+ holds local contributions"):
                optimizer.step()
        else:
            model(per_rank[rank]).backward()
    check_table(model, sum(map(dense_gradient, rows), torch.zeros(ROWS, WIDTH)))
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model([rank]).backward()
    optimizer.synchronize()
    check_table(model, dense_gradient([[0], [1]]))


@ranks(2, start=run_ranks)  # the last backward is an error
def test_adding_to_a_sum_is_refused_and_starting_afresh_is_right(rank: int) -> None:
    """As with dense gradients: what was summed before must not be counted once per rank."""
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = wrapped(table, op="sum")
    rows = [[0, 1], [1]]

    def backward() -> None:
        (table(torch.tensor(rows[rank])) @ torch.arange(1.0, WIDTH + 1)).sum().backward()

    backward()
    with pytest.raises(GradientError, match=r"summed over ranks before.*zero_grad\(\)"):
        backward()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        with optimizer.no_sync():
            backward()
        backward()  # what is local may grow
        assert table.weight.grad is not None
        assert_bitwise(table.weight.grad.to_dense(), 4 * dense_gradient(rows))
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    if rank == 0:
        backward()
    else:
        optimizer.skip()  # gets the sum in place of its zeros
    for place in (contextlib.nullcontext(), optimizer.no_sync()):
        with place, pytest.raises(GradientError, match="summed over ranks before"):
            backward()


@ranks(2)
def test_sparse_adam_moves_only_touched_rows(rank: int) -> None:
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = torchring.wrap(torch.optim.SparseAdam(table.parameters(), lr=0.1), table)
    before = table.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([step, step + rank, 3])).sum().backward()
        optimizer.step()
    moved = (table.weight.detach() != before).any(dim=1).tolist()
    assert moved == [True, True, True, True, False, False, False]
    assert_same_everywhere([table.weight])


@ranks(2)
def test_embedding_bag_in_double_precision(rank: int) -> None:
    bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
    wrapped(bag)
    rows = [[0, 1, 1, 2], [5, 5, 1, 0]]
    bag(torch.tensor(rows[rank]), torch.tensor([0, 2])).sum().backward()
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row in rows[0] + rows[1]:
        expected[row] += 0.5
    assert bag.weight.grad is not None
    assert_bitwise(bag.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("used_by", ["all", "rank 1"])
@ranks(2)
def test_tied_to_a_dense_layer_says_what_to_do(used_by: str, rank: int) -> None:
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    head = torch.nn.Linear(WIDTH, ROWS, bias=False)
    head.weight = table.weight
    optimizer = wrapped(torch.nn.ModuleDict({"table": table, "head": head}))
    rows, is_used = table(torch.tensor([1, 2])), used_by == "all" or rank == 1
    said = r"table\.weight .*sparse=True but has a dense gradient.*sparse=False"
    with pytest.raises(RingError, match=said if is_used else f"rank 1.*{said}") as caught:
        (head(rows) if is_used else rows).sum().backward()
    assert not is_used or caught.value.parameters == ("table.weight",)
    with pytest.raises(GradientError):
        optimizer.step()


@ranks(2)
def test_without_the_model_says_what_to_do(rank: int) -> None:
    model = Model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(GradientError, match="Pass the model, or compute with sparse=False"):
        model([rank]).backward()
    optimizer.close()


@pytest.mark.parametrize("how", ["step", "grad scaler", "mended"])
@ranks(2)
def test_not_finite(how: str, rank: int) -> None:
    """As with dense gradients: backward returns, a GradScaler may look and skip the step, and a step is refused."""
    model = Model()
    optimizer = wrapped(model)
    model([1, 2], factor=float("inf") if rank == 1 else 1.0).backward()
    before = digest(model.parameters())
    if how == "grad scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # it makes its tensors at the first call
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
    else:
        with pytest.raises(GradientError, match=r"table\.weight is not finite.*rank 1"):
            optimizer.step()
    assert digest(model.parameters()) == before
    if how == "mended":  # by the script, on all ranks alike
        grad = model.table.weight.grad
        assert grad is not None
        grad._values().nan_to_num_(0.0, 0.0, 0.0)
    else:
        optimizer.zero_grad()
        model([1]).backward()
        check_table(model, dense_gradient([[1], [1]]))
    optimizer.step()  # it was that reduction's
    assert digest(model.parameters()) != before


@ranks(1)
def test_a_world_of_one_leaves_it_to_the_optimizer() -> None:
    model = Model()
    optimizer = wrapped(model)
    model([1, 1, 4]).backward()
    assert model.table.weight.grad is not None
    assert_bitwise(model.table.weight.grad.to_dense(), dense_gradient([[1, 1, 4]]))
    optimizer.step()
