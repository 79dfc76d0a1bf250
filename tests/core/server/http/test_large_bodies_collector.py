"""Pause of the garbage collector's oldest generation while large bodies are in work."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from remora.protocols.rest.answer import HttpAnswer, encode_json_error
from remora.server.http.large_bodies import NEVER, CollectorPause, LargeBodies
from support.engine.fakes import FakeExchange
from support.process.eventually import eventually, eventually_in_loop
from support.process.no_threads import refuse_threads

PATIENCE_S = 60.0


def test_the_oldest_generation_is_not_collected_while_bodies_are_decoded() -> None:
    found: list[int] = []
    usual = gc.get_threshold()

    async def play() -> None:
        bodies = LargeBodies(asyncio.get_running_loop())
        exchanges = [FakeExchange(), FakeExchange()]

        def work() -> HttpAnswer:
            found.append(gc.get_threshold()[2])
            return HttpAnswer(200, (), [])

        for exchange in exchanges:
            bodies.print(exchange, work)
        await eventually_in_loop(lambda: all(exchange.answers for exchange in exchanges))
        assert gc.get_threshold() == usual

    asyncio.run(play())
    assert min(found) > 1_000_000_000


def test_the_oldest_generation_is_collected_again_after_a_loop_was_closed_amid_a_body() -> None:
    usual, go_on = gc.get_threshold(), threading.Event()

    async def play() -> None:
        LargeBodies(asyncio.get_running_loop()).run(lambda: go_on.wait(PATIENCE_S), lambda _waited: None)
        assert gc.get_threshold()[2] == NEVER

    asyncio.run(play())
    assert gc.get_threshold()[2] == NEVER
    go_on.set()
    eventually(lambda: gc.get_threshold() == usual)


def test_an_old_pause_waits_for_a_full_collection(usual: int) -> None:
    pause, oldest = CollectorPause(), lambda: gc.get_threshold()[2]
    pause.extend(10.0)
    pause.extend(15.0)
    assert oldest() == NEVER
    pause.extend(15.1)
    assert oldest() == usual
    pause.extend(16.0)
    assert oldest() == usual
    gc.collect()
    pause.extend(17.0)
    assert oldest() == NEVER
    pause.end()
    assert oldest() == usual


def test_a_threshold_that_other_code_sets_during_a_pause_stays(usual: int) -> None:
    pause = CollectorPause()
    pause.extend(0.0)
    gc.set_threshold(123, 45, 67)
    pause.end()
    assert gc.get_threshold() == (123, 45, 67)
    pause.extend(1.0)
    gc.set_threshold(124, *gc.get_threshold()[1:])
    pause.end()
    assert gc.get_threshold() == (124, 45, 67)


def test_the_pauses_of_two_servers_in_one_process_end(usual: int) -> None:
    first, second = CollectorPause(), CollectorPause()
    first.extend(0.0)
    second.extend(0.0)
    first.end()
    second.end()
    assert gc.get_threshold()[2] == usual


def test_work_for_which_no_thread_can_start_fails_and_ends_its_pause_later(
    usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        large, exchange, results = LargeBodies(asyncio.get_running_loop()), FakeExchange(), list[int | None]()
        with monkeypatch.context() as without_threads:
            refuse_threads(without_threads)
            large.decode(exchange, lambda: (1, 0), lambda _parts, _exchange: None, encode_json_error)
            large.print(exchange, lambda: HttpAnswer(200, (), []))
            large.run(lambda: 1, results.append)
            await eventually_in_loop(lambda: len(exchange.answers) == 2 and results)
        assert [answer.status for answer in exchange.answers] == [503, 503]
        assert results == [None]
        large.run(lambda: 2, results.append)
        await eventually_in_loop(lambda: results == [None, 2] and gc.get_threshold()[2] == usual)
        assert [answer.status for answer in exchange.answers] == [503, 503]

    asyncio.run(main())
