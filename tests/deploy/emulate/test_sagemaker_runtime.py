"""boto3's own client through the runtime API's double to our container: headers, errors, streams, late answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from remora_adapters import sagemaker
from remora_deploy.emulate.asking import Address
from remora_deploy.emulate.sagemaker_runtime import PAYLOAD_BYTES, Endpoint, runtime_api
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, write_scale
from support.servers.sagemaker_door import COUNTER, COUNTS, V2, opened, python_model, runtime_client

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install '.[deploy-sagemaker]'")
botocore = pytest.importorskip("botocore")
NAME = {"EndpointName": "endpoint-1"}


@contextmanager
def client_of(endpoint: Endpoint) -> Iterator[Any]:
    with runtime_api(endpoint) as api, runtime_client(api.server_address[1]) as client:
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    base = tmp_path_factory.mktemp("ml")
    write_scale(base / "model" / "scale")
    with opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(base)})) as door:
        objects = base / "objects"
        (objects / "bucket").mkdir(parents=True)
        with client_of(Endpoint(Address("127.0.0.1", door.port), objects)) as found:
            found.objects = objects
            yield found


def wait_for(place: Path) -> bytes:
    """Return a file's bytes once it exists."""
    eventually(place.exists)
    return place.read_bytes()


def test_an_invocation_with_its_headers(client: Any) -> None:
    answer = client.invoke_endpoint(
        **NAME, Body=V2, ContentType="application/json", CustomAttributes="traceparent=00-a-b-01"
    )
    assert answer["ContentType"] == "application/json"
    assert answer["CustomAttributes"] == "traceparent=00-a-b-01"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert json.loads(answer["Body"].read())["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]


def test_a_refusal_reaches_the_client_as_a_model_error_with_our_text(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError) as refused:
        client.invoke_endpoint(**NAME, Body=b"{", ContentType="application/json")
    said = refused.value.response
    assert (said["ResponseMetadata"]["HTTPStatusCode"], said["OriginalStatusCode"]) == (424, 400)
    assert "failed to parse the request JSON" in json.loads(said["OriginalMessage"])["error"]


def test_a_session_is_opened_and_its_id_is_one_that_the_client_takes(client: Any) -> None:
    answer = client.invoke_endpoint(**NAME, Body=V2, ContentType="application/json", SessionId="NEW_SESSION")
    session = answer["NewSessionId"].partition(";")[0]
    client.invoke_endpoint(**NAME, Body=V2, ContentType="application/json", SessionId=session)


def test_a_body_that_the_platform_would_not_let_through_is_refused(client: Any) -> None:
    with pytest.raises(botocore.exceptions.ClientError):
        client.invoke_endpoint(**NAME, Body=b"x" * (PAYLOAD_BYTES + 1))


def test_the_largest_body_that_is_let_through_reaches_the_container(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError):
        client.invoke_endpoint(**NAME, Body=b"x" * PAYLOAD_BYTES)


def test_a_target_model_needs_a_multi_model_endpoint(client: Any) -> None:
    with pytest.raises(client.exceptions.ValidationError, match="one model"):
        client.invoke_endpoint(**NAME, Body=V2, TargetModel="one.tar.gz")


@pytest.mark.parametrize("rows", [1, 50_000])
def test_an_asynchronous_invocation_reads_and_writes_objects(client: Any, rows: int) -> None:
    (client.objects / "bucket" / "in.csv").write_bytes(b"1,2,3,4\n" * rows)
    answer = client.invoke_endpoint_async(
        **NAME, InputLocation="s3://bucket/in.csv", ContentType="text/csv", Accept="text/csv", InferenceId="call-1"
    )
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 202
    assert answer["InferenceId"] == "call-1"
    whole = wait_for(client.objects / answer["OutputLocation"].removeprefix("s3://"))
    assert whole == b"2.0,4.0,6.0,8.0\n" * rows


def test_a_failed_asynchronous_invocation_leaves_its_reason(client: Any) -> None:
    (client.objects / "bucket" / "bad.csv").write_bytes(b"1\n")
    answer = client.invoke_endpoint_async(**NAME, InputLocation="s3://bucket/bad.csv", ContentType="text/csv")
    assert b"a row has 1 cells" in wait_for(client.objects / answer["FailureLocation"].removeprefix("s3://"))


def test_an_asynchronous_invocation_that_the_platform_refuses_leaves_its_reason_too(client: Any) -> None:
    (client.objects / "bucket" / "in.csv").write_bytes(b"1,2,3,4\n")
    where = {"X-Amzn-SageMaker-InputLocation": "s3://bucket/in.csv", "X-Amzn-SageMaker-Target-Model": "one.tar.gz"}
    api = http.client.HTTPConnection(urlsplit(client.meta.endpoint_url).netloc)
    api.request("POST", "/endpoints/endpoint-1/async-invocations", headers={"Content-Length": "0", **where})
    with api.getresponse() as answer:
        failed = answer.headers["X-Amzn-SageMaker-FailureLocation"]
    api.close()
    assert b"one model" in wait_for(client.objects / failed.removeprefix("s3://"))


def test_an_extension_that_leads_out_of_the_bucket_is_refused(client: Any) -> None:
    (client.objects / "bucket" / "in.csv").write_bytes(b"1,2,3,4\n")
    where = {"InputLocation": "s3://bucket/in.csv", "S3OutputPathExtension": "/../../../../x"}
    with pytest.raises(client.exceptions.ValidationError, match="cannot be written"):
        client.invoke_endpoint_async(**NAME, **where)


@pytest.mark.parametrize("key", ["nope", "../../../etc/hostname"])
def test_an_object_that_is_not_there_is_refused(client: Any, key: str) -> None:
    with pytest.raises(client.exceptions.ValidationError):
        client.invoke_endpoint_async(**NAME, InputLocation=f"s3://bucket/{key}")


def test_a_stream_is_decoded_piece_by_piece(tmp_path: Path) -> None:
    python_model(tmp_path / "model" / "counter", COUNTS, COUNTER)
    with (
        opened(sagemaker.host({"SAGEMAKER_BASE_DIR": str(tmp_path)})) as door,
        client_of(Endpoint(Address("127.0.0.1", door.port), tmp_path)) as client,
    ):
        answer = client.invoke_endpoint_with_response_stream(
            **NAME, Body=b'{"x": 5}', ContentType="application/json", Accept="text/event-stream"
        )
        assert answer["ContentType"].startswith("text/event-stream")
        whole = b"".join(part["PayloadPart"]["Bytes"] for part in answer["Body"])
        assert [json.loads(line[6:])["y"] for line in whole.decode().split("\n\n") if line] == [5.0, 6.0, 7.0]
        with pytest.raises(client.exceptions.ModelError):
            client.invoke_endpoint_with_response_stream(**NAME, Body=b"{", Accept="text/event-stream")


def once(answer: bytes) -> Callable[[socket.socket], None]:
    """What a container does that answers one request with these bytes and hangs up."""

    def act(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(answer)

    return act


def test_a_stream_that_breaks_off_is_an_error_amid_the_stream(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        broken = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n9\r\nhal"
        thread = threading.Thread(target=once(broken), args=(listener,))
        thread.start()
        with client_of(Endpoint(Address(*listener.getsockname()), tmp_path)) as client:
            parts: list[Any] = []  # filled up to where it ends by raising
            with (
                contextlib.closing(client.invoke_endpoint_with_response_stream(**NAME, Body=b"{}")["Body"]) as stream,
                pytest.raises(botocore.exceptions.EventStreamError, match="ModelStreamError"),
            ):
                parts.extend(stream)
        thread.join(PATIENCE_S)
        assert parts[0]["PayloadPart"]["Bytes"] == b"one"


def test_a_multi_model_endpoint_loads_the_requested_model(tmp_path: Path) -> None:
    write_scale(tmp_path / "archives" / "one.tar.gz" / "scale")

    def unpack(target: str) -> tuple[str, str]:
        name = target.encode().hex()
        place = tmp_path / "models" / name / "model"
        if not place.exists():
            shutil.copytree(tmp_path / "archives" / target, place)
        return name, os.fspath(place)

    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    with (
        opened(sagemaker.host(environ)) as door,
        client_of(Endpoint(Address("127.0.0.1", door.port), tmp_path, unpack)) as client,
    ):
        for _ in range(2):
            answer = client.invoke_endpoint(**NAME, Body=V2, ContentType="application/json", TargetModel="one.tar.gz")
            assert json.loads(answer["Body"].read())["model_name"] == "one.tar.gz"


class Stubborn(BaseHTTPRequestHandler):
    """A container of many models that has room for none, and lists one for ever."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(507, b'{"error": "no room"}')

    def do_GET(self) -> None:
        self.answer(200, b'{"models": [{"modelName": "other", "modelUrl": "/other"}]}')

    def do_DELETE(self) -> None:
        self.asked.append(self.path)
        self.answer(404, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_container_that_never_has_room_is_given_up(tmp_path: Path) -> None:
    Stubborn.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Stubborn) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        endpoint = Endpoint(Address(*server.server_address[:2]), tmp_path, lambda target: ("a", "/a"))  # type: ignore[arg-type]
        try:
            with client_of(endpoint) as client, pytest.raises(botocore.exceptions.ClientError, match="507"):
                client.invoke_endpoint(**NAME, Body=V2, ContentType="application/json", TargetModel="a.tar.gz")
        finally:
            server.shutdown()
            serving.join()
    assert Stubborn.asked == ["/models/other"]


@pytest.mark.parametrize("operation", ["invocations", "invocations-response-stream", "openai/v1/chat/completions"])
def test_a_container_that_refuses_connections_is_a_model_error(tmp_path: Path, operation: str) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", bound.getsockname()[1])
        with runtime_api(Endpoint(address, tmp_path)) as api:
            client = http.client.HTTPConnection("127.0.0.1", int(api.server_address[1]), timeout=60)
            with contextlib.closing(client):
                client.request("POST", f"/endpoints/e/{operation}", b"{}", {"Authorization": "Bearer t"})
                answer = client.getresponse()
                found = json.loads(answer.read())
    assert (answer.status, answer.headers["x-amzn-ErrorType"]) == (424, "ModelError")
    assert found["OriginalStatusCode"] == 0
    assert "refused" in found["OriginalMessage"]


def test_the_versions_of_the_real_client_are_in_the_output(record_property: Callable[[str, object], None]) -> None:
    record_property("boto3", boto3.__version__)
    assert boto3.__version__ >= "1.40"
