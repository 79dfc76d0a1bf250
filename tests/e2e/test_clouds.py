"""A server that serves models out of a bucket: `remora serve s3://...`, its polls, and its second start."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.live_server import PATIENCE_S
from support.servers.object_store import ObjectStore, object_store


@pytest.fixture
def clouds(digits: Any) -> Iterator[ObjectStore]:
    """A double with the digits example, and a model that no test needs."""
    with object_store() as store:
        for path in digits.models.rglob("*"):
            if path.is_file():
                store.put("bucket", f"repo/{path.relative_to(digits.models)}", path.read_bytes())
        store.put("bucket", "repo/unwanted/1/model.onnx", b"never fetched")
        yield store


@pytest.fixture
def environment(clouds: ObjectStore, tmp_path: Path) -> dict[str, str]:
    return {**clouds.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def ask(port: int, path: str, body: bytes | None = None, method: str = "GET") -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def classify(port: int) -> Any:
    rows = [[float(number % 17) for number in range(64)]]
    body = {"inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": rows}]}
    return ask(port, "/v2/models/digits/infer", json.dumps(body).encode(), "POST")["outputs"]


ONLY = ("--model-control-mode=explicit", "--load-model=digits", "--allow-grpc=false")


@pytest.mark.parametrize("url", ["s3://bucket/repo", "gs://bucket/repo"])
def test_a_bucket_is_served_like_a_folder(
    clouds: ObjectStore, environment: dict[str, str], serving: Callable[..., Any], digits: Any, url: str
) -> None:
    with serving(digits.models, "--allow-grpc=false") as server:
        expected = classify(server.http)
    with serving(url, *ONLY, **environment) as server:
        assert classify(server.http) == expected
        index = {entry["name"]: entry.get("state") for entry in ask(server.http, "/v2/repository/index", b"", "POST")}
    assert index == {"digits": "READY", "unwanted": None}
    assert not [seen for seen in clouds.requests if "unwanted" in seen.key], "only what is wanted is brought"
    assert "very-secret-key" not in server.log.read_text()


def test_a_second_start_asks_for_the_listing_alone(
    clouds: ObjectStore, environment: dict[str, str], serving: Callable[..., Any]
) -> None:
    with serving("s3://bucket/repo", *ONLY, **environment):
        pass
    clouds.requests.clear()
    with serving("s3://bucket/repo", *ONLY, **environment) as server:
        classify(server.http)
    assert {seen.kind for seen in clouds.requests} == {"LIST"}


def test_polling_costs_one_list_and_brings_what_is_new(
    clouds: ObjectStore, environment: dict[str, str], serving: Callable[..., Any], digits: Any
) -> None:
    del clouds.buckets["bucket"]["repo/unwanted/1/model.onnx"]
    looked = threading.Semaphore(0)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1", "--allow-grpc=false")
    with serving("s3://bucket/repo", *flags, **environment) as server:
        clouds.requests.clear()
        clouds.before = lambda seen: looked.release()
        for _ in range(3):
            assert looked.acquire(timeout=PATIENCE_S)
        assert [seen.kind for seen in clouds.requests][:3] == ["LIST"] * 3, "nothing changed: no HEAD and no GET"
        model = (digits.models / "digits" / "1" / "model.onnx").read_bytes()
        clouds.put("bucket", "repo/digits/2/model.onnx", model)
        while ask(server.http, "/v2/models/digits")["versions"] != ["2"]:
            assert looked.acquire(timeout=PATIENCE_S)
        assert classify(server.http)
        # The configuration did not change, and is not brought again.
        assert [seen.key for seen in clouds.requests if seen.kind == "GET"] == ["bucket/repo/digits/2/model.onnx"]


def test_a_url_may_be_a_model_repository_too(
    clouds: ObjectStore, environment: dict[str, str], serving: Callable[..., Any], tmp_path: Path
) -> None:
    flags = (f"--model-repository=s3://127.0.0.1:{clouds.port}/bucket/repo", *ONLY)
    with serving(f"--model-cache-directory={tmp_path / 'models'}", *flags, **environment) as server:
        assert classify(server.http)
    assert (tmp_path / "models" / "objects").is_dir()


def test_a_model_that_cannot_be_fetched_whole_does_not_serve(
    clouds: ObjectStore, environment: dict[str, str], serving: Callable[..., Any], digits: Any
) -> None:
    with serving("s3://bucket/repo", "--model-control-mode=explicit", "--allow-grpc=false", **environment) as server:
        clouds.fail("403", key="model.onnx", times=100)
        with pytest.raises(urllib.error.HTTPError):
            ask(server.http, "/v2/repository/models/digits/load", b"{}", "POST")
        assert not ask(server.http, "/v2/repository/index", b'{"ready": true}', "POST")
        clouds.faults.clear()
        ask(server.http, "/v2/repository/models/digits/load", b"{}", "POST")
        assert classify(server.http)
