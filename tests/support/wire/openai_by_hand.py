"""OpenAI's routes over a language model whose steps the test runs, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from remora.errors import NotFoundError
from remora.messages import Buffer
from remora.models.readiness import Readiness
from remora.models.served_model import LoadRecord
from remora.models.table import LoadingError
from remora.options import EngineOptions, ServerOptions
from remora.proto.model_config_pb2 import ModelConfig
from remora.protocols.http1 import Head
from remora.protocols.restriction import Restrictions
from remora.server.http.access_rules import AccessRules
from remora.server.http.exchange import Answerer, Cancellable, Exchange
from remora.server.http.route_groups import RouteParts
from remora.tracing.settings import TraceSettings
from remora.tracing.tracer import Traces
from remora_llm.generation import Extension, Generation
from remora_llm.generation.step_loop import LoopSettings, StepLoop
from remora_llm.generation.templates import JinjaTemplate
from remora_llm.generation.tokenizing import TokenizerFile
from remora_llm.openai.routes import find_route
from remora_llm.routes.openai import OpenAiRoutes
from remora_llm.testing import ByteTokens, ScriptedStepper
from support.engine.fakes import FakeClock, FakeExchange

TEXT = "Hello, world"


class FakeModel:
    """A served language model whose steps the test runs."""

    name, version_text = "m", "1"
    load_record = LoadRecord(ended_ms=7000)
    is_routed = False
    config = ModelConfig()

    def __init__(self, script: str | None = TEXT, adapters: tuple[str, ...] = (), **settings: Any) -> None:
        self.clock_ns = 0
        self.step_ns = 0
        self.broken = False
        tokens = ByteTokens()
        stepper = ScriptedStepper(length=2000, script=script, before_step=self._before_step)
        stepper.facts = replace(stepper.facts, adapters=adapters)
        self.loop = StepLoop(stepper, tokens, LoopSettings("m", **settings), lambda: self.clock_ns, threaded=False)
        self.generation: Generation | None = Generation(self.loop, tokens, served_names=("alias",))
        self.users = 0

    def _before_step(self, _extensions: Sequence[Extension]) -> None:
        self.clock_ns += self.step_ns
        if self.broken:
            raise RuntimeError("the device is gone")

    def acquire(self) -> bool:
        self.users += 1
        return True

    def release(self) -> None:
        self.users -= 1


class FakeRouted(FakeModel):
    """A model with a release, which chooses another version for the request."""

    is_routed = is_divided = True

    def __init__(self, canary: FakeModel) -> None:
        super().__init__("from the stable version")
        self._canary = canary
        self.counted: list[object] = []
        self.counter = lambda: self.counted.append

    def bind_to(self, _carrier: object) -> FakeModel:
        return self._canary


class FakeEngine:
    """An engine with one model."""

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.options = EngineOptions()
        self.loading: Future[None] | None = None
        self.started = True
        self.traces = Traces(TraceSettings(), FakeClock(), {})

    def models(self) -> list[FakeModel]:
        return [self.model]

    def resolve(self, name: str, version: int = -1) -> FakeModel:
        if self.loading is not None:
            raise LoadingError("the model is being loaded", self.loading)
        if name != "m":
            raise NotFoundError(f"no model {name}")
        return self.model

    def readiness(self) -> Readiness:
        return Readiness(self.started, self.started, False, ())


OPEN = AccessRules(Restrictions(), (), None)


def bind_nothing(_head: Head) -> Answerer:
    raise AssertionError("no request here is for V2")


class Server:
    """The routes over one model, without sockets."""

    def __init__(
        self, model: FakeModel | None = None, *, chat: bool = False, access: AccessRules = OPEN, **options: Any
    ) -> None:
        self.model = model or FakeModel()
        if chat and self.model.generation is not None:
            content = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
            source = "{% for m in messages %}{{ m.content }}{% endfor %}"
            template = JinjaTemplate(source, TokenizerFile(content, "m"), {}, "m", lambda: 0, str)
            self.model.generation = replace(self.model.generation, chat=template)
        self.engine = FakeEngine(self.model)
        self.waited: list[Callable[[], Cancellable | None]] = []
        settings = ServerOptions(http_max_input_size=1 << 20, **options)
        self.routes = OpenAiRoutes(RouteParts(self.engine, None, settings, None, access, self._wait, bind_nothing))

    def _wait(self, work: Any, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        try:
            return work(head, body, exchange)
        except LoadingError:
            self.waited.append(lambda: work(head, body, exchange))
            return None

    def ask(
        self, path: str = "/v1/completions", method: str = "POST", headers: Any = (), body: Any = None, **fields: Any
    ):
        exchange = FakeExchange()
        head = Head(method, path, ((b"content-type", b"application/json"), *headers))
        where = find_route(path)
        assert where is not None
        raw = body if body is not None else json.dumps({"model": "m", "prompt": "Hi", **fields}).encode()
        return self.routes.handle_hosted(where, head, raw, exchange, ""), exchange

    async def turn(self, count: int = 1, runs: FakeModel | None = None) -> None:
        """Run steps, and let the event loop deliver what they made."""
        for _ in range(count):
            (runs or self.model).loop.turn()
            await asyncio.sleep(0)

    async def answer(self, exchange: FakeExchange, runs: FakeModel | None = None) -> tuple[int, Any]:
        for _ in range(100):
            if exchange.answers:
                break
            await self.turn(runs=runs)
        (answer,) = exchange.answers
        return answer.status, json.loads(b"".join(answer.body))

    def refusal(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        _, exchange = self.ask(**fields)
        (answer,) = exchange.answers
        return answer.status, json.loads(b"".join(answer.body))["error"]


def running(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run
