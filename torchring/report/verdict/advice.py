"""Advice that makes a job faster. The models in `scaling.py` and `loader_time.py` predict by how much.

Advice is judged by samples per second, and by the cores that are left. What its own numbers call a loss is not given.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.bucket_layout import layout_with
from torchring.report.model.core_time import is_crowded, sharing, threads_of
from torchring.report.model.loader_time import HANDING_OVER_MS
from torchring.report.model.scaling import Connections, Workload, exposed_ms
from torchring.report.model.timing import Array, typical
from torchring.report.model.waits import COMPUTING
from torchring.report.model.workload import between_hosts, with_layout
from torchring.report.verdict.costs import Costs
from torchring.report.verdict.findings import Advice
from torchring.report.verdict.pauses import TELLING
from torchring.report.verdict.situation import Situation
from torchring.report.words import NAMES, count, share_in_words

_WORTH_IT: Final = 0.02  # share of a step
_SIZES_MB: Final = (1, 2, 5, 12, 25, 50, 100, 200)
_INPUT_TELLING: Final = 0.05  # share of a step: it is never nothing
_OPTIMIZER_TELLING: Final = 0.10
_COMMUNICATION_TELLING: Final = 0.10  # before a larger batch is worth considering
_QUEUE_TELLING: Final = 0.05
_SLOWER_TELLING: Final = 0.05  # before a rank is accused
_STANDARD_ERRORS: Final = 3.0  # by which a rank must be slower
_NUM_PARTS: Final = 10  # of the trace, from which the error is estimated
_FUSED_SAVES: Final = {"AdamW": 0.5, "Adam": 0.5, "SGD": 0.3, "Adagrad": 0.3}  # of step(); said to be an assumption
_FEW_CORES: Final = 0.5  # of the time in which ranks wait for workers, they have no core
_HALF: Final = 0.5  # of what data or code take; said to be an assumption, too


def advise(situation: Situation) -> tuple[Advice, ...]:
    """All advice that saves at least 2 % of the time that a sample takes, the largest gain first."""
    if situation.step_ms <= 0:
        return ()
    found = [
        *_about_pauses(situation),
        *_about_input(situation),
        *_about_code_of_one_rank(situation),
        *_about_cores(situation),
        *_about_ranks(situation),
        *_about_communication(situation),
        *_about_optimizer(situation),
    ]
    return tuple(sorted((each for each in found if each.saves_share >= _WORTH_IT), key=lambda each: -each.saves_share))


def _advice(situation: Situation, what: str, saved_ms: float, why: str, how: str) -> Advice:
    return Advice(what, situation.step_ms - saved_ms, saved_ms / situation.step_ms, why, how)


def _about_input(situation: Situation) -> Iterator[Advice]:
    """Workers load batches while the rank computes, as far as cores are left for them."""
    loading, costs = situation.loading, situation.costs
    if loading is None:
        return
    now, waited = loading.num_workers, typical(loading.waiting.max(1))
    if now and situation.costs.queue is not None and typical(situation.costs.queue.whole) > _FEW_CORES * waited:
        return  # workers have no core either
    rank = costs.blamed if costs.is_input_of_blamed else None
    where = f"rank {situation.job.traces[rank].run_info.rank}" if rank is not None else "each rank"
    begin = f"{where[0].upper()}{where[1:]}"
    most = waited >= _INPUT_TELLING * situation.step_ms
    best = loading.best()
    saved = min(waited, loading.step_ms(now) - loading.step_ms(best))
    has_gain = saved >= _WORTH_IT * situation.step_ms
    if has_gain and most:
        workers, cores = count(best, "worker"), count(situation.run_info.num_cores, "core")
        if not loading.has_loader:
            what = "Load data in the background"
            why = (
                f"{begin} spends {waited:.1f} ms between step() and forward, and no DataLoader is used. If that is "
                f"loading data, {workers} in each rank would do it meanwhile; if it is logging or other code, do it "
                "less often."
            )
        elif now:
            what = f"Load data with {workers}"
            why = f"{begin} waits {waited:.1f} ms of a step for its DataLoader, which has {count(now, 'worker')}."
        else:
            what = "Load data in the background"
            why = f"{begin} spends {waited:.1f} ms of a step in its DataLoader, which has no workers."
        yield _advice(
            situation,
            what if rank is None else f"{what}, or faster, on {where}",
            saved,
            f"{why} This counts {HANDING_OVER_MS} ms for taking a batch from a worker, and what the workers need of "
            f"the {cores} of a host.",
            f"DataLoader(..., num_workers={best}, persistent_workers=True)",
        )
    elif most:
        lacking = loading.busy_ms > (1.0 - _WORTH_IT) * loading.step_ms(now)
        reason = (
            f"No core is left for {'more ' if now else ''}workers: {sharing(situation.run_info, now)}"
            if lacking
            else f"Workers would not help: to take a batch from one costs about {HANDING_OVER_MS} ms"
        )
        what, place = "Make batches cheaper to load", "in its DataLoader"
        how = "Decode and resize samples once, before training, and let the data set return whole batches."
        if not loading.has_loader:
            what, place = "Do less between step() and forward", "between step() and forward, and no DataLoader is used"
            how = "Prepare data once, before training. Log and evaluate less often."
        yield _advice(
            situation,
            what if rank is None else f"{what} on {where}",
            waited * _HALF,
            f"{begin} spends {waited:.2g} ms of a step {place}. {reason}. This assumes that half of it is enough.",
            how,
        )


def _about_code_of_one_rank(situation: Situation) -> Iterator[Advice]:
    """What the blamed rank does between step() and forward, apart from waiting for its DataLoader."""
    costs, loading = situation.costs, situation.loading
    if costs.blamed is None or loading is None or not loading.has_loader or not costs.is_forward_known:
        return
    if longer := _longer_ms(situation, situation.cycle[..., Phase.INPUT] - loading.waiting):
        run_info = situation.job.traces[costs.blamed].run_info
        yield _advice(
            situation,
            f"Find out what rank {run_info.rank} does between step() and forward",
            longer,
            f"Apart from its DataLoader, this takes {longer:.1f} ms longer than on the others. Look for what one rank "
            "does for all, such as logging, evaluation or a checkpoint, and do it less often.",
            f"py-spy dump --pid {run_info.pid}, on {run_info.host}, while the job runs",
        )


def _about_pauses(situation: Situation) -> Iterator[Advice]:
    """Long phases in a few steps. Numbers exclude these steps, so the predicted step is the present one."""
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
            "DataLoader(..., persistent_workers=True)",
        )


def _about_cores(situation: Situation) -> Iterator[Advice]:
    """Cores that ranks do not get."""
    if situation.costs.queue is None:
        return
    run_info, queued = situation.run_info, typical(situation.costs.queue.whole)
    why = f"For {queued:.1f} ms of a step, a rank was ready to run, but had no core: {situation.who_has_cores}."
    how = f"top, on {run_info.host}, while the job runs"
    if is_crowded(run_info):
        why += " Fewer ranks would not make the job faster: a step would have fewer samples."
        num_ranks = max(1, run_info.num_cores // threads_of(run_info))
        how = f"torchring run -H {run_info.host}:{num_ranks},another-host:... ..."
    if queued >= _QUEUE_TELLING * situation.step_ms:
        yield _advice(situation, f"Give the ranks on {run_info.host} more cores", queued, why, how)


def _about_ranks(situation: Situation) -> Iterator[Advice]:
    """The slowest rank."""
    costs, run_info = situation.costs, situation.job.traces[situation.costs.blamed or 0].run_info
    queued = 0.0 if costs.queue is None else costs.queue.of_ranks
    longer = _longer_ms(situation, situation.cycle[..., COMPUTING[1:]].sum(2) - queued)
    cause = _cause(costs, run_info, longer) if longer else None
    if cause:
        what, why, how = cause
        yield _advice(situation, what, longer, why, how)
    threads = max(1, run_info.num_cores // run_info.local_size)
    if is_crowded(run_info) and run_info.num_threads > threads:
        yield _advice(
            situation,
            f"Use {count(threads, 'thread')} in each rank of {run_info.host}",
            typical(costs.jitter) if cause else typical(costs.straggler + costs.jitter),
            f"{sharing(run_info, 0)}, so they hold each other up. This assumes that they then take equally long.",
            f"torchring run --env OMP_NUM_THREADS={threads} ...",
        )
    elif longer and not cause and not is_crowded(run_info):
        where = f" in {NAMES[costs.slower_in]}" if costs.slower_in is not None else ""
        yield _advice(
            situation,
            f"Find out what slows rank {run_info.rank} on {run_info.host} down",
            longer,
            f"Rank {run_info.rank} computes for {longer:.1f} ms longer than the others{where}: other threads of its "
            "process, a slower machine, or samples that take longer.",
            f"top -H, on {run_info.host}, while the job runs",
        )


def _longer_ms(situation: Situation, times: Array) -> float:
    """Time by which the blamed rank takes longer than the median of the others; 0 if that may be noise.

    Over all steps, also those in which another rank is the slowest.

    Args:
        times: [S, R] of a part of the step.
    """
    blamed = situation.costs.blamed
    if blamed is None:
        return 0.0
    longer = times[:, blamed] - np.median(np.delete(times, blamed, axis=1), axis=1)
    parts = np.array([part.mean() for part in np.array_split(longer, min(_NUM_PARTS, len(longer)))])
    error = float(parts.std(ddof=1)) / len(parts) ** 0.5 if len(parts) > 1 else 0.0
    least = max(_STANDARD_ERRORS * error, _SLOWER_TELLING * situation.step_ms)
    return float(parts.mean()) if parts.mean() > least else 0.0


def _cause(costs: Costs, run_info: RunInfo, longer_ms: float) -> tuple[str, str, str] | None:
    """What to do, why and how, if the trace shows why one rank computes for longer."""
    rank = f"rank {run_info.rank}"
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
            f"py-spy dump --pid {run_info.pid}, on {run_info.host}, while the job runs",
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
    run_info, workload, links, size = situation.run_info, situation.workload, situation.links, situation.job.size
    if size == 1 or links is None or not workload.bucket_bytes:
        return
    now = exposed_ms(workload, size, links)
    measured = typical(situation.costs.communication)

    def saved_ms(changed: Workload, by: Connections = links) -> float:
        # The model may see more or less exposed communication than there was.
        after = exposed_ms(changed, size, by)
        return measured * (1.0 - after / now) if now > 0 else 0.0

    if run_info.options.get("compression", "None") == "None" and run_info.local_size < run_info.size:
        slower, why = _in_16_bits(run_info)
        half = tuple(each / 2 * slower for each in workload.bucket_bytes)
        yield _advice(
            situation,
            "Send gradients in 16 bits",
            saved_ms(dataclasses.replace(workload, bucket_bytes=half)),
            f"This halves what crosses the network. Sums are still computed in 32 bits.{why}",
            'torchring.wrap(optimizer, model, compression="bf16")',
        )
    if run_info.overlap == "inline" and run_info.algorithm != "direct" and not workload.is_overlapped:
        yield _advice(
            situation,
            "Reduce in the background",
            saved_ms(between_hosts(workload)),
            "Backward stands still while each bucket is reduced. This assumes that a core is left for the thread.",
            'torchring.wrap(optimizer, model, overlap="thread")',
        )
    yield from _about_bucket_size(situation, saved_ms)
    if run_info.algorithm == "ring" and 1 < run_info.local_size < size and not links.is_hierarchical:
        two_levels = Connections(links.network, True, run_info.local_size)
        yield _advice(
            situation,
            "Reduce within each host first",
            saved_ms(workload, two_levels),
            f"{run_info.local_size} ranks of a host send over one link. This assumes that memory within a host is much "
            "faster than the network.",
            'torchring.wrap(optimizer, model, algorithm="hierarchical")',
        )
    if run_info.options.get("accumulate", "1") == "1" and measured >= _COMMUNICATION_TELLING * situation.step_ms:
        yield _advice(
            situation,
            "Reduce gradients in every second backward only",
            measured / 2,
            "This halves communication for the same number of samples. It doubles the batch of an optimizer step, so "
            "the learning rate may need a change. The duration is per backward.",
            "torchring.wrap(optimizer, model, accumulate=2)",
        )


def _in_16_bits(run_info: RunInfo) -> tuple[float, str]:
    """Factor by which a byte takes longer in 16 bits, and why."""
    if run_info.algorithm != "native" or run_info.options.get("algorithm", "auto") != "auto":
        return 1.0, ""
    other = "ring" if run_info.local_size == 1 else "hierarchical"
    number = r"(\d+\.?\d*(?:e[+-]\d+)?)"
    measured = re.search(rf"\b{other} {number} ms, native {number} ms", run_info.reason)  # see `select.py`
    factor = float(measured[1]) / max(1e-9, float(measured[2])) if measured else 2.0  # saves nothing
    return factor, f' algorithm="auto" then takes "{other}", which took {factor:.2g} times as long for 32 bits.'


def _about_bucket_size(situation: Situation, saved_ms: Callable[[Workload], float]) -> Iterator[Advice]:
    now = len(situation.workload.bucket_bytes)
    found = []
    for size_mb in _SIZES_MB:
        layout = layout_with(situation.job, sum(situation.workload.bucket_bytes), size_mb)
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
            f"Gradients travel in {count(now, 'bucket')}; {why}. With {then} they are reduced sooner after backward.",
            f"torchring.wrap(optimizer, model, bucket_mb={size_mb})",
        )


def _about_optimizer(situation: Situation) -> Iterator[Advice]:
    cost, options = typical(situation.costs.optimizer), situation.run_info.options
    name = options.get("optimizer", "AdamW")
    if cost >= _OPTIMIZER_TELLING * situation.step_ms and options.get("fused") != "True" and name in _FUSED_SAVES:
        yield _advice(
            situation,
            "Let the optimizer update all parameters at once",
            _FUSED_SAVES[name] * cost,
            f"step() takes {cost:.1f} ms. This assumes that fusing saves {share_in_words(_FUSED_SAVES[name])} of that.",
            f"torch.optim.{name}(model.parameters(), fused=True)",
        )
