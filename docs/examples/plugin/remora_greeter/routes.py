"""Group of the paths ``/greetings/NAME``, and a metric of their requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial

from remora.custom_metrics import Family, MetricKind, MetricSample
from remora.messages import Buffer
from remora.models.served_model import ServedModel
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer
from remora.server.http.access_rules import Denied
from remora.server.http.exchange import Answerer, Exchange
from remora.server.http.route_groups import RouteParts

_ANSWERED: Counter[str] = Counter()
"""Answers by model."""


class Greetings:
    """All that is known of the paths."""

    prefixes = ("/greetings/",)

    def action_of(self, method: str, path: str) -> str | None:
        """Return "infer", whose permission a key needs: the paths run a model."""
        return "infer" if path.removeprefix("/greetings/") else None

    def refuse(self, denied: Denied, path: str) -> HttpAnswer:
        """Return a refusal as V2 has it."""
        return denied.answer

    def task_of(self, model: ServedModel) -> str:
        """Show nothing on the page."""
        return ""

    def serve(self, parts: RouteParts) -> GreetingService:
        """Return the service in one server."""
        return GreetingService(parts)


class GreetingService:
    """Paths in one server."""

    def __init__(self, parts: RouteParts) -> None:
        self._parts = parts

    def bind(self, head: Head) -> Answerer:
        """Return what answers requests with this head."""
        return partial(self._answer, head.path.removeprefix("/greetings/"))

    def unknown(self, head: Head) -> None:
        """Leave the answer to V2."""

    def _answer(self, name: str, _body: Buffer, exchange: Exchange) -> None:
        served = [model.name for model in self._parts.engine.models() if model.config.backend == "greeter"]
        _ANSWERED.update(served)
        answer = {"greeters": served, "name": name}
        exchange.respond(HttpAnswer(200, (JSON,), [json.dumps(answer).encode()]))


def families(models: Sequence[ServedModel]) -> list[Family]:
    """Return the number of answers of each model."""
    samples = tuple(MetricSample("", {"model": name}, count) for name, count in sorted(_ANSWERED.items()))
    return [Family("greeter_answers_total", "Answers of /greetings", MetricKind.COUNTER, samples)]


GREETINGS = Greetings()
