"""Advice that makes a job faster. The models in `scaling.py` and `core_time.py` predict by how much.

Advice is judged by samples per second, and by the cores that are left. What its own numbers call a loss is not given.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.placement import count
from torchring.report.model.bucket_layout import layout_with
from torchring.report.model.core_time import HANDING_OVER_MS, is_crowded, ranks_of_host, sharing, threads_of
from torchring.report.model.scaling import Workload, exposed_ms, with_layout
from torchring.report.model.timing import Array, typical
from torchring.report.model.waits import COMPUTING
from torchring.report.verdict.findings import Advice, Analysis
from torchring.report.verdict.pauses import TELLING
from torchring.report.words import NAMES, share_in_words

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
_NEARLY_ALL: Final = 0.75
_HALF: Final = 0.5  # of what data or code take; said to be an assumption, too
_FEWEST_SAMPLES: Final = 3  # of a line, and its share of all samples, to name the line
_LEAST_SAMPLES: Final = 0.2

Found = tuple[str, float, str, str]
"""What to do, how many milliseconds of a step that saves, why, and how."""


def advise(analysis: Analysis) -> tuple[Advice, ...]:
    """All advice that saves at least 2 % of the time that a sample takes, the largest gain first."""
    if analysis.step.mean <= 0:
        return ()
    found = [
        *_about_input(analysis),
        *_about_cores(analysis),
        *_about_ranks(analysis),
        *_about_communication(analysis),
        *_about_optimizer(analysis),
    ]
    step_ms = analysis.step.mean
    advice = [Advice(what, step_ms - saved_ms, saved_ms / step_ms, why, how) for what, saved_ms, why, how in found]
    advice = [each for each in (*_about_pauses(analysis), *advice) if each.saves_share >= _WORTH_IT]
    return tuple(sorted(advice, key=lambda each: -each.saves_share))


def _about_input(analysis: Analysis) -> Iterator[Found]:
    """Workers load batches while the rank computes, as far as cores are left for them."""
    loading, costs = analysis.loading, analysis.costs
    if loading is None:
        return
    now, waited = loading.num_workers, typical(loading.waiting.max(1))
    if waited < _INPUT_TELLING * analysis.step.mean:
        return
    if now and costs.queue is not None and typical(costs.queue.whole) > _FEW_CORES * waited:
        return  # workers have no core either
    rank = costs.blamed if costs.is_input_of_blamed else None
    where = f"rank {analysis.job.traces[rank].run_info.rank}" if rank is not None else "each rank"
    begin = f"{where[0].upper()}{where[1:]}"
    best = loading.best()
    saved = min(waited, loading.step_ms(now) - loading.step_ms(best))
    on = "" if rank is None else f" on {where}"
    is_known = not loading.has_loader or typical(costs.loading) >= _NEARLY_ALL * typical(costs.input)
    line = _line_in(analysis, Phase.INPUT, rank) if is_known else ""  # else it may be of other code
    if saved >= _WORTH_IT * analysis.step.mean:
        workers, cores = count(best, "worker"), count(analysis.run_info.num_cores, "core")
        what = "Load data in the background"
        why = f"{begin} spends {waited:.1f} ms of a step in its DataLoader{line}. The DataLoader has no workers."
        if not loading.has_loader:
            why = (
                f"{begin} spends {waited:.1f} ms between step() and forward{line}, and no DataLoader is used. If that "
                f"is loading data, {workers} in each rank would do it meanwhile; if it is logging or other code, do it "
                "less often."
            )
        elif now:
            what = f"Load data with {workers}"
            why = f"{begin} waits {waited:.1f} ms of a step for its DataLoader, which has {count(now, 'worker')}."
        yield (
            f"{what}, or faster,{on}" if on else what,
            saved,
            f"{why} This counts {HANDING_OVER_MS} ms for taking a batch from a worker, and what the workers need of "
            f"the {cores} of a host.",
            f"DataLoader(..., num_workers={best}, persistent_workers=True)",
        )
    else:
        reason = f"Workers would not help: to take a batch from one costs about {HANDING_OVER_MS} ms"
        if loading.busy_ms > (1.0 - _WORTH_IT) * loading.step_ms(now):
            reason = f"No core is left for {'more ' if now else ''}workers: {sharing(analysis.run_info, now)}"
        what, place = "Make batches cheaper to load", f"in its DataLoader{line}"
        how = "Decode and resize samples once, before training, and let the data set return whole batches."
        if not loading.has_loader:
            what = "Do less between step() and forward"
            place = f"between step() and forward{line}, and no DataLoader is used"
            how = "Prepare data once, before training. Log and evaluate less often."
        why = f"{begin} spends {waited:.2g} ms of a step {place}. {reason}. This assumes that half of it is enough."
        yield f"{what}{on}", waited * _HALF, why, how


def _about_pauses(analysis: Analysis) -> Iterator[Advice]:
    """Long phases in a few steps. Numbers exclude these steps, so the predicted step is the present one."""
    for pauses in analysis.pauses:
        if pauses.share < TELLING or pauses.kind == "communication":
            continue
        shared = "" if pauses.is_common else " or on all ranks"
        rank = None if pauses.rank is None else analysis.timing.ranks.index(pauses.rank)
        line = _line_in(analysis, pauses.phase, rank, pauses.numbers).replace(",", " Samples of that time are", 1)
        mean_ms = analysis.step.mean / (1.0 - pauses.share)
        yield Advice(
            f"Shorten what {pauses.who} does {pauses.place} in {pauses.named_steps}",
            analysis.step.mean,
            pauses.share,
            f"With it, a step takes {mean_ms:.4g} ms on average.{line and f'{line}.'} "
            f"Evaluate less often{shared}, write checkpoints in the "
            "background, and keep the workers of a DataLoader from one epoch to the next.",
            "DataLoader(..., persistent_workers=True)",
        )


def _about_cores(analysis: Analysis) -> Iterator[Found]:
    if analysis.costs.queue is None:
        return
    run_info, queued = analysis.run_info, typical(analysis.costs.queue.whole)
    why = f"For {queued:.1f} ms of a step, a rank was ready to run, but had no core: {analysis.who_has_cores}."
    how = f"top, on {run_info.host}, while the job runs"
    if is_crowded(run_info):
        why += " Fewer ranks would not make the job faster: a step would have fewer samples."
        num_ranks = max(1, run_info.num_cores // threads_of(run_info))
        how = f"torchring run -H {run_info.host}:{num_ranks},another-host:... ..."
    if queued >= _QUEUE_TELLING * analysis.step.mean:
        yield f"Give the ranks on {run_info.host} more cores", queued, why, how


def _about_ranks(analysis: Analysis) -> Iterator[Found]:
    costs, run_info = analysis.costs, analysis.job.traces[analysis.costs.blamed or 0].run_info
    queued = 0.0 if costs.queue is None else costs.queue.of_ranks
    loading = analysis.loading
    if loading is not None and loading.has_loader and costs.is_forward_known:
        longer = _longer_ms(analysis, analysis.cycle[..., Phase.INPUT] - loading.waiting)
        if longer:
            yield _work_of_one(analysis, Phase.INPUT, "between step() and forward, apart from its DataLoader", longer)
    longer = _longer_ms(analysis, analysis.cycle[..., COMPUTING[1:]].sum(2) - queued)
    cause = _cause(analysis, run_info, longer) if longer else None
    if cause:
        yield cause
    threads = max(1, run_info.num_cores // ranks_of_host(run_info))
    if is_crowded(run_info) and run_info.num_threads > threads:
        yield (
            f"Use {count(threads, 'thread')} in each rank of {run_info.host}",
            typical(costs.jitter) if cause else typical(costs.straggler + costs.jitter),
            f"{sharing(run_info, 0)}, so they hold each other up. This assumes that they then take equally long.",
            f"torchring run --env OMP_NUM_THREADS={threads} ...",
        )
    elif longer and not cause and not is_crowded(run_info):
        where, slower_in = "", costs.slower_in
        if slower_in is not None:
            where = f" in {NAMES[slower_in]}{_line_in(analysis, slower_in, costs.blamed)}"
        yield (
            f"Find out what slows rank {run_info.rank} on {run_info.host} down",
            longer,
            f"Rank {run_info.rank} computes for {longer:.1f} ms longer than the others{where}: other threads of its "
            "process, a slower machine, or samples that take longer.",
            f"top -H, on {run_info.host}, while the job runs",
        )


def _longer_ms(analysis: Analysis, times: Array) -> float:
    """Time by which the blamed rank takes longer than the median of the others; 0 if that may be noise.

    Over all steps, also those in which another rank is the slowest. `times`: [S, R] of a part of the step.
    """
    blamed = analysis.costs.blamed
    if blamed is None:
        return 0.0
    longer = times[:, blamed] - np.median(np.delete(times, blamed, axis=1), axis=1)
    parts = np.array([part.mean() for part in np.array_split(longer, min(_NUM_PARTS, len(longer)))])
    error = float(parts.std(ddof=1)) / len(parts) ** 0.5 if len(parts) > 1 else 0.0
    least = max(_STANDARD_ERRORS * error, _SLOWER_TELLING * analysis.step.mean)
    return float(parts.mean()) if parts.mean() > least else 0.0


def _cause(analysis: Analysis, run_info: RunInfo, longer_ms: float) -> Found | None:
    """What to do if the trace shows why one rank computes for longer."""
    costs = analysis.costs
    if costs.has_longer_batches:
        return (
            "Give each rank as many samples",
            longer_ms,
            f"The batches of rank {run_info.rank} have {costs.batch_ratio:.2g} times as many samples as those of the "
            f"others, and it computes for {longer_ms:.1f} ms longer.",
            "DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))    # one batch_size for all ranks",
        )
    places = {Phase.OPTIMIZER: "in step(), hooks included", Phase.BETWEEN: "between backward and step()"}
    if costs.slower_in not in places:
        return None
    return _work_of_one(analysis, costs.slower_in, places[costs.slower_in], longer_ms)


def _work_of_one(analysis: Analysis, phase: Phase, place: str, longer_ms: float) -> Found:
    run_info = analysis.job.traces[analysis.costs.blamed or 0].run_info
    costs = analysis.costs
    is_known = phase != Phase.INPUT or typical(costs.loading) < _HALF * typical(costs.input)
    line = _line_in(analysis, phase, costs.blamed) if is_known else ""
    return (
        f"Find out what rank {run_info.rank} does {place}",
        longer_ms,
        f"This takes {longer_ms:.1f} ms longer than on the others{line}. Look for what one rank does for all, such as "
        "logging, evaluation or a checkpoint, and do it less often.",
        f"py-spy dump --pid {run_info.pid}, on {run_info.host}, while the job runs",
    )


def _line_in(analysis: Analysis, phase: Phase, position: int | None, numbers: Iterable[int] = ()) -> str:
    """ ", mostly in train.py:30 (loss.item())": where the script of a rank, or of all, was most often in that phase.

    Of the steps that count, or of those with these numbers. "" if there are few samples, or none is frequent.
    """
    steps = {*(numbers or analysis.timing.numbers[analysis.timing.counts].tolist())}
    traces = analysis.job.traces if position is None else [analysis.job.traces[position]]
    samples = (each for trace in traces for each in trace.samples)
    seen = Counter(line for step, where, line in samples if where == phase and step in steps)
    for line, number in seen.most_common(1):
        if number >= max(_FEWEST_SAMPLES, _LEAST_SAMPLES * seen.total()):
            return f", {'mostly' if number > _HALF * seen.total() else 'often'} in {line}"
    return ""


def _about_communication(analysis: Analysis) -> Iterator[Found]:
    run_info, workload, links, size = analysis.run_info, analysis.model.workload, analysis.model.now, analysis.size
    if size == 1 or links is None or not workload.bucket_bytes or analysis.job.is_part:
        return
    now = exposed_ms(workload, size, links)
    measured = typical(analysis.costs.communication)

    def saved_ms(changed: Workload) -> float:
        # The model may see more or less exposed communication than there was.
        after = exposed_ms(changed, size, links)
        return measured * (1.0 - after / now) if now > 0 else 0.0

    if run_info.options.get("compression", "None") == "None" and run_info.local_size < run_info.size:
        half = tuple(each / 2 for each in workload.bucket_bytes)
        yield (
            "Send gradients in 16 bits",
            saved_ms(dataclasses.replace(workload, bucket_bytes=half)),
            "This halves what crosses the network. Each sum of two is rounded to 16 bits there.",
            'torchring.wrap(optimizer, model, compression="bf16")',
        )
    yield from _about_bucket_size(analysis, saved_ms)
    if run_info.options.get("accumulate", "1") == "1" and measured >= _COMMUNICATION_TELLING * analysis.step.mean:
        yield (
            "Reduce gradients in every second backward only",
            measured / 2,
            "This halves communication for the same number of samples. It doubles the batch of an optimizer step, so "
            "the learning rate may need a change. The duration is per backward.",
            "torchring.wrap(optimizer, model, accumulate=2)",
        )


def _about_bucket_size(analysis: Analysis, saved_ms: Callable[[Workload], float]) -> Iterator[Found]:
    now = len(analysis.model.workload.bucket_bytes)
    found = []
    for size_mb in _SIZES_MB:
        layout = layout_with(analysis.job, sum(analysis.model.workload.bucket_bytes), size_mb)
        if layout is not None and len(layout[0]) != now:
            changed = with_layout(analysis.model.workload, layout, analysis.backward_ms)
            found.append((saved_ms(changed), size_mb, len(changed.bucket_bytes)))
    if found:
        best, size_mb, then = max(found, key=lambda each: (each[0], -each[1]))
        why = "each bucket costs latency" if then < now else "the first buckets could leave earlier"
        yield (
            f"Use buckets of {size_mb} MiB",
            best,
            f"Gradients travel in {count(now, 'bucket')}; {why}. With {then} they are reduced sooner after backward.",
            f"torchring.wrap(optimizer, model, bucket_mb={size_mb})",
        )


def _about_optimizer(analysis: Analysis) -> Iterator[Found]:
    cost, options = typical(analysis.costs.optimizer), analysis.run_info.options
    name = options.get("optimizer", "AdamW")
    if cost >= _OPTIMIZER_TELLING * analysis.step.mean and options.get("fused") != "True" and name in _FUSED_SAVES:
        yield (
            "Let the optimizer update all parameters at once",
            _FUSED_SAVES[name] * cost,
            f"step() takes {cost:.1f} ms. This assumes that fusing saves {share_in_words(_FUSED_SAVES[name])} of that.",
            f"torch.optim.{name}(model.parameters(), fused=True)",
        )
