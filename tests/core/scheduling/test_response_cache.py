"""Hits and misses before a scheduler, and what they count as [K03, K05, P07, E09]."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from remora.backends import Backend
from remora.backends.registry import EnsembleBackend
from remora.cache import LocalCache
from remora.calls import Duration, Metrics, ModelStats, ModelUnload
from remora.config import batch_policy
from remora.engine import Engine
from remora.errors import CancelledError, InternalError, RemoraError, UnavailableError
from remora.messages import Mailbox, Response, Ticket
from remora.models import loader as loading
from remora.options import EngineOptions
from remora.scheduling.batching import BatchQueue
from remora.scheduling.pool import DispatchPolicy
from remora.scheduling.response_cache import CachedScheduler
from remora.scheduling.scheduler import Scheduler
from remora.signature import Signature
from remora.statistics import CacheSample, ModelStatistics
from remora.statistics.recorder import StatisticsRecorder
from support.engine.fakes import (
    DOUBLER,
    FakeBackend,
    FakeClock,
    FakeInstance,
    FakeMailbox,
    Replies,
    config_of,
    ticket_of,
    write_model,
)

CACHED = DOUBLER + "response_cache { enable: true }"
SMALL = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
TENSORS = DOUBLER.replace('backend: "fake"', "")


class Bench:
    """A cached scheduler whose crank the test turns, on a clock that stands still."""

    def __init__(self, config: str = DOUBLER) -> None:
        self.clock = FakeClock()
        self.instance = FakeInstance()
        self.statistics = ModelStatistics(samples=8)
        recorder = StatisticsRecorder(self.statistics, self.clock)
        made = config_of(config)
        queue = BatchQueue(batch_policy(made))
        signature = Signature(made, "m")
        self.inner = Scheduler(queue, [self.instance], signature, recorder, self.clock, DispatchPolicy(threads=False))
        self.cache = LocalCache(1 << 20, self.clock.monotonic_ns)
        scope = self.cache.scope("m", 1)
        self.scheduler = CachedScheduler(self.inner, self.cache, scope, recorder, self.clock)
        self.replies = Replies()

    def submit(self, rows: int = 1, *, mailbox: Mailbox | None = None) -> Ticket:
        ticket = ticket_of(rows, reply=self.replies, mailbox=mailbox)
        self.scheduler.submit(ticket)
        return ticket

    def asked(self, rows: int = 1) -> Ticket:
        """A request that ran."""
        ticket = self.submit(rows)
        self.inner.step()
        return ticket

    def values(self, ticket: Ticket) -> list[list[int]]:
        outcome = self.replies.only(ticket)
        assert isinstance(outcome, Response)
        return outcome.outputs[0].data.tolist()  # type: ignore[no-any-return]

    @property
    def stats(self) -> ModelStats:
        return self.statistics.snapshot("m", "1")


def test_a_request_that_comes_again_is_answered_without_the_model() -> None:
    bench = Bench()
    first = bench.asked(3)
    again = bench.submit(3)
    assert bench.values(again) == bench.values(first) == [[0], [2], [4]]
    assert len(bench.instance.batches) == 1
    assert (bench.scheduler.pending, bench.scheduler.running) == (0, 0)


def test_a_hit_is_delivered_through_its_mailbox() -> None:
    bench, mailbox = Bench(), FakeMailbox()
    bench.asked()
    ticket = bench.submit(mailbox=mailbox)
    assert [[posted for posted, _ in post] for post in mailbox.posts] == [[ticket]]


def test_other_data_misses() -> None:
    bench = Bench()
    bench.asked(1)
    ticket = bench.asked(2)
    assert bench.values(ticket) == [[0], [2]]
    assert len(bench.instance.batches) == 2


def test_a_full_queue_refuses_no_hit() -> None:
    bench = Bench(DOUBLER + SMALL)
    bench.asked(1)
    bench.submit(2)
    with pytest.raises(UnavailableError):
        bench.submit(3)
    assert bench.values(bench.submit(1)) == [[0]]


@pytest.mark.parametrize("error", [InternalError("failed"), InternalError("answered", answered=True)])
def test_only_success_is_kept(error: RemoraError) -> None:
    bench = Bench()
    bench.instance.answer = lambda _: error
    assert bench.replies.only(bench.asked()) is error
    bench.asked()
    assert len(bench.instance.batches) == 2
    assert bench.cache.stats().entries == 0


def test_a_cancelled_request_is_not_answered_from_the_cache() -> None:
    bench = Bench()
    bench.asked()
    ticket = ticket_of(reply=bench.replies)
    ticket.cancel()
    bench.scheduler.submit(ticket)
    bench.inner.step()
    assert isinstance(bench.replies.only(ticket), CancelledError)


def test_what_stops_gives_no_hits_either() -> None:
    bench = Bench()
    bench.asked()
    assert bench.scheduler.stop()
    with pytest.raises(UnavailableError, match="stopping"):
        bench.submit()


def test_what_waits_when_its_time_is_over_is_answered_once() -> None:
    bench = Bench()
    ticket = bench.submit()
    bench.scheduler.fail_pending(UnavailableError("over"))
    assert isinstance(bench.replies.only(ticket), UnavailableError)
    assert bench.cache.stats().entries == 0


def test_a_request_without_a_key_runs_and_counts_as_neither() -> None:
    bench = Bench()
    ticket = ticket_of(reply=bench.replies)
    ticket.request.inputs["OTHER"] = np.array([object()], object)
    bench.scheduler.submit(ticket)
    bench.inner.step()
    assert bench.values(ticket) == [[0]]
    assert bench.stats.cache_miss == bench.stats.cache_hit == Duration()


def test_hits_count_as_success_and_in_the_queue_but_neither_as_inference_nor_execution() -> None:
    bench = Bench()
    bench.asked(2)
    for _ in range(2):
        bench.submit(2)
    stats = bench.stats
    assert (stats.inference_count, stats.execution_count) == (2, 1)
    assert (stats.success.count, stats.queue.count, stats.compute_infer.count) == (3, 3, 1)
    assert (stats.cache_hit.count, stats.cache_miss.count) == (2, 1)
    assert stats.success.ns == stats.queue.ns == 0
    request, queue = bench.statistics.histograms()
    assert sum(request.counts) == sum(queue.counts) == 3


def test_a_failure_of_the_model_is_a_miss_and_no_success() -> None:
    bench = Bench()
    bench.instance.failure = ValueError("broken")
    bench.asked()
    assert (bench.stats.fail.count, bench.stats.success.count, bench.stats.cache_miss.count) == (1, 0, 1)


def test_the_times_of_hits_and_misses_add_up() -> None:
    statistics = ModelStatistics(samples=8)
    recorder = StatisticsRecorder(statistics, FakeClock())
    recorder.cache_hit(ticket_of(arrival_ns=100), 30, 110, 150)
    recorder.cache_hit(ticket_of(arrival_ns=200), 20, 200, 230)
    recorder.cache_miss(70, 300)
    stats = statistics.snapshot("m", "1")
    assert stats.success == Duration(2, 50 + 30)
    assert stats.queue == Duration(2, 10)
    assert stats.cache_hit == Duration(2, 50)
    assert stats.cache_miss == Duration(1, 70)
    assert statistics.cache_samples(230) == [CacheSample(230, True, 20, 30, 0), CacheSample(300, False, 70, 0, 0)]


# -- in the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    made = FakeBackend()

    def find(name: str) -> Backend:
        return EnsembleBackend() if name == "ensemble" else made.find(name)

    monkeypatch.setattr(loading, "find_backend", find)
    return made


@pytest.fixture
def engine(tmp_path: Path, backend: FakeBackend) -> Iterator[Engine]:
    """m and other have the cache on, plain has not; chain is an ensemble over plain with the cache on."""
    write_model(tmp_path, "m", config=CACHED, versions=("1", "2"))
    write_model(tmp_path, "other", config=CACHED)
    write_model(tmp_path, "plain")
    step = (
        'step { model_name: "plain" model_version: -1 input_map { key: "IN" value: "IN" } '
        'output_map { key: "OUT" value: "OUT" } }'
    )
    chain = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {step} }} response_cache {{ enable: true }}'
    write_model(tmp_path, "chain", config=chain)
    options = EngineOptions(
        model_control_mode="explicit",
        load_model=("*",),
        cache_config=("local,size=65536",),
        metrics_config=("summary_latencies=true",),
    )
    with Engine(tmp_path, clock=FakeClock(), options=options) as running:
        yield running


def runs(backend: FakeBackend, name: str) -> int:
    """How many batches all loads of a model ran."""
    models = [model for model in backend.opened if model.source.name == name]
    return sum(len(instance.batches) for model in models for instance in model.instances)


def ask(engine: Engine, name: str) -> list[list[int]]:
    return engine.infer(name, {"IN": [[3]]})["OUT"].tolist()  # type: ignore[no-any-return]


def test_models_share_the_cache_but_no_answers(engine: Engine, backend: FakeBackend) -> None:
    for name in ("m", "other", "m", "other"):
        assert ask(engine, name) == [[6]]
    assert (runs(backend, "m"), runs(backend, "other")) == (1, 1)


def test_a_model_without_the_cache_always_runs(engine: Engine, backend: FakeBackend) -> None:
    for _ in range(2):
        assert ask(engine, "plain") == [[6]]
    assert runs(backend, "plain") == 2


def test_a_reloaded_model_is_called_again(engine: Engine, backend: FakeBackend, tmp_path: Path) -> None:
    ask(engine, "m")
    (tmp_path / "m" / "2" / "fake.bin").write_bytes(b"new")
    engine.load("m")
    ask(engine, "m")
    assert runs(backend, "m") == 2


def test_an_ensemble_has_the_cache_until_one_of_its_models_changes(
    engine: Engine, backend: FakeBackend, tmp_path: Path
) -> None:
    for _ in range(2):
        assert ask(engine, "chain") == [[6]]
    assert runs(backend, "plain") == 1
    before = engine.resolve("plain")
    (tmp_path / "plain" / "1" / "fake.bin").write_bytes(b"new")
    engine.load("plain")
    before.close()  # again, and to its end: the lifecycle closes in a thread
    assert ask(engine, "chain") == [[6]]
    assert runs(backend, "plain") == 2


def test_a_program_cannot_write_into_what_is_kept(engine: Engine) -> None:
    ask(engine, "m")
    hit = engine.infer("m", {"IN": [[3]]})["OUT"]
    with pytest.raises(ValueError, match="read-only"):
        hit[:] = 0


def test_the_page_shows_the_cache_and_the_models_that_use_it(engine: Engine) -> None:
    for _ in range(3):
        ask(engine, "m")
    page = engine.perform(Metrics())
    for line in (
        'nv_cache_num_hits_per_model{model="m",version="2"} 2',
        'nv_cache_num_misses_per_model{model="m",version="2"} 1',
        'nv_cache_hit_summary_per_model_count{model="m",version="2"} 2',
        'nv_cache_miss_summary_per_model_count{model="other",version="1"} 0',
        "nv_cache_num_entries 1",
        "nv_cache_num_lookups 3",
        "nv_cache_num_evictions 0",
    ):
        assert line in page.splitlines()
    assert not re.search(r'nv_cache[^\n]*model="plain"', page)
    assert 0 < float(re.findall(r"^nv_cache_util (\S+)", page, re.MULTILINE)[0]) < 0.1


def test_an_unloaded_model_is_gone_from_the_page(engine: Engine) -> None:
    engine.perform(ModelUnload("other"))
    assert 'model="other"' not in engine.perform(Metrics())


def test_a_model_that_asks_for_a_cache_that_is_not_there_serves_and_says_so(
    tmp_path: Path, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m", config=CACHED)
    with Engine(tmp_path, clock=FakeClock()) as engine:
        assert [ask(engine, "m"), ask(engine, "m")] == [[[6]], [[6]]]
        assert "nv_cache" not in engine.perform(Metrics())
    assert runs(backend, "m") == 2
    assert "--cache-config=local,size=BYTES" in caplog.text
