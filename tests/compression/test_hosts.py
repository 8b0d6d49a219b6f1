"""Training with compression between hosts: near to what it is without, with the same bits on all ranks."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import torchring
from tests.support.checks import assert_same_on_all_ranks
from tests.support.harness import ranks, run_ranks
from tests.support.netns import needs_hosts, run_on_hosts
from torchring.bench.netns import Network
from torchring.compression import PowerSGD, check
from torchring.compression.codec import ROW
from torchring.compression.schemes import Scheme
from torchring.errors import GradientError, PlanMismatchError, RingError

STEPS = 8


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2) as network:
        yield network


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8 * 24, 80), torch.nn.LayerNorm(80), torch.nn.Tanh(), torch.nn.Linear(80, 10)
    return torch.nn.Sequential(torch.nn.Embedding(32, 24), torch.nn.Flatten(), *layers)


def _loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randint(0, 32, (16, 8), generator=generator, device="cpu").to(next(model.parameters()).device)
    return torch.nn.functional.cross_entropy(model(x), x.sum(1) % 10)


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


Step = Callable[[Any, torch.nn.Module, int, int], None]


def _plain(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    _loss(model, rank, step).backward()
    optimizer.step()


def _weighed(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    """Shares of the weights swing by far between steps, and one rank sometimes has nothing."""
    optimizer.weigh(0 if (rank, step) == (1, 3) else 1000.0 ** ((rank + step) % 2))
    _plain(optimizer, model, rank, step)


def _skipping(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    if (rank, step) == (1, 4):
        optimizer.skip()
    else:
        _loss(model, rank, step).backward()
    optimizer.step()


def _accumulating(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        _loss(model, rank, step).backward()
    _loss(model, rank, step + 100).backward()
    optimizer.step()


def _poisoned(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    (_loss(model, rank, step) * (float("nan") if (rank, step) == (1, 2) else 1.0)).backward()
    optimizer.step()


def _aborting(optimizer: Any, model: torch.nn.Module, rank: int, step: int) -> None:
    """Backwards that end in the middle: on one rank, before a bucket has left; and on all ranks, after one has."""
    if step == 4 or (rank, step) == (1, 2):
        handle = model[0 if step == 4 else 5].weight.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            _loss(model, rank, 77).backward()
        handle.remove()
    _plain(optimizer, model, rank, step)


def _train(
    rank: int, compression: Any, step: Step = _plain, lacks: int = 0, **options: Any
) -> tuple[torch.Tensor, Any]:
    """The weights and stats. Each rank `lacks` so many batches more than the one before."""
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = torchring.wrap(sgd, model, compression=compression, **{"bucket_mb": 0.02, **options})
    with torchring.join(optimizer) if lacks else contextlib.nullcontext():
        for i in range(STEPS - lacks * rank):
            step(optimizer, model, rank, i)
    stats = optimizer.stats()
    optimizer.close()
    return _weights(model), stats


def _two_optimizers(rank: int, compression: Any) -> torch.Tensor:
    """Of three ranks, the first and the last have the first optimizer in a group, and the other one has it alone."""
    model, pair = _model(), [0, torchring.size() - 1]
    torch.set_default_dtype(torch.bfloat16)  # what is kept and sent has a dtype of its own
    halves = [torch.optim.SGD(half.parameters(), lr=0.05) for half in (model[:2], model[2:])]
    groups = [pair, *([other] for other in range(1, pair[1]))], None
    optimizers = [
        torchring.wrap(half, compression=compression, group=g) for half, g in zip(halves, groups, strict=True)
    ]
    for i in range(STEPS):
        model.zero_grad()
        _loss(model, rank, i).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(optimizer.stats().compression_error for optimizer in optimizers if compression and rank in pair)
    for optimizer in optimizers:
        optimizer.close()
    torch.set_default_dtype(torch.float32)
    of_pair = torchring.broadcast(_weights(model[:2]), 0)
    return torch.cat([_weights(model[:2]) if rank in pair else of_pair, _weights(model[2:])])


def _mixed(rank: int, compression: Any) -> torch.Tensor:
    """Parameters in fp64, bf16 and complex numbers, and an embedding with sparse gradients."""
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(20, 30, sparse=True)
    dtypes = (torch.float64, torch.bfloat16, torch.complex64)
    parameters = [torch.nn.Parameter(torch.randn(20, 30, dtype=dtype)) for dtype in dtypes]
    model = torch.nn.ParameterDict({"weight": embedding.weight, **{f"p{i}": p for i, p in enumerate(parameters)}})
    module = torch.nn.ModuleList([embedding, model])
    optimizer = torchring.wrap(torch.optim.SGD(module.parameters(), lr=0.1), module, compression=compression)
    for i in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * rank + i)
        factor = torch.randn(20, 30, generator=generator)
        rows = embedding(torch.tensor([rank, 3 + i]))
        (sum((p.abs() * factor).sum() for p in parameters) + rows.square().sum()).backward()
        optimizer.step()
    optimizer.close()
    parts = [embedding.weight, *parameters]
    return torch.cat([(torch.view_as_real(p) if p.is_complex() else p).detach().double().flatten() for p in parts])


CASES: dict[str, tuple[Step, dict[str, Any]]] = {
    "plain": (_plain, {}),
    "weighed": (_weighed, {}),
    "skipping": (_skipping, {}),
    "accumulating": (_accumulating, {}),
    "poisoned": (_poisoned, {"on_nonfinite": "skip"}),
    "aborting": (_aborting, {}),
    "sharded": (_plain, {"shard": True}),
    "native": (_plain, {"algorithm": "native"}),
    "sum": (_plain, {"op": "sum"}),
    "joining": (_plain, {"lacks": 2}),
}


def _everything(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """The weights of each case, without compression and with it."""
    found = {}
    for name, (step, options) in CASES.items():
        print(name)  # the last one in the output is the one that failed
        (exact, _), (weights, stats) = (_train(rank, kind, step, **options) for kind in (None, "int8"))
        found[name] = exact, weights
        assert "compressed by int8 between hosts" in stats.reason
        assert set(stats.compression_error) <= {"1-D", "embedding", "matrix"}
        assert stats.num_skipped_steps == (name == "poisoned")
    for name, script in {"two optimizers": _two_optimizers, "mixed": _mixed}.items():
        found[name] = script(rank, None), script(rank, "int8")
    found["powersgd"] = found["plain"][0], _train(rank, PowerSGD(2, 3))[0]
    Scheme.part = 2 * ROW  # type: ignore[assignment]  # a buffer is cut into several
    found["in parts"] = found["plain"][0], _train(rank, "int8")[0]
    torchring.shutdown()
    return found


@needs_hosts
@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_training_is_near_to_what_it_is_without(network: Network, layout: tuple[int, ...]) -> None:
    results = run_on_hosts(network, layout, _everything)
    start = _weights(_model())
    for name, (exact, weights) in results[0].items():
        assert_same_on_all_ranks([found[name][1] for found in results])
        way = (exact - (start if len(start) == len(exact) else 0)).norm()
        share = ((weights - exact).norm() / way).item()
        assert 0 < share < (0.7 if name == "powersgd" else 0.03), (name, share)
        if name == "mixed":  # sparse and fp64 gradients travel as they are
            assert torch.equal(weights[:1200], exact[:1200])


def _fails(rank: int, world_size: int) -> None:
    torchring.init(timeout_seconds=20)
    for options in ({"compression": ("int8", "powersgd")[rank]}, {"compression": "int8", "max_error": 0.1 + rank}):
        with pytest.raises(PlanMismatchError, match=r"compression|max_error"):
            torchring.wrap(torch.optim.SGD(_model().parameters()), **options)

    # Two blocks of int8 have an error of about 1 %.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, stats = _train(rank, "int8", max_error=1e-4)
    said = [str(each.message) for each in caught if "max_error" in str(each.message)]
    assert len(said) == (rank == 0)
    if rank == 0:
        (kind, by), *_ = [pair for pair in stats.compression_error.items() if pair[1] > 1e-4]
        assert said[0].startswith(f"compression=int8 changes the gradients of {kind} parameters by {by:.3g} of their")

    with pytest.raises(GradientError, match=r"weigh\(\) takes no compression='powersgd'"):
        _train(rank, "powersgd", _weighed)
    torch.set_num_threads(1 + rank)
    with pytest.raises(PlanMismatchError, match=r"computes: rank 0 has .*threads\(\)=1 .* rank 1 has .*threads\(\)=2"):
        _train(rank, "powersgd")

    with pytest.raises(GradientError, match="is not finite; NaN or infinity came from rank 1") as raised:
        _train(rank, "int8", _poisoned)
    assert raised.value.parameters

    compress = lambda bucket: 1 / 0 if rank else bucket.buffer  # noqa: E731
    with pytest.raises((ZeroDivisionError, RingError), match="division by zero"):
        _train(rank, SimpleNamespace(compress=compress, decompress=lambda data, bucket: data))
    torchring.shutdown()


@needs_hosts
def test_what_goes_wrong_is_told_on_all_ranks(network: Network) -> None:
    run_on_hosts(network, (1, 1), _fails)


def _kept(rank: int, world_size: int, state: Any = None) -> Any:
    """Train, or go on with the state of another job. Returns what is kept in the end."""
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = torchring.wrap(sgd, model, compression="int8", bucket_mb=0.01 if state is None else 0.03)
    for i in range(3):  # the buckets are laid out anew after the first
        _plain(optimizer, model, rank, i)
    if state is not None:
        torchring.compression.load_state_dict(optimizer, state)
        with pytest.raises(ValueError, match=r"the state of 3\.bias has shape \(3,\), not \(80,\)"):
            torchring.compression.load_state_dict(optimizer, {"3.bias": torch.zeros(3)})
    kept = torchring.compression.state_dict(optimizer)
    torchring.shutdown()
    return kept


@needs_hosts
def test_feedback_survives_another_number_of_ranks_and_other_buckets(network: Network) -> None:
    saved, other = run_on_hosts(network, (1, 1), _kept)
    for name, tensor in saved.items():
        assert torch.equal(tensor, other[name])
    assert saved["5.weight"].norm() > 0
    assert saved["3.bias"].norm() == 0  # travels as it is
    loaded, *_ = run_on_hosts(network, (2, 1), _kept, saved)
    for name, tensor in saved.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("exact", "compressed"), [(200, 250), (250, 200)])
def test_compression_that_does_not_pay_is_said(
    exact: int, compressed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(check, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    reducer: Any = SimpleNamespace(world=SimpleNamespace(rank=0), options=SimpleNamespace(compression="int8"))
    setup: Any = SimpleNamespace(options=SimpleNamespace(max_error=None), model=None, names={})
    watch = check.CompressionCheck(reducer, setup)
    for number in range(20):
        watch._note_time(number)
        now[0] += (compressed if number % 2 or number not in check.TRIAL else exact) / 1000
    said = "compression=int8 does not pay here: a step takes 250 ms with it, and 200 ms in full precision"
    assert caplog.messages == [said] * (compressed > exact)


@ranks(2)
def test_on_one_host_nothing_is_compressed(rank: int) -> None:
    said: list[str] = []
    logger = logging.getLogger("torchring")
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)
    logger.setLevel(logging.INFO)
    (exact, _), (weights, stats) = (_train(rank, kind) for kind in (None, "int8"))
    logger.filters.clear()
    logger.setLevel(logging.NOTSET)
    assert [text for text in said if "compress" in text] == [
        "compression=int8: all ranks are on one host, so nothing is compressed"
    ] * (rank == 0)
    assert torch.equal(exact, weights)
    assert (stats.algorithm, stats.compression_error) == ("direct", {})


@ranks(2, run_ranks)
def test_hooks_of_ddp_train_as_under_ddp(rank: int) -> None:
    with pytest.raises(ValueError, match=r"call torchring\.init\(process_group=True\) first"):
        _train(rank, torchring.ddp_hook(None, fp16_compress_hook))
    torchring.shutdown()
    torchring.init(process_group=True)
    for hook, state in ((fp16_compress_hook, None), (powerSGD_hook, PowerSGDState)):
        made = [state and state(None, matrix_approximation_rank=2, start_powerSGD_iter=3) for _ in range(2)]
        weights, _ = _train(rank, torchring.ddp_hook(made[0], hook), bucket_mb=25)
        model = _model()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(made[1], hook)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for i in range(STEPS):
            _plain(sgd, ddp, rank, i)
        torch.testing.assert_close(weights, _weights(model), rtol=1e-4, atol=1e-5)
    for train in (lambda hook: _train(rank, hook)[0], functools.partial(_mixed, rank)):
        state = PowerSGDState(None, 2, start_powerSGD_iter=3)
        several = train(torchring.ddp_hook(state, powerSGD_hook))  # buckets; with complex parameters, too
        assert_same_on_all_ranks(torchring.all_gather(several).split(len(several)))
    torchring.shutdown()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "int4"}, "compression must be None, 'fp16', 'bf16', 'int8', .* got 'int4'"),
        ({"compression": "int8", "max_error": 0}, "max_error must be a number above 0, .* got 0"),
        ({"max_error": 0.1}, "max_error takes a compression that checks itself"),
        ({"max_error": 0.1, "compression": torchring.ddp_hook(None, print)}, "max_error takes .* a hook does not"),
        ({"compression": torchring.compression.Compressor}, "compression must be None, .* got <class"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        torchring.wrap(torch.optim.SGD(_model().parameters()), **options)
    for wrong in ({"rank": 0}, {"start": -1}, {"min_rate": 0.5}, {"rank": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be .* got"):
            PowerSGD(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the hook comes second"):
        torchring.ddp_hook(fp16_compress_hook, None)  # type: ignore[arg-type]
