"""The permission that the check of keys finds by a head is the one that the platform's service asks for."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.models import loader as loading
from remora.options import ServerOptions
from remora.plugins import HOSTS
from remora.protocols.api_keys import OPEN, permission_of_action
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.rest.infer import InferCodec
from remora.server.host import ServerContext, find_adapter
from remora.server.host_routes import RouteTable, routes_of
from remora.server.http.asgi import answer_in_thread
from remora.server.http.exchange import Service
from remora.server.http.rest import RestService
from remora.server.key_check import permission_of_head
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeBackend, FakeExchange, write_model

ADAPTERS = Path(__file__).parents[2] / "adapters" / "remora_adapters"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
OF_V2 = [
    *("/v2", "/v2/health/live", "/v2/logging", "/v2/trace/setting", "/v2/trace/recent", "/v2/startup", "/v2/metrics"),
    *("/v2/repository/index", "/v2/repository/models/m/load", "/v2/repository/models/m/unload", "/v2/nowhere"),
    *("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/r/register", "/v2/cudasharedmemory/unregister"),
    *(f"/v2/models/m{more}" for more in ("", "/infer", "/versions/1/infer", "/generate", "/config", "/stats")),
    *(f"/v2/models/m/{more}" for more in ("ready", "explain", "release", "sequences", "trace/setting")),
    *("/v2/models/m/versions/99999999999999999999/infer", "/v2/docs", "/v2/status"),
]
OTHERS = [
    *("/", "/metrics", "/readyz", "/nowhere", "/models/m", "/models/m/versions/1", "/rerank", "/tokenize"),
    *("/health", "/health/ready", "/livez", "/v1/models/m/load", "/v1/models/m/unload", "/openai/v1/models/m/load"),
    *("/v1/models", "/v1/models/m:predict", "/v1/chat/completions", "/openai/v1/embeddings"),
    *("/pubsub/v2/models/m/infer", "/pubsub/v2/models/m/versions/1/infer"),
]
VARIANTS = [
    *((name, {}) for name in HOSTS),
    ("cloud_run", {"REMORA_PUBSUB_TOPIC": "projects/project-1/topics/topic"}),
]
REDIRECT = b"X-Vertex-Ai-Triton-Redirect"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path / "model", "m")
    with Engine(tmp_path / "model") as running:
        yield running


def paths_in(platform: str) -> set[str]:
    """Paths among the texts of an adapter's modules, so that those of new routes are among them."""
    folder = ADAPTERS / platform
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [ADAPTERS / f"{platform}.py"]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text.replace("*", "m") for text in texts if text.startswith("/") and text.isprintable() and " " not in text}


class Asked:
    """Refuses each action that a service asks for, and notes the permission of a request's first one."""

    def __init__(self, engine: Engine, platform: str, variables: dict[str, str], folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self._first: str | None = None
        options = ServerOptions(openai=True)
        mailbox, later = LoopMailbox(loop), answer_in_thread(loop)
        rest = RestService(engine, InferCodec(), mailbox, later, options, deny=self._refuse)
        places = {
            "REMORA_MODEL_REPOSITORY": str(folder / "model"),
            "AZUREML_MODEL_DIR": str(folder / "model"),
            "SAGEMAKER_BASE_DIR": str(folder),
            **variables,
        }
        host = find_adapter(platform).host(places)
        self.service: Service = host.front(ServerContext(engine, rest, mailbox, later, options))

    def _refuse(self, head: Head, action: str) -> HttpAnswer:
        if self._first is None:
            self._first = permission_of_action(action, head.method)
        return failure(403, "no", plain=False)

    def permission(self, head: Head) -> str | None:
        """Return the permission for which the service asks first; None if it asks for none."""
        self._first = None
        self.service.handle(head, b"{}", FakeExchange())
        return self._first


def differences(engine: Engine, platform: str, variables: dict[str, str], folder: Path, heads: list[Head]) -> list[Any]:
    """Return the requests whose permission by the head is another one, with both permissions."""

    async def main() -> list[Any]:
        asked, found = Asked(engine, platform, variables, folder), []
        table = RouteTable(routes_of(asked.service))
        for head in heads:
            seen = permission_of_head(head, table.find(head.method, head.path))
            needed = asked.permission(Head(head.method, head.path, head.headers))
            if needed is not None and seen != needed and (head.method == "POST" or seen != OPEN):
                found.append((head.method, head.path, head.headers, seen, needed))
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(("platform", "variables"), VARIANTS)
def test_the_permission_by_the_head_is_that_of_the_service(
    engine: Engine, platform: str, variables: dict[str, str], tmp_path: Path
) -> None:
    paths = [*OF_V2, *OTHERS, *sorted(paths_in(platform))]
    heads = [Head(method, path, ()) for path in paths for method in METHODS]
    assert differences(engine, platform, variables, tmp_path, heads) == []


def test_the_permission_of_a_redirect_is_that_of_the_service(engine: Engine, tmp_path: Path) -> None:
    targets = [path.encode() for path in (*OF_V2, *OTHERS, "metrics", "v2/models/m/infer?x=y")]
    heads = [Head("POST", "/predict", ((REDIRECT, target),)) for target in targets]
    assert differences(engine, "vertex", {}, tmp_path, heads) == []


def test_a_path_of_an_adapter_is_among_those_compared() -> None:
    assert {"/invocations", "/models/m/invoke"} <= paths_in("sagemaker")
    assert {"/score", "/swagger.json"} <= paths_in("azureml")
