"""Calls of programs and HTTP services: answers, errors and their kinds."""

from __future__ import annotations

import pytest

from deploy_clouds.registry import Registry, running
from remora_deploy.deploy.plan import CallError, RefusedError
from remora_deploy.deploy.programs import Programs, body_of, command, http, request


def test_answers_of_json_are_parsed_and_others_are_text() -> None:
    programs = Programs("echo", "cat")
    assert programs(command("echo", ['{"a": 1}'])) == {"a": 1}
    assert programs(command("echo", ["{half"])) == "{half\n"
    assert programs(command("cat", [], "text")) == "text"


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(RefusedError, match="the program surely-absent"):
        Programs("surely-absent")


def test_a_failure_has_the_programs_own_text_and_kind() -> None:
    with pytest.raises(CallError, match="No such file") as failed:
        Programs("cat")(command("cat", ["/absent"]))
    assert failed.value.kind == "missing"


def test_http_answers_are_bytes_and_errors_have_kinds() -> None:
    with running(Registry()) as server:
        server.documents["/answer"] = ("text/plain", b"yes")
        assert body_of(request(http("GET", f"http://{server.address}/answer"))) == b"yes"
        with pytest.raises(CallError) as missing:
            request(http("GET", f"http://{server.address}/absent"))
        address = server.address
    with pytest.raises(CallError) as gone:
        request(http("GET", f"http://{address}/answer"))
    assert (missing.value.kind, gone.value.kind) == ("missing", "unreachable")
    for url in ("file:///etc/passwd", "ftp://x/"):
        with pytest.raises(CallError, match="is not the URL of a service"):
            request(http("GET", url))
