"""Which scheduler a model's configuration gets, and what all schedulers report."""

from __future__ import annotations

import pytest

from remora.cache import LocalCache
from remora.calls import SequenceReport
from remora.scheduling.assembly import CacheUse, SchedulingOptions, add_cache, make_scheduler
from remora.scheduling.response_cache import CachedScheduler
from remora.scheduling.scheduler import ModelScheduler, Scheduler
from remora.scheduling.sequences.scheduler import SequenceScheduler
from remora.signature import Signature
from remora.statistics import ModelStatistics
from remora.statistics.recorder import StatisticsRecorder
from support.engine.fakes import DOUBLER, FakeClock, FakeInstance, config_of

SEQUENCES = "sequence_batching { direct { } }"


def make(text: str, options: SchedulingOptions | None = None) -> ModelScheduler:
    config, clock = config_of(DOUBLER + text), FakeClock()
    recorder = StatisticsRecorder(ModelStatistics(), clock)
    return make_scheduler(
        config, [FakeInstance()], Signature(config, "m"), recorder, clock, options or SchedulingOptions()
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", Scheduler), ("dynamic_batching { }", Scheduler), (SEQUENCES, SequenceScheduler)],
)
def test_sequence_batching_selects_the_sequence_scheduler(text: str, kind: type[object]) -> None:
    assert type(make(text)) is kind


def test_a_scheduler_without_sequences_keeps_and_reports_none() -> None:
    scheduler = make("dynamic_batching { }")
    assert scheduler.open_sequences == 0
    assert not scheduler.keeps_sequence(7)
    assert scheduler.report() is None


def test_a_sequence_scheduler_reports_its_strategy() -> None:
    scheduler = make(SEQUENCES)
    report = scheduler.report()
    assert isinstance(report, SequenceReport)
    assert report.strategy == "direct"
    assert not scheduler.keeps_sequence(7)


def test_a_cache_is_put_in_front_of_a_scheduler() -> None:
    clock, inner = FakeClock(), make("")
    cache = LocalCache(1 << 20, clock.monotonic_ns)
    use = CacheUse(cache, cache.scope("m", 1, b""), composed=False)
    cached = add_cache(inner, use, StatisticsRecorder(ModelStatistics(), clock), clock)
    assert isinstance(cached, CachedScheduler)
    assert cached.costs is inner.costs
