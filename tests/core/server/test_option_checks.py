"""Options that contradict each other are refused before a port opens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.options import ServerOptions
from remora.server.host import ExtraPort, v2_alone
from remora.server.main import Server
from remora.server.option_checks import (
    StartError,
    check_ports,
    compile_pattern,
    export_log,
    exposure,
    grpc_restrictions,
    open_key_check,
)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"grpc_use_ssl": True}, "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"),
        ({"grpc_use_ssl": True, "grpc_server_cert": "c"}, "--grpc-use-ssl needs --grpc-server-key"),
        (
            {"grpc_use_ssl_mutual": True, "grpc_server_cert": "c", "grpc_server_key": "k"},
            "--grpc-use-ssl-mutual needs --grpc-root-cert",
        ),
        (
            {"grpc_on_http_port": True, "allow_http": False},
            "--grpc-on-http-port: with --allow-http=false there is no such port; leave one out",
        ),
        (
            {"grpc_on_http_port": True, "grpc_transport": "grpcio", "allow_grpc": False},
            "--grpc-transport=grpcio serves gRPC's separate port alone, and --allow-grpc=false closes it",
        ),
        (
            {"grpc_on_http_port": True, "grpc_use_ssl": True, "allow_grpc": False},
            "--grpc-on-http-port: --http-server-cert is the TLS of that port; leave --grpc-use-ssl out",
        ),
        ({"http_server_cert": "a.pem"}, "--http-server-cert and --http-server-key are needed together"),
        ({"http_root_cert": "a.pem"}, "--http-root-cert needs --http-server-cert and --http-server-key"),
        (
            {"http_port": 4711, "metrics_port": 4711},
            "The server cannot listen to HTTP requests and metrics requests at the same address and port "
            "127.0.0.1:4711",
        ),
        (
            {"http_port": 4711},
            "The server cannot listen to HTTP requests and second requests at the same address and port 127.0.0.1:4711",
        ),
    ],
)
def test_a_contradiction_names_the_flags(flags: dict[str, Any], text: str) -> None:
    doors = (ExtraPort("second", "127.0.0.1", 4711, v2_alone),)
    with pytest.raises(StartError) as refused:
        check_ports(ServerOptions(**flags), doors)
    assert str(refused.value) == text


def test_an_origin_that_is_none_is_refused_before_a_port_opens() -> None:
    with pytest.raises(ValueError, match=r"--cors-origin=app\.example: expected an origin"):
        check_ports(ServerOptions(cors_origin=("app.example",)), ())


def test_a_server_checks_its_options_before_it_opens_a_port(tmp_path: Path) -> None:
    options = ServerOptions(http_port=0, grpc_port=0, allow_metrics=False, grpc_use_ssl=True)
    server = Server(Engine(model_control_mode="explicit", model_repository=(tmp_path,)), options)
    with pytest.raises(StartError, match="--grpc-use-ssl needs"):
        asyncio.run(server.start())
    assert server.ports.http == 0


def test_ports_that_are_off_or_chosen_by_the_system_do_not_collide() -> None:
    check_ports(ServerOptions(http_port=0, grpc_port=0, metrics_port=0), ())
    check_ports(ServerOptions(http_port=4711, metrics_port=4711, allow_metrics=False), ())


def test_grpc_on_the_http_port_is_restricted_like_http() -> None:
    rule = ("metadata:key=value",)
    other = ("health:key=value",)
    assert grpc_restrictions(ServerOptions(http_restricted_api=rule)) == ()
    assert grpc_restrictions(ServerOptions(http_restricted_api=rule, grpc_on_http_port=True)) == rule
    both = ServerOptions(http_restricted_api=rule, grpc_restricted_protocol=other, grpc_on_http_port=True)
    assert grpc_restrictions(both) == other


def test_a_pattern_ignores_case_and_an_invalid_one_names_its_flag() -> None:
    assert compile_pattern("", "--flag") is None
    pattern = compile_pattern("x-.*", "--flag")
    assert pattern is not None
    assert pattern.match("X-Trace")
    with pytest.raises(StartError, match=r"^--flag=\(: not a regular expression: "):
        compile_pattern("(", "--flag")


def test_a_url_in_the_place_of_a_destination_is_refused_without_its_user() -> None:
    with pytest.raises(ValueError, match=r"^--log-export=http://\*\*\*@h: expected off, otlp or otlp=URL$"):
        export_log("http://user:s3cret@h")


ANYWHERE = {"http_address": "0.0.0.0"}
SHARED = {**ANYWHERE, "grpc_on_http_port": True}


@pytest.mark.parametrize(
    ("flags", "open_to"),
    [
        ({}, ""),
        ({"http_address": "localhost"}, ""),
        (ANYWHERE, "0.0.0.0"),
        ({"http_address": "::"}, "::"),
        ({"grpc_address": "192.0.2.1"}, "192.0.2.1"),
        ({**ANYWHERE, "grpc_address": "127.0.0.1", "http_root_cert": "ca.pem"}, ""),
        ({**ANYWHERE, "http_root_cert": "ca.pem"}, "0.0.0.0"),
        ({**ANYWHERE, "allow_grpc": False, "http_restricted_api": ("health,inference:key=x",)}, ""),
        ({**ANYWHERE, "allow_grpc": False, "http_restricted_api": ("model-repository:key=x",)}, "0.0.0.0"),
        ({**SHARED, "http_restricted_api": ("inference:key=x",)}, ""),
        (
            {
                **SHARED,
                "allow_grpc": False,
                "http_restricted_api": ("inference:k=x",),
                "grpc_restricted_protocol": ("health:k=x",),
            },
            "0.0.0.0",
        ),
        ({**SHARED, "http_restricted_api": ("inference:k=x",), "grpc_restricted_protocol": ("inference:k=x",)}, ""),
        ({**SHARED, "allow_grpc": False, "http_root_cert": "ca.pem"}, ""),
        ({**ANYWHERE, "http_restricted_api": ("inference:key=x",)}, "0.0.0.0"),
        ({**ANYWHERE, "api_keys_file": "keys.json"}, ""),
        ({**ANYWHERE, "api_key": ("ci:infer=sha256:0",)}, ""),
    ],
)
def test_a_port_that_every_client_may_use_is_named_with_the_flag_that_closes_it(
    flags: dict[str, Any], open_to: str
) -> None:
    warning = exposure(ServerOptions(**{"allow_metrics": False, **flags}))
    assert bool(warning) == bool(open_to)
    assert (f"every client that reaches {open_to} may use" in warning and "--api-keys-file" in warning) == bool(open_to)


METRICS = {"metrics_address": "0.0.0.0"}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (METRICS, ["every client that reaches 0.0.0.0 may read the metrics of this server"]),
        ({**METRICS, "allow_metrics": False}, []),
        ({**METRICS, "http_restricted_api": ("statistics:key=x",)}, []),
        ({**METRICS, "api_keys_file": "keys.json"}, []),
        (ANYWHERE, ["every client that reaches 0.0.0.0 may use this server"]),
        (
            {**METRICS, "http_address": "::"},
            ["every client that reaches :: may use this server", "every client that reaches 0.0.0.0 may read the"],
        ),
        (
            {**ANYWHERE, "grpc_address": "127.0.0.1", "http_root_cert": "ca.pem"},
            ["every client that reaches 0.0.0.0 may read the metrics of this server"],
        ),
    ],
)
def test_a_metrics_port_that_every_client_may_read_is_named(flags: dict[str, Any], parts: list[str]) -> None:
    warning = exposure(ServerOptions(**flags))
    assert bool(warning) == bool(parts)
    assert warning.count("every client") == len(parts)
    assert all(part in warning for part in parts)


@pytest.mark.parametrize(
    ("address", "flags", "exposed"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"http_root_cert": "ca.pem"}, True),
        ("0.0.0.0", {"http_restricted_api": ("inference:key=x",)}, False),
        ("0.0.0.0", {"api_keys_file": "keys.json"}, False),
    ],
)
def test_an_extra_port_that_every_client_may_use_is_named(address: str, flags: dict[str, Any], exposed: bool) -> None:
    warning = exposure(ServerOptions(**flags), (ExtraPort("second", address, 4711, v2_alone),))
    assert ("every client that reaches 0.0.0.0 may use this server" in warning) is exposed


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"jwt_issuer": "i"}, "need --jwt-jwks=FILE"),
        ({"jwt_role": ("a=all",)}, "need --jwt-jwks=FILE"),
        ({"jwt_jwks": "f"}, "--jwt-jwks needs --jwt-issuer and --jwt-audience"),
        ({"jwt_jwks": "f", "jwt_issuer": "i", "jwt_audience": ("",)}, "--jwt-jwks needs --jwt-issuer and"),
        ({"jwt_jwks": "f", "jwt_issuer": "i", "jwt_audience": ("a",), "jwt_leeway_secs": 601}, "expected 0 to 600"),
        ({"jwt_jwks": "f", "jwt_issuer": "i", "jwt_audience": ("a",), "jwt_role": ("x=root",)}, "--jwt-role=x=root"),
        ({"jwt_jwks": "f", "jwt_issuer": "i", "jwt_audience": ("a",), "jwt_limit": ("x=1",)}, "--jwt-limit=x=1"),
    ],
)
def test_incomplete_options_of_tokens_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_key_check(ServerOptions(**flags), lambda: 0.0)


def test_tokens_count_as_protection() -> None:
    assert exposure(ServerOptions(http_address="0.0.0.0"))
    assert not exposure(ServerOptions(http_address="0.0.0.0", jwt_jwks="f"))
