"""What would make a step shorter, and by how much, predicted with the model in `scaling.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.findings import Advice, Phase
from torchring.report.layout import laid_out
from torchring.report.merge import Job
from torchring.report.pauses import TELLING, Pauses
from torchring.report.scaling import Links, Workload, exposed_ms
from torchring.report.timing import Array, typical
from torchring.report.verdict import Costs
from torchring.report.waits import COMPUTING, column
from torchring.report.workload import between_hosts, with_layout
from torchring.tracing.records import About

_WORTH_IT: Final = 0.02  # share of a step
_SIZES_MB: Final = (1, 2, 5, 12, 25, 50, 100, 200)
_INPUT_TELLING: Final = 0.05  # share of a step: it is never nothing
_OPTIMIZER_TELLING: Final = 0.10
_COMMUNICATION_TELLING: Final = 0.10  # before a larger batch is worth considering
_FUSED_SAVES: Final = 0.5  # of the optimizer's step; an assumption, and said to be one


@dataclass(frozen=True)
class Situation:
    """What advice is drawn from.

    Attributes:
        cycle: [S, R, 7], of the steps that count, as `Critical.cycle`.
        step_ms: how long a step takes now.
        backward_ms: median, on the slowest rank.
        workload: as it is.
        links: None if the network is unknown.
        pauses: steps that are not part of `cycle`, the most costly first.
    """

    job: Job
    cycle: Array
    costs: Costs
    step_ms: float
    backward_ms: float
    workload: Workload
    links: Links | None
    pauses: tuple[Pauses, ...]

    @property
    def about(self) -> About:
        return self.job.traces[0].about


def advise(situation: Situation) -> tuple[Advice, ...]:
    """All that saves at least 2 % of a step, the largest gain first."""
    if situation.step_ms <= 0:
        return ()
    found = [
        *_about_pauses(situation),
        *_about_input(situation),
        *_about_ranks(situation),
        *_about_communication(situation),
        *_about_optimizer(situation),
    ]
    return tuple(sorted((each for each in found if each.saves_share >= _WORTH_IT), key=lambda each: -each.saves_share))


def _advice(situation: Situation, what: str, saved_ms: float, why: str, how: str) -> Advice:
    return Advice(what, situation.step_ms - saved_ms, saved_ms / situation.step_ms, why, how)


def _about_input(situation: Situation) -> Iterator[Advice]:
    """Workers load a batch while the rank computes, so that a step takes as long as the longer of both."""
    computing = situation.cycle[..., [column(phase) for phase in COMPUTING]].sum(2)
    others = situation.cycle[..., column(Phase.COMMUNICATION)].min(1, keepdims=True)
    loading = situation.cycle[..., column(Phase.INPUT)]
    if not situation.costs.is_forward_known:  # only what a DataLoader takes is known to be loading
        loading = np.minimum(loading, situation.costs.loading[:, None])
    rest = computing - loading + others
    saved = (computing + others).max(1) - np.maximum(rest, loading).max(1)
    rank = situation.costs.blamed if situation.costs.is_input_of_blamed else None
    where = f"rank {situation.job.traces[rank].about.rank}" if rank is not None else "each rank"
    longest = typical(loading.max(1))
    if longest < _INPUT_TELLING * situation.step_ms:
        return
    yield _advice(
        situation,
        "Load data in the background" if rank is None else f"Load data in the background, or faster, on {where}",
        typical(saved),
        f"{where[0].upper()}{where[1:]} spends {longest:.1f} ms between step() and forward. If that is loading data, "
        "workers would do it meanwhile; this assumes that cores are left for them. If it is logging or other code, do "
        "it less often.",
        "DataLoader(..., num_workers=4, persistent_workers=True, prefetch_factor=2)",
    )


def _about_pauses(situation: Situation) -> Iterator[Advice]:
    """What a few steps begin with. Their share is that of all steps, so a step takes as long as the others do now."""
    for pauses in situation.pauses:
        if pauses.share < TELLING or pauses.kind == "communication":
            continue
        shared = "" if pauses.is_common else " or on all ranks"
        mean_ms = situation.step_ms / (1.0 - pauses.share)
        yield Advice(
            f"Shorten what {pauses.who} does {pauses.place} in {pauses.named_steps}",
            situation.step_ms,
            pauses.share,
            f"With it, a step takes {mean_ms:.4g} ms on average. Evaluate less often{shared}, write checkpoints in the "
            "background, and keep the workers of a DataLoader from one epoch to the next.",
            "DataLoader(..., num_workers=4, persistent_workers=True)",
        )


def _about_ranks(situation: Situation) -> Iterator[Advice]:
    """What the slowest rank takes longer than the others."""
    costs = situation.costs
    position = costs.blamed or 0
    about = situation.job.traces[position].about
    cause = _cause(costs, about, typical(costs.straggler))
    lost = typical(costs.jitter) if cause else typical(costs.straggler + costs.jitter)
    fitting = max(1, about.num_cores // max(1, about.local_size))
    crowded = about.device == "cpu" and about.local_size * about.num_threads > about.num_cores
    if cause:
        what, why, how = cause
        yield _advice(situation, what, typical(costs.straggler), why, how)
    if crowded and about.num_threads > fitting:
        yield _advice(
            situation,
            f"Use {fitting} {'thread' if fitting == 1 else 'threads'} in each rank of {about.host}",
            lost,
            f"{about.local_size} ranks of {about.num_threads} threads share {about.num_cores} cores, so they hold each "
            "other up. This assumes that they then take equally long.",
            f"torchring run --env OMP_NUM_THREADS={fitting} ...",
        )
    elif crowded and about.local_size > 1:
        yield _advice(
            situation,
            f"Start one rank less on {about.host}",
            lost,
            f"{about.local_size} ranks share {about.num_cores} cores. This assumes that the ranks that are left take "
            "equally long.",
            f"torchring run -np {about.size - 1} ..."
            if about.local_size == about.size
            else f"torchring run -H {about.host}:{about.local_size - 1},...",
        )
    elif costs.blamed is not None and not cause:
        where = f" in {costs.slower_in.value}" if costs.slower_in else ""
        yield _advice(
            situation,
            f"Find out what slows rank {about.rank} on {about.host} down",
            typical(costs.straggler),
            f"Rank {about.rank} computes for {typical(costs.straggler):.1f} ms longer than the others{where}: another "
            "program on its cores, other threads of its process, a slower machine, or samples that take longer.",
            f"top -H, on {about.host}, while the job runs",
        )


def _cause(costs: Costs, about: About, longer_ms: float) -> tuple[str, str, str] | None:
    """What to do, why and how, if the trace shows why one rank computes for longer. Fewer ranks would not help then."""
    rank = f"rank {about.rank}"
    if costs.blamed is None:
        return None
    if costs.has_longer_batches:
        return (
            "Give each rank as many samples",
            f"The batches of {rank} have {costs.batch_ratio:.2g} times as many samples as those of the others, and "
            f"{rank} computes for {longer_ms:.1f} ms longer.",
            "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))    # one batch_size for all ranks",
        )
    if costs.slower_in is Phase.OPTIMIZER:
        return (
            f"Find out what step() does on {rank} only",
            f"step() takes {longer_ms:.1f} ms longer there than on the others, hooks of the optimizer included. "
            "Look for what one rank does for all, such as a checkpoint, and do it less often.",
            f"py-spy dump --pid {about.pid}, on {about.host}, while the job runs",
        )
    if costs.slower_in is Phase.BETWEEN:
        return (
            f"Find out what {rank} does between backward and step()",
            f"This takes {longer_ms:.1f} ms longer than on the others. Look for what one rank does for all, such as "
            "logging, printing or a checkpoint, and do it less often.",
            'if step % 100 == 0: writer.add_scalar("loss", loss.item(), step)',
        )
    return None


def _about_communication(situation: Situation) -> Iterator[Advice]:
    about, workload, links, size = situation.about, situation.workload, situation.links, situation.job.size
    if size == 1 or links is None or not workload.bucket_bytes:
        return
    now = exposed_ms(workload, size, links)
    measured = typical(situation.costs.communication)

    def saved_ms(changed: Workload, by: Links = links) -> float:
        # The model may see more or less exposed communication than there was.
        after = exposed_ms(changed, size, by)
        return measured * (1.0 - after / now) if now > 0 else 0.0

    if about.options.get("compression", "None") == "None" and about.local_size < about.size:
        half = dataclasses.replace(workload, bucket_bytes=tuple(each / 2 for each in workload.bucket_bytes))
        yield _advice(
            situation,
            "Send gradients in 16 bits",
            saved_ms(half),
            "This halves what crosses the network. Sums are still computed in 32 bits.",
            'torchring.wrap(optimizer, model, compression="bf16")',
        )
    if about.overlap == "inline" and about.algorithm != "direct" and not workload.is_overlapped:
        yield _advice(
            situation,
            "Reduce in the background",
            saved_ms(between_hosts(workload)),
            "Backward stands still while each bucket is reduced. This assumes that a core is left for the thread.",
            'torchring.wrap(optimizer, model, overlap="thread")',
        )
    yield from _about_bucket_size(situation, saved_ms)
    if about.algorithm == "ring" and 1 < about.local_size < size and not links.is_hierarchical:
        two_levels = Links(links.network, True, about.local_size)
        yield _advice(
            situation,
            "Reduce within each host first",
            saved_ms(workload, two_levels),
            f"{about.local_size} ranks of a host send over one link. This assumes that memory within a host is much "
            "faster than the network.",
            'torchring.wrap(optimizer, model, algorithm="hierarchical")',
        )
    if about.options.get("accumulate", "1") == "1" and measured >= _COMMUNICATION_TELLING * situation.step_ms:
        yield _advice(
            situation,
            "Reduce gradients in every second backward only",
            measured / 2,
            "This halves communication for the same number of samples. It doubles the batch of an optimizer step, so "
            "the learning rate may need a change. The duration is per backward.",
            "torchring.wrap(optimizer, model, accumulate=2)",
        )


def _about_bucket_size(situation: Situation, saved_ms: Callable[[Workload], float]) -> Iterator[Advice]:
    now = len(situation.workload.bucket_bytes)
    found = []
    for size_mb in _SIZES_MB:
        layout = laid_out(situation.job, sum(situation.workload.bucket_bytes), size_mb)
        if layout is not None and len(layout[0]) != now:
            changed = with_layout(situation.workload, layout, situation.backward_ms)
            found.append((saved_ms(changed), size_mb, len(changed.bucket_bytes)))
    if found:
        best, size_mb, then = max(found, key=lambda each: (each[0], -each[1]))
        why = "each bucket costs latency" if then < now else "the first buckets could leave earlier"
        yield _advice(
            situation,
            f"Use buckets of {size_mb} MiB",
            best,
            f"Gradients travel in {now} {'bucket' if now == 1 else 'buckets'}; {why}. With {then} they are reduced "
            "sooner after backward.",
            f"torchring.wrap(optimizer, model, bucket_mb={size_mb})",
        )


def _about_optimizer(situation: Situation) -> Iterator[Advice]:
    cost, options = typical(situation.costs.optimizer), situation.about.options
    if cost >= _OPTIMIZER_TELLING * situation.step_ms and options.get("fused") != "True":
        yield _advice(
            situation,
            "Let the optimizer update all parameters at once",
            _FUSED_SAVES * cost,
            f"step() takes {cost:.1f} ms. This assumes that a fused step takes half of that; leave it out if the "
            "optimizer is fused already.",
            f"torch.optim.{options.get('optimizer', 'AdamW')}(model.parameters(), fused=True)    # or foreach=True",
        )
