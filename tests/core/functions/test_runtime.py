"""Decorated functions served by an engine: batching, coroutines, streams and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import remora
from remora import BadRequestError, Engine, RemoraError
from remora.functions.runtime import live


def _engine(*models: Callable[..., Any]) -> Engine:
    return Engine(models=models)


def test_a_function_answers_with_its_result() -> None:
    def add(a: int, b: int = 10) -> int:
        return a + b

    with _engine(add) as engine:
        assert engine.infer("add", {"a": [1], "b": [2]})["output"].tolist() == [3]
        assert engine.infer("add", {"a": [1]})["output"].tolist() == [11]


def test_requests_share_a_batch() -> None:
    sizes: list[int] = []

    @remora.model(batch=4, max_delay=60.0)
    def double(x: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1, 2]:
        sizes.append(len(x))
        return x * 2

    with _engine(double) as engine:
        sizes.clear()
        futures = [engine.infer_async("double", {"x": np.full((1, 2), n, np.float32)}) for n in range(4)]
        assert [future.result(60)["output"].tolist() for future in futures] == [[[2.0 * n] * 2] for n in range(4)]
    assert sizes == [4]


def test_an_invalid_request_does_not_fail_the_others_of_its_batch() -> None:
    @remora.model(batch=3, max_delay=60.0)
    def check(text: list[str]) -> list[str]:
        if "bad" in text:
            raise BadRequestError("the text is bad")
        return text

    with _engine(check) as engine:
        futures = [engine.infer_async("check", {"text": [[word]]}) for word in ("a", "bad", "c")]
        assert futures[0].result(60)["output"].tolist() == [[b"a"]]
        assert futures[2].result(60)["output"].tolist() == [[b"c"]]
        with pytest.raises(RemoraError, match="the text is bad") as error:
            futures[1].result(60)
    assert error.value.code == "INVALID_ARG"


def test_requests_with_and_without_an_optional_input_run_apart() -> None:
    seen: list[tuple[int, bool]] = []

    @remora.model(batch=4, max_delay=1.0)
    def add(x: list[int], y: list[int] | None = None) -> list[int]:
        seen.append((len(x), y is None))
        return [a + b for a, b in zip(x, y or [0] * len(x), strict=True)]

    with _engine(add) as engine:
        seen.clear()
        futures = [engine.infer_async("add", {"x": [[n]], **({"y": [[10]]} if n % 2 else {})}) for n in range(4)]
        assert [future.result(60)["output"].item() for future in futures] == [0, 11, 2, 13]
    assert sum(size for size, _ in seen) == 4


@pytest.mark.parametrize(
    ("result", "text"),
    [([1.0], "returned 1 rows of 'output' for a batch of 2"), (["a", "b"], "returned a wrong 'output'")],
)
def test_a_wrong_result_fails_the_request_and_names_the_function(result: list[Any], text: str) -> None:
    @remora.model(batch=4)
    def wrong(x: list[float]) -> list[float]:
        return result

    with _engine(wrong) as engine, pytest.raises(RemoraError, match=text):
        engine.infer("wrong", {"x": [[1.0], [2.0]]})


def test_an_exception_fails_the_request_with_its_type_and_text() -> None:
    def divide(x: float) -> float:
        return 1 / x

    with _engine(divide) as engine:
        with pytest.raises(RemoraError, match="ZeroDivisionError: float division by zero"):
            engine.infer("divide", {"x": [0.0]})
        assert engine.infer("divide", {"x": [2.0]})["output"].tolist() == [0.5]


def test_coroutines_of_several_requests_run_at_once() -> None:
    arrived: list[int] = []
    together = asyncio.Event()

    async def meet(n: int) -> int:
        arrived.append(n)
        if len(arrived) == 3:
            together.set()
        await asyncio.wait_for(together.wait(), 60)
        return n

    with _engine(meet) as engine:
        futures: list[Future[Any]] = [engine.infer_async("meet", {"n": [n]}) for n in range(3)]
        assert [future.result(60)["output"].item() for future in futures] == [0, 1, 2]


def test_no_more_coroutines_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    @remora.model(concurrency=2)
    async def work(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    with _engine(work) as engine:
        for future in [engine.infer_async("work", {"n": [n]}) for n in range(20)]:
            future.result(60)
    assert 1 <= most <= 2


def test_a_failing_coroutine_fails_only_its_request() -> None:
    async def check(n: int) -> int:
        if n == 1:
            raise BadRequestError("one is too many")
        if n == 2:
            raise KeyError("two")
        return n

    with _engine(check) as engine:
        with pytest.raises(RemoraError, match="one is too many"):
            engine.infer("check", {"n": [1]})
        with pytest.raises(RemoraError, match="KeyError: 'two'"):
            engine.infer("check", {"n": [2]})
        assert engine.infer("check", {"n": [3]})["output"].item() == 3


def test_a_generator_streams_its_items() -> None:
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    with _engine(count) as engine:
        assert [part["output"].item() for part in engine.infer_stream("count", {"n": [3]})] == [0, 1, 2]
        assert list(engine.infer_stream("count", {"n": [0]})) == []


def test_an_asynchronous_generator_streams_its_items() -> None:
    async def count(n: int) -> AsyncIterator[dict[str, int]]:
        for index in range(n):
            await asyncio.sleep(0)
            yield {"index": index}

    with _engine(count) as engine:
        parts = [part["output"].item() for part in engine.infer_stream("count", {"n": [2]})]
    assert parts == [b'{"index": 0}', b'{"index": 1}']


def test_the_error_of_a_generator_ends_the_stream_after_its_items() -> None:
    def count(n: int) -> Iterator[int]:
        yield 0
        raise BadRequestError("enough")

    with _engine(count) as engine:
        stream = engine.infer_stream("count", {"n": [1]})
        assert next(stream)["output"].item() == 0
        with pytest.raises(RemoraError, match="enough"):
            next(stream)


def test_a_generator_is_closed_when_its_client_leaves() -> None:
    closed = threading.Event()

    def endless(n: int) -> Iterator[int]:
        try:
            while True:
                yield n
        finally:
            closed.set()

    with _engine(endless) as engine:
        stream = engine.infer_stream("endless", {"n": [1]})
        next(stream)
        stream.close()
        assert closed.wait(60)


def test_a_pipeline_runs_as_an_ensemble() -> None:
    @remora.model(batch=4)
    def lower(text: list[str]) -> list[str]:
        return [each.lower() for each in text]

    @remora.model(batch=8)
    def length(text: list[str]) -> list[int]:
        return [len(each) for each in text]

    flow = remora.Pipeline(lower, name="empty") >> length
    flow.name = "flow"
    with _engine(flow) as engine:
        assert engine.infer("flow", {"text": [["AB"], ["C"]]})["output"].tolist() == [[2], [1]]


def test_objects_are_forgotten_with_their_engine() -> None:
    def same(x: float) -> float:
        return x

    model = remora.model(same)
    with _engine(model):
        assert live(str(id(model))) is model
    with pytest.raises(LookupError):
        live(str(id(model)))
