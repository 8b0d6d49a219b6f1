"""Sparse embeddings: whatever rows each rank touched, the result is that of a dense gradient averaged over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, digest
from tests.support.harness import run_pooled, run_ranks
from torchring.errors import GradientError, RingError
from torchring.gradients.ledger import GradientStatus, Ledger
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.reduction import Reduction
from torchring.participants.sparse import SparseReduction

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


def dense_gradient(per_rank: Sequence[Sequence[int]], factors: Sequence[float] | None = None) -> Tensor:
    """Mean over ranks of what a dense embedding's gradient would be, by counting."""
    total = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank, rows in enumerate(per_rank):
        for row in rows:
            total[row] += torch.arange(1.0, WIDTH + 1) * (factors[rank] if factors else 1.0)
    return (total / len(per_rank)).float()


def check_table(model: Model, expected: Tensor) -> None:
    grad = model.table.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert grad.is_coalesced()
    assert_bitwise(grad.to_dense(), expected)


def check_head(model: Model) -> None:
    """The dense layer beside it: the same on all ranks, so its mean is what each has."""
    assert model.head.weight.grad is not None
    assert_bitwise(model.head.weight.grad, torch.ones(2, WIDTH))


def wrapped(model: torch.nn.Module, op: str = "mean", **options: object) -> torchring.DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    return torchring.wrap(sgd, model, op=op, **options)  # type: ignore[arg-type]


CASES = {
    "different rows": ([0, 3], [2, 6]),
    "the same rows": ([1, 4], [4, 1]),
    "duplicates on one rank": ([5, 5, 5, 0], [2]),
    "one row, twice": ([2, 2], [3]),
    "duplicates on both": ([3, 3, 1], [3, 1, 1, 3]),
    "empty on one rank": ([], [2, 2, 4]),
    "empty on the other rank": ([6], []),
    "every row": (list(range(ROWS)), list(range(ROWS))[::-1]),
}


def _cases(rank: int, world_size: int, rows: Sequence[Sequence[int]], overlap: str) -> list[str]:
    model = Model()
    optimizer = wrapped(model, overlap=overlap)
    seen = []
    for per_rank in (rows, rows[::-1]):
        optimizer.zero_grad()
        model(per_rank[rank]).backward()
        check_table(model, dense_gradient(per_rank))
        check_head(model)
        optimizer.step()
        seen.append(digest(model.parameters()))
    return seen


@pytest.mark.parametrize("what", CASES)
def test_equals_the_dense_result(what: str) -> None:
    first, second = run_pooled(_cases, 2, CASES[what], "inline")
    assert first == second
    assert len(set(first)) == 2


def test_equals_the_dense_result_with_a_thread() -> None:
    first, second = run_pooled(_cases, 2, CASES["duplicates on both"], "thread")
    assert first == second


def test_equals_the_dense_result_on_three_ranks() -> None:
    first, *others = run_pooled(_cases_of_three, 3, "inline")
    assert others == [first, first]


def _cases_of_three(rank: int, world_size: int, overlap: str) -> list[str]:
    """A third is not exact: one rounding of the exact sum, which is what the reference does, too."""
    model = Model()
    optimizer = wrapped(model, overlap=overlap)
    seen = []
    for rows in ([[0, 3], [3], [3, 3, 6]], [[], [1], []], [[2, 2], [], [2]]):
        optimizer.zero_grad()
        model(rows[rank]).backward()
        grad = model.table.weight.grad
        assert grad is not None
        expected = dense_gradient(rows)
        error = (grad.to_dense() - expected).abs().max().item()
        assert error <= 4 * 2**-24 * expected.abs().max().item()
        assert ((grad.to_dense() != 0) == (expected != 0)).all()
        optimizer.step()
        seen.append(digest([*model.parameters(), grad.to_dense()]))
    return seen


def _unused_everywhere(rank: int, world_size: int) -> None:
    model = Model()
    optimizer = wrapped(model)
    for _ in range(2):
        model([]).backward()
        assert model.table.weight.grad is None
        check_head(model)
        optimizer.step()
        optimizer.zero_grad()
    model([1]).backward()
    grad = model.table.weight.grad
    model.head.zero_grad()
    model([]).backward()
    assert model.table.weight.grad is grad  # untouched
    check_table(model, dense_gradient([[1], [1]]))
    optimizer.step()


def test_unused_on_all_ranks_stays_as_it_is() -> None:
    run_pooled(_unused_everywhere, 2)


def _given_up(rank: int, world_size: int) -> None:
    """What was local and has been set to None is gone, and the table was not used since."""
    model = Model()
    optimizer = wrapped(model)
    with optimizer.no_sync():
        model([1, 2]).backward()
    optimizer.zero_grad()
    model([]).backward()
    assert model.table.weight.grad is None


def test_a_local_gradient_set_to_none_is_forgotten() -> None:
    run_pooled(_given_up, 2)


def _accumulated(rank: int, world_size: int) -> str:
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
    return digest(model.parameters())


def test_accumulates_like_a_dense_one() -> None:
    assert_same_on_all_ranks(run_pooled(_accumulated, 2))


def _sum(rank: int, world_size: int) -> str:
    model = Model()
    optimizer = wrapped(model, op="sum")
    rows = [[0, 1], [1]]
    model(rows[rank]).backward()
    check_table(model, 2 * dense_gradient(rows))
    optimizer.step()
    return digest(model.parameters())


def test_sum() -> None:
    assert_same_on_all_ranks(run_pooled(_sum, 2))


def _sum_of_sums(rank: int, world_size: int) -> str:
    """As with dense gradients: what was summed before must not be counted once per rank."""
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = wrapped(table, op="sum")
    rows = [[0, 1], [1]]

    def backward() -> None:
        (table(torch.tensor(rows[rank])) @ torch.arange(1.0, WIDTH + 1)).sum().backward()

    backward()
    with pytest.raises(GradientError) as caught:
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
    with pytest.raises(GradientError, match="summed over ranks before"):
        backward()
    return str(caught.value)


def test_adding_to_a_sum_is_refused_and_starting_afresh_is_right() -> None:
    for said in run_pooled(_sum_of_sums, 2):
        assert "summed over ranks before" in said
        assert "zero_grad()" in said


def _refused_in_no_sync(rank: int, world_size: int) -> None:
    model = Model()
    optimizer = wrapped(model, op="sum")
    model([1, 2]).backward()
    with optimizer.no_sync(), pytest.raises(GradientError, match="summed over ranks before"):
        model([1]).backward()


def test_adding_to_a_sum_is_refused_in_no_sync_too() -> None:
    run_ranks(_refused_in_no_sync, 2)


def _accumulated_directly(rank: int, world_size: int, is_sum: bool) -> None:
    """`SparseReduction` by itself: what it takes for local, and for how long."""
    world = torchring.init()
    parameter = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
    specs = [ParameterSpec("table", (ROWS, WIDTH), (WIDTH, 1), torch.float32, torch.device("cpu"), is_sparse=True)]
    ledger = Ledger(is_sum=is_sum)
    ledger.lay_out([0], specs, [parameter])
    reducer = SimpleNamespace(specs=specs, parameters=[parameter], ledger=ledger)
    options = SimpleNamespace(scale=lambda size: 1.0 if is_sum else 1 / size, is_sum=is_sum)
    sparse = SparseReduction(reducer, SimpleNamespace(world=world, options=options))  # type: ignore[arg-type]

    def local(value: float) -> Tensor:
        values = torch.full((1, WIDTH), value)
        return torch.sparse_coo_tensor(torch.tensor([[rank]]), values, (ROWS, WIDTH), check_invariants=True)

    assert ledger.first_unsettled() is None
    parameter.grad = local(2.0)
    assert ledger.first_unsettled() == ("table", GradientStatus.UNKNOWN.value)
    ledger.mark_local(0)
    assert ledger.first_unsettled() == ("table", GradientStatus.LOCAL.value)
    sparse.on_message(Reduction(0))
    assert ledger.first_unsettled() is None
    expected = torch.zeros(ROWS, WIDTH)
    expected[:world_size] = 2.0 if is_sum else 2.0 / world_size
    assert_bitwise(parameter.grad.to_dense(), expected)
    reduced = parameter.grad
    sparse.on_message(Reduction(0))
    assert parameter.grad is reduced  # nothing new on any rank
    if is_sum:
        with pytest.raises(GradientError, match="summed over ranks before"):
            ledger.mark_local(0)
        ledger.mark_zeroed()
    ledger.mark_local(0)
    assert ledger.first_unsettled() == ("table", GradientStatus.LOCAL.value)
    ledger.mark_zeroed()
    assert ledger.first_unsettled() is None
    parameter.grad = local(float("nan") if rank == 1 else 1.0)
    ledger.mark_local(0)
    current = Reduction(0)
    sparse.on_message(current)
    found = current.non_finite
    assert found is not None
    assert (found.rank, found.name) == (1, "table")
    assert found.tensor() is parameter.grad
    parameter.grad = local(1.0)
    current = Reduction(0)
    sparse.on_message(current)
    assert current.non_finite is None


@pytest.mark.parametrize("is_sum", [False, True])
def test_what_is_known_of_a_sparse_gradient(is_sum: bool) -> None:
    run_pooled(_accumulated_directly, 2, is_sum)


def _sparse_adam(rank: int, world_size: int) -> str:
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = torchring.wrap(torch.optim.SparseAdam(table.parameters(), lr=0.1), table)
    before = table.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.tensor([step, step + rank, 3])
        table(rows).sum().backward()
        optimizer.step()
    moved = (table.weight.detach() != before).any(dim=1).tolist()
    assert moved == [True, True, True, True, False, False, False]
    return digest(table.weight)


def test_sparse_adam_moves_only_touched_rows() -> None:
    assert_same_on_all_ranks(run_pooled(_sparse_adam, 2))


def _bag_and_dtype(rank: int, world_size: int) -> str:
    bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
    optimizer = wrapped(bag)
    rows = [[0, 1, 1, 2], [5, 5, 1, 0]]
    bag(torch.tensor(rows[rank]), torch.tensor([0, 2])).sum().backward()
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row in rows[0] + rows[1]:
        expected[row] += 0.5
    assert bag.weight.grad is not None
    assert_bitwise(bag.weight.grad.to_dense(), expected)
    optimizer.step()
    return digest(bag.weight)


def test_embedding_bag_in_double_precision() -> None:
    assert_same_on_all_ranks(run_pooled(_bag_and_dtype, 2))


def _tied(rank: int, world_size: int, used_by: str) -> str:
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    head = torch.nn.Linear(WIDTH, ROWS, bias=False)
    head.weight = table.weight
    model = torch.nn.ModuleDict({"table": table, "head": head})
    optimizer = wrapped(model)
    rows = table(torch.tensor([1, 2]))
    loss = (head(rows) if used_by == "all" or rank == 1 else rows).sum()
    with pytest.raises(RingError) as caught:
        loss.backward()
    if used_by == "all" or rank == 1:
        assert caught.value.parameters == ("table.weight",)
    with pytest.raises(GradientError):
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("used_by", ["all", "rank 1"])
def test_tied_to_a_dense_layer_says_what_to_do(used_by: str) -> None:
    texts = run_pooled(_tied, 2, used_by)
    for text in texts:
        assert "table.weight" in text
        assert "sparse=True but has a dense gradient" in text
        assert "sparse=False" in text
    if used_by == "rank 1":
        assert "rank 1" in texts[0]


def _without_the_model(rank: int, world_size: int) -> str:
    model = Model()
    torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(GradientError) as caught:
        model([rank]).backward()
    return str(caught.value)


def test_without_the_model_says_what_to_do() -> None:
    for text in run_pooled(_without_the_model, 2):
        assert "Pass the model, or compute with sparse=False" in text


def _not_finite(rank: int, world_size: int, how: str) -> None:
    """As with dense gradients: backward returns, a GradScaler may look and skip the step, and a step is refused."""
    model = Model()
    optimizer = wrapped(model)
    model([1, 2], factor=float("inf") if rank == 1 else 1.0).backward()
    before = digest(model.parameters())
    if how == "step":
        with pytest.raises(GradientError, match=r"table\.weight is not finite.*rank 1"):
            optimizer.step()
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # it makes its tensors at the first call
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
    assert digest(model.parameters()) == before
    optimizer.zero_grad()
    model([1]).backward()
    check_table(model, dense_gradient([[1], [1]]))
    optimizer.step()  # it was that reduction's
    assert digest(model.parameters()) != before


def _mended(rank: int, world_size: int) -> None:
    """The script may mend what it finds, on all ranks alike."""
    model = Model()
    optimizer = wrapped(model)
    model([1, 2], factor=float("nan") if rank == 0 else 1.0).backward()
    with pytest.raises(GradientError, match=r"table\.weight is not finite.*rank 0"):
        optimizer.step()
    grad = model.table.weight.grad
    assert grad is not None
    grad._values().nan_to_num_(0.0)
    optimizer.step()


def test_not_finite_and_mended() -> None:
    run_pooled(_mended, 2)


@pytest.mark.parametrize("how", ["step", "grad scaler"])
def test_not_finite(how: str) -> None:
    run_pooled(_not_finite, 2, how)


def test_a_world_of_one_leaves_it_to_the_optimizer() -> None:
    run_pooled(_alone, 1)


def _alone(rank: int, world_size: int) -> None:
    model = Model()
    optimizer = wrapped(model)
    model([1, 1, 4]).backward()
    assert model.table.weight.grad is not None
    assert_bitwise(model.table.weight.grad.to_dense(), dense_gradient([[1, 1, 4]]))
    optimizer.step()
