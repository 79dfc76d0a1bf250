"""How a platform plugs in: who is found by which name, and a server with a platform's ports."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path

import pytest

from conftest import needs
from remora import plugins
from remora.cli import main
from remora.engine import Engine
from remora.messages import Buffer, Ticket
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.host import ExtraPort, ServerContext, find_adapter, models_of, port_of
from remora.server.http.exchange import Exchange, Service
from remora.server.main import Server, StartError, ready_table
from support.engine.fakes import write_model

QUIET = ServerOptions(http_port=0, metrics_port=0, allow_grpc=False)


class Greeter:
    """Answers one path and hands the rest to V2."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
        if head.path == "/hello":
            exchange.respond(HttpAnswer(200, (), [b"hello"]))
            return None
        return self.context.rest.handle(head, body, exchange)


def greeter(context: ServerContext) -> Service:
    return Greeter(context)


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_an_unknown_platform_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"no host platform 'mainframe': give one of .*container"):
        find_adapter("mainframe")


def test_a_platforms_name_is_not_a_module_path() -> None:
    with pytest.raises(ValueError, match="no host platform"):
        find_adapter("container.os")


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "8 080", "\u0668\u0660", "080800", "http"])
def test_what_is_no_port_is_refused_by_the_variables_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^PORT=.*: expected a port$"):
        port_of({"PORT": text}, "PORT", 8080)


def test_a_port_is_the_variables_or_the_usual_one() -> None:
    assert port_of({"PORT": "65535"}, "PORT", 8080) == 65535
    assert port_of({}, "PORT", 8080) == 8080


def test_models_are_where_the_variable_says_or_in_the_first_directory_there_is(tmp_path: Path) -> None:
    directories = (str(tmp_path / "none"), str(tmp_path), str(tmp_path.parent))
    assert models_of({"REMORA_MODEL_REPOSITORY": "s3://bucket/repo"}, directories) == ("s3://bucket/repo",)
    assert models_of({"REMORA_MODEL_REPOSITORY": ""}, directories) == (str(tmp_path),)
    assert models_of({}, directories[:1]) == ()


def test_the_command_line_refuses_an_unknown_platform_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host-platform", "mainframe"]) == 2
    assert capsys.readouterr().err.startswith("remora serve: there is no host platform 'mainframe'")


def test_a_front_answers_its_own_paths_and_v2_the_others(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config=None)

    async def run() -> None:
        door = ExtraPort("second", "127.0.0.1", 0, greeter)
        server = Server(Engine(model_control_mode="explicit", model_repository=(tmp_path,)), QUIET, greeter, (door,))
        loop = asyncio.get_running_loop()
        await server.start()
        try:
            assert await loop.run_in_executor(None, get, server.ports.http, "/hello") == (200, b"hello")
            status, _ = await loop.run_in_executor(None, get, server.ports.http, "/v2/health/live")
            assert status == 200
            assert await loop.run_in_executor(None, get, server.ports.extra[0], "/hello") == (200, b"hello")
            assert f"second 127.0.0.1:{server.ports.extra[0]}" in ready_table(server, 1.0)
        finally:
            await server.stop()

    asyncio.run(run())


def test_two_listeners_may_not_share_a_port(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config=None)

    async def run() -> None:
        options = ServerOptions(http_port=4711, metrics_port=0, allow_grpc=False)
        extra_ports = (ExtraPort("SageMaker", "127.0.0.1", 4711, greeter),)
        server = Server(Engine(model_repository=(tmp_path,)), options, extra_ports=extra_ports)
        with pytest.raises(StartError, match="HTTP requests and SageMaker requests at the same address and port"):
            await server.start()

    asyncio.run(run())


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("platform", "variables"),
    [
        ("sagemaker", {"SAGEMAKER_BASE_DIR": "/nowhere", "SAGEMAKER_PROGRAM": LONG}),
        ("sagemaker", {"SAGEMAKER_BASE_DIR": f"/{LONG}"}),
        ("azureml", {"AZUREML_MODEL_DIR": f"/{LONG}"}),
        ("azureml", {"AML_APP_ROOT": f"/{LONG}"}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else value,
)
@needs("remora_adapters")
def test_a_path_that_the_system_does_not_take_ends_the_start_with_a_reason(
    platform: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--host-platform", platform]) == 2
    assert "remora serve: " in capsys.readouterr().err


def test_a_platform_whose_package_is_not_installed_is_named_with_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plugins, "is_present", lambda target: not target.startswith("remora_adapters"))
    for flag in ("--host-platform=sagemaker", "--allow-sagemaker=true"):
        assert main(["serve", str(tmp_path), flag]) == 2
        option = flag.removesuffix("=true")
        assert f"{option} needs the package remora_adapters, which is not installed" in capsys.readouterr().err
