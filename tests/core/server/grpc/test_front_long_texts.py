"""Long texts and compressed answers over gRPC, which threads split, join and compress while the loop goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")

from remora.engine import Engine
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.framing import framed
from remora.protocols.restriction import Restrictions
from remora.server.access_log import AccessLog
from remora.server.grpc.front import GrpcFront, InferenceCall
from remora.server.grpc.rpcs import INFER, Rpcs
from remora.server.loop import LoopMailbox
from support.engine.engine_by_hand import TextsByHand, response
from support.engine.fakes import FakeAccessWriter
from support.models.python_models import write_echo
from support.wire.grpc_calls import FakeLink

PATIENCE_S = 60.0
FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"x"),
    (b":path", INFER.encode()),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"grpc-accept-encoding", b"gzip"),
)


def texts(count: int, model: str = "echo", id: str = "") -> bytes:
    """A request with so many texts as raw data."""
    message: Any = pb.ModelInferRequest(model_name=model, id=id, raw_input_contents=[b"\3\0\0\0abc" * count])
    message.inputs.add(name="IN", datatype="BYTES", shape=[count])
    return bytes(message.SerializeToString())


LONG = 50_000
"""Texts that a thread splits."""


async def until(holds: Callable[[], bool]) -> None:
    """Run the loop until something holds."""

    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), PATIENCE_S)


@pytest.mark.parametrize(("count", "compression"), [(LONG, "none"), (LONG, "low"), (1, "low"), (1, "none")])
def test_an_answer_from_a_thread_is_logged_with_its_model_and_leaves_no_garbage(
    tmp_path: Path, count: int, compression: str
) -> None:
    write_echo(tmp_path, "STRING")

    async def play(engine: Engine) -> None:
        mailbox = LoopMailbox(asyncio.get_running_loop())
        calls = Rpcs(engine, Restrictions(), 16)
        front = GrpcFront(engine, calls, mailbox, 1 << 20, compression=compression)
        writer = FakeAccessWriter()
        link: Any = FakeLink()
        call: Any = AccessLog(writer, 1.0).over_calls(front.open)(FIELDS)(link)
        call.received(framed(texts(count)), True)
        await until(lambda: bool(writer.entries))
        ((_, status, _, _, size, _, _, run),) = writer.entries
        ((_, body, _),) = link.sent
        assert (status, size) == (0, len(body))
        assert run is not None
        assert run[:2] == ("echo", "1")
        await until(lambda: not any(type(each) is InferenceCall for each in gc.get_objects()))
        front.close()

    gc.collect()
    gc.disable()
    try:
        with Engine(model_repository=(tmp_path,), backend_config=("python,isolation=thread",)) as engine:
            asyncio.run(play(engine))
    finally:
        gc.enable()


@pytest.mark.parametrize("loads", [False, True], ids=["", "loading"])
@pytest.mark.parametrize("replaced", [False, True], ids=["", "replaced"])
def test_split_texts_go_to_the_model_that_was_found_or_its_successor(replaced: bool, loads: bool) -> None:
    engine: Any = TextsByHand(swaps=int(replaced))

    def meanwhile() -> None:
        engine.loading = loads

    engine.meanwhile = meanwhile

    async def play() -> None:
        front = GrpcFront(engine, Rpcs(engine, Restrictions(), 16), LoopMailbox(asyncio.get_running_loop()), 1 << 20)
        link: Any = FakeLink()
        call: Any = front.open(FIELDS)(link)
        call.received(framed(texts(LONG, "plain")), True)
        await until(lambda: bool(link.sent) or not engine.asked.empty())
        assert not link.sent
        engine.next().answer(response())
        await until(lambda: bool(link.sent))
        ((_, body, _),) = link.sent
        assert b"plain" in body
        assert engine.looked_up == 1 + replaced
        front.close()

    asyncio.run(play())
