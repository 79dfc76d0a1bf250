"""`remora bench load` against a real Triton: each protocol, sequences, statistics and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from remora.cli import main
from support.models.load_models import write_counter
from support.servers.live_server import write_version
from support.servers.real_triton import needs_triton, triton_server

pytestmark = needs_triton

LOAD = ("--duration=1.5", "--window=0.5", "--warm-up=0.5", "--concurrency=2", "--quiet", "--json-out")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    folder = tmp_path_factory.mktemp("models")
    write_counter(folder / "models", "counter", length=3)
    write_version(folder / "models", 1)
    with triton_server(folder / "models", folder / "triton.log") as found:
        yield found


@pytest.mark.parametrize(
    "words",
    [
        ("m",),
        ("m", "--encoding=json"),
        ("m", "--grpc"),
        ("m", "--grpc", "--stream"),
        ("m", "--rate=50"),
        ("counter", "--sequence=3", "--seed=1"),
        ("counter", "--sequence=3", "--seed=2", "--grpc"),
        ("counter", "--sequence=3", "--seed=3", "--grpc", "--stream"),
    ],
    ids=" ".join,
)
def test_triton_is_measured_with_its_share_and_its_machine(
    words: tuple[str, ...], ports: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    http, grpc, metrics = ports
    words = tuple(word if word != "--grpc" else f"--grpc=127.0.0.1:{grpc}" for word in words)
    load = tuple(word for word in LOAD if "--rate=50" not in words or "--concurrency" not in word)
    urls = ("--url", f"http://127.0.0.1:{http}", "--metrics-url", f"http://127.0.0.1:{metrics}/metrics")
    assert main(["bench", "load", *words, *load, *urls]) == 0
    (level,) = json.loads(capsys.readouterr().out)
    assert level["failures"] == {}
    assert level["requests"] > 10
    assert 0 < level["server_us"]["whole"] < level["latency_us"]["max"]
    assert {"cpu %", "memory MiB"} <= level["machine"].keys()
