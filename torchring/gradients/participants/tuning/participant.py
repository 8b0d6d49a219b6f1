"""The participant that tunes: between rounds, it lets a `Tuner` lay out other buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torchring.gradients.layout import BucketLayout
from torchring.gradients.participants.tuning.candidates import what_to_tune
from torchring.gradients.participants.tuning.tuning import Tuner, open_tuner, tunes_by_default
from torchring.gradients.plan import ParameterSpec, Plan, describe
from torchring.gradients.round import Participant, RoundState

_SEVERAL = "nothing is tuned with several optimizers"


class Tuning(Participant):
    """Tunes the buckets of one optimizer."""

    def __init__(self, layout: BucketLayout, tuner: Tuner) -> None:
        self._layout = layout
        self._tuner = tuner
        self._next_plan: Plan | None = None  # to be installed at the end of the round

    def begin(self, current: RoundState) -> None:
        layout, tuner = self._layout, self._tuner
        if layout.follows_order:
            tuner.order_is_known()
        if current.is_unordered and not current.is_again:
            self._next_plan = self._take_over(tuner.stop(_SEVERAL)) or self._next_plan
        elif not current.is_again and (plan := self._take_over(tuner.next_plan(layout.current_plan, layout.specs))):
            layout.install(plan)
        tuner.begin_round(current)
        if tuner.is_observing and current.mark_ready is None:
            current.mark_ready = tuner.mark_ready

    def agreed(self, current: RoundState) -> None:
        self._tuner.end_round()

    def reduced(self, current: RoundState) -> None:
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            self._layout.install(plan)

    def extending(self) -> None:
        reason = "default plan, as parameters were added before another plan had won a trial"
        if plan := self._take_over(self._tuner.stop(reason)):
            self._layout.install(plan)

    def recall(self, specs: Sequence[ParameterSpec]) -> None:
        """Collective, before the layout opens: begin with the plan that an earlier run has found, if there is one."""
        layout = self._layout
        if known := self._take_over(self._tuner.recall(specs)):
            layout.launcher.forget_order()  # the plan has the order of an earlier run
        layout.first_plan = known or layout.plan(specs)

    def _take_over(self, plan: Plan | None) -> Plan | None:
        """The tuner has decided something."""
        self._layout.compression = self._tuner.compression
        self._layout.remarks["tuning"] = self._tuner.reason
        return plan


def open_tuning(layout: BucketLayout, specs: Sequence[ParameterSpec]) -> list[Tuning]:
    """Collective: what the options leave to be tuned; nothing in most jobs. Chooses the plan to begin with."""
    options, plan = layout.options, layout.first_plan
    tunes_buckets = options.bucket_mb == "auto" or (
        options.bucket_mb is None and tunes_by_default(layout.world, layout.all_reduce, plan)
    )
    if not tunes_buckets and options.compression != "auto":
        return []
    tuned = what_to_tune(
        buckets=tunes_buckets,
        bucket_bytes=layout.bucket_bytes,
        compression=options.compression,
    )
    layout.compressions = tuned.compressions
    lines = describe(specs, str(options))
    tuning = Tuning(layout, open_tuner(layout.world, layout.all_reduce, layout.launcher, plan, lines, tuned))
    tuning.recall(specs)
    return [tuning]
