"""Requests of a load, from files and in each encoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from remora.cli.output import UsageError
from remora.errors import InvalidArgumentError
from remora.messages import Tensor
from remora.proto.inference_pb2 import ModelInferRequest
from remora_tools.client.inputs import InferRequest
from remora_tools.load.generator import SEQUENCE_ID
from remora_tools.load.requests import (
    bodies_of,
    grpc_message,
    http_message,
    in_sequence,
    interleave,
    json_body,
    server_address,
)

REQUEST = InferRequest(
    (
        Tensor("x", "FP32", np.array([[1, 2]], "f4")),
        Tensor("t", "BYTES", np.array([b"a"], object)),
    ),
    ("y",),
)


@pytest.mark.parametrize(
    ("text", "count"), [('{"a": 1}', 1), ('{"a": 1}\n\n{"a": 2}\n', 2), ('{\n "a": 1\n}', 1), ("[1]\n[2]\n[3]", 3)]
)
def test_a_file_has_a_document_per_line_or_one(text: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    assert len(bodies_of(tmp_path / "f")) == count


@pytest.mark.parametrize(("text", "error"), [("", "is empty"), ("{}\n{", "line 2 is not JSON")])
def test_a_damaged_file_is_refused_with_its_line(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(InvalidArgumentError, match=error):
        bodies_of(tmp_path / "f")


def test_a_message_has_its_headers_and_length_and_no_credentials_in_host() -> None:
    message = http_message(urlsplit("http://user:pw@h:1/prefix/"), "/v2/x", b"body", {"X-Key": "k"})
    assert message == b"POST /prefix/v2/x HTTP/1.1\r\nHost: h:1\r\nX-Key: k\r\nContent-Length: 4\r\n\r\nbody"


def test_json_and_grpc_hold_the_same_tensors() -> None:
    document = json.loads(json_body(REQUEST))
    assert document["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
    assert document["inputs"][1]["data"] == ["a"]
    assert document["outputs"] == [{"name": "y"}]
    message = ModelInferRequest.FromString(grpc_message("m", "3", REQUEST))
    assert (message.model_name, message.model_version, message.outputs[0].name) == ("m", "3", "y")
    assert list(message.raw_input_contents) == [np.array([1, 2], "f4").tobytes(), b"\x01\x00\x00\x00a"]


def test_half_precision_has_no_json() -> None:
    with pytest.raises(UsageError, match="input 'x' is FP16"):
        json_body(InferRequest((Tensor("x", "FP16", np.ones(1, "f2")),)))


def test_a_sequence_has_a_first_a_middle_and_a_last_request() -> None:
    flags = [(each.parameters["sequence_start"], each.parameters["sequence_end"]) for each in in_sequence(REQUEST, 3)]
    assert flags == [(True, False), (False, False), (False, True)]


def test_the_only_request_of_a_sequence_is_its_first_and_its_last() -> None:
    first, _, last = (each.parameters for each in in_sequence(REQUEST, 1))
    assert first == last == {"sequence_id": SEQUENCE_ID, "sequence_start": True, "sequence_end": True}


def test_a_message_of_grpc_has_the_parameters_of_its_request() -> None:
    first = ModelInferRequest.FromString(grpc_message("m", "", in_sequence(REQUEST, 3)[0])).parameters
    assert first["sequence_id"].int64_param == SEQUENCE_ID
    assert (first["sequence_start"].bool_param, first["sequence_end"].bool_param) == (True, False)
    other = replace(REQUEST, parameters={"top_p": 0.5, "user": "u"})
    sent = ModelInferRequest.FromString(grpc_message("m", "", other)).parameters
    assert (sent["top_p"].double_param, sent["user"].string_param) == (0.5, "u")


@pytest.mark.parametrize(
    ("several", "weights", "turns"),
    [
        ([b"ab"], [1], b"ab"),
        ([b"ab", b"x"], [1, 1], b"axbx"),
        ([b"a", b"x"], [3, 1], b"aaxa"),
        ([b"abc", b"xyz"], [2, 1], b"axbcyabzc"),
    ],
)
def test_models_get_requests_by_their_weights(several: list[bytes], weights: list[int], turns: bytes) -> None:
    found = interleave([[each[n : n + 1] for n in range(len(each))] for each in several], weights)
    assert b"".join(found) == turns


def test_a_url_has_the_port_of_its_scheme() -> None:
    assert [server_address(url)[1] for url in ("h:81", "http://h", "https://h")] == [81, 80, 443]
    for url in ("ftp://h", "http://", "http://h:port"):
        with pytest.raises(UsageError, match="--url"):
            server_address(url)
