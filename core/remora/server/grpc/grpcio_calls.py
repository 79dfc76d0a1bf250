"""The calls of a gRPC server: their threads, their errors as statuses, their end; the law: each is under way until its
client has its last word, or is gone.

At its end grpcio waits for connections, and that of a client that is gone without a word may last. What is to be waited
for are calls: they are counted here from the moment that they are given to a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from remora.server.grpc.rpcs import Behaviour, Context, status_of_error

_CODES: Mapping[int, Any] = {code.value[0]: code for code in grpc.StatusCode}


class Calls:
    """Those of one server. Thread-safe."""

    def __init__(self) -> None:
        self._pools: list[ThreadPoolExecutor] = []
        self._changed = threading.Condition()
        self._under_way = 0

    def pool(self, threads: int, name: str) -> ThreadPoolExecutor:
        """Threads for calls, which `close` ends."""
        pool = _Pool(self, threads, name)
        self._pools.append(pool)
        return pool

    def unary(self, behaviour: Behaviour, pool: ThreadPoolExecutor | None = None) -> Any:
        """A handler on bytes, errors turned into statuses; ``pool`` for other threads than the server's."""

        def serve(message: bytes, context: Context) -> bytes:
            self._follow(context)
            try:
                return behaviour(message, context)
            except Exception as error:
                _abort(context, error)

        if pool is not None:
            # grpcio's own health service chooses its threads by this attribute, too.
            serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.unary_unary_rpc_method_handler(serve)

    def streaming(
        self, behaviour: Callable[[Iterator[bytes], Context], Iterator[bytes]], pool: ThreadPoolExecutor
    ) -> Any:
        """A handler on streams of bytes, errors turned into statuses, its answers written by threads of ``pool``."""

        def serve(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            self._follow(context)
            try:
                yield from behaviour(messages, context)
            except Exception as error:
                _abort(context, error)

        serve.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(serve)

    def begin(self) -> None:
        """One more thing is under way."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """One of them has ended."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _follow(self, context: Context) -> None:
        """Count a call until it is over, its answer sent."""
        self.begin()
        if not context.add_callback(self.end):
            self.end()

    def wait(self, timeout_s: float) -> bool:
        """Until none is under way; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def close(self) -> None:
        """End the threads, each after what it does."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


class _Pool(ThreadPoolExecutor):
    """Counts what waits for a thread, too."""

    def __init__(self, calls: Calls, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._calls = calls

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls.begin()
        try:
            future = super().submit(work, *args, **kwargs)
        except BaseException:
            self._calls.end()
            raise
        future.add_done_callback(lambda _: self._calls.end())
        return future


def _abort(context: Any, error: Exception) -> NoReturn:
    number, text = status_of_error(error)
    context.abort(_CODES[number], text)
    raise error  # abort has raised already; this is for those who do not know.
