"""The OpenAPI documents, and the request and response classes of scripts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora_adapters import azureml
from remora_adapters.azureml.raw_http import AMLRequest, AMLResponse, UploadedFile, register_modules
from remora_adapters.azureml.swagger import ANYTHING, Named, NoDocumentError, find_document, schemas_of
from support.servers.hosting import ask, running, write_scale

# -- documents ---------------------------------------------------------------------------------------------------------


class SchemaUtil:
    """What inference_schema knows of a script whose decorators only the newer documents can say."""

    def get_supported_versions(self, run: object) -> list[str]:
        return ["3.0", "3.1"]

    def get_input_schema(self, run: object) -> dict[str, Any]:
        return {"type": "object", "example": {"data": [1.0]}}

    def get_output_schema(self, run: object) -> dict[str, Any]:
        return {"type": "number"}


def test_documents_say_what_the_script_takes_and_what_the_deployment_is_called(tmp_path: Path) -> None:
    schemas = schemas_of(print, SchemaUtil())
    named = Named("digits", "7", "/api/")
    for version, number in (("3", "3.0.3"), ("3.0", "3.0.3"), ("3.1", "3.1.0")):
        document = json.loads(find_document(version, tmp_path, named, schemas))
        assert (document["openapi"], document["info"]["title"], document["info"]["version"]) == (number, "digits", "7")
        assert set(document["paths"]) == {"/api/", "/api/score", "/api/swagger.json"}
        assert document["components"]["schemas"]["ServiceInput"]["example"] == {"data": [1.0]}
        assert document["components"]["schemas"]["ServiceOutput"] == {"type": "number"}
    old = json.loads(find_document("2", tmp_path, Named(), ANYTHING))
    assert (old["swagger"], old["info"]["title"], set(old["paths"])) == (
        "2.0",
        "ML service",
        {"/", "/score", "/swagger.json"},
    )


def test_a_document_that_cannot_be_is_refused_with_those_that_can(tmp_path: Path) -> None:
    schemas = schemas_of(print, SchemaUtil())
    with pytest.raises(NoDocumentError, match=r"not supported for the scoring script.*: \[3, 3\.1\]"):
        find_document("2", tmp_path, Named(), schemas)
    (tmp_path / "swagger2.json").write_text("{}")
    assert find_document("2.0", tmp_path, Named(), schemas) == b"{}"
    with pytest.raises(NoDocumentError, match=r"\[9\] is not valid.*: \[2, 3, 3\.1\]"):
        find_document("9", tmp_path, Named(), schemas)


# -- requests and responses of scripts --------------------------------------------------------------------------------


@given(st.binary(max_size=200).filter(lambda data: b"--b" not in data), st.text("abc.é", min_size=1, max_size=9))
def test_a_forms_file_arrives_as_it_was_sent(data: bytes, note: str) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n' + data + b"\r\n"
    body += b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n' + note.encode() + b"\r\n--b--\r\n"
    request = AMLRequest("POST", "/score", "", [("Content-Type", "multipart/form-data; boundary=b")], body)
    assert request.files["f"].read() == data
    assert request.form["n"] == note


@given(st.dictionaries(st.text("abc", min_size=1), st.lists(st.text(max_size=5), min_size=1, max_size=3)))
def test_a_querys_values_are_all_there(query: dict[str, list[str]]) -> None:
    from urllib.parse import urlencode

    request = AMLRequest("GET", "/score", urlencode(query, doseq=True), [], b"")
    assert {key: request.args.getlist(key) for key in request.args} == query


def test_a_request_has_its_headers_and_values_as_flask_has_them() -> None:
    sent = [("x-given", "1"), ("ACCEPT", "a"), ("accept", "b"), ("Host", "h:1")]
    request = AMLRequest("POST", "/score", "n=3&n=x", sent, b"")
    assert dict(request.headers) == {"X-Given": "1", "Accept": "a,b", "Host": "h:1"}
    assert list(request.headers) == list(request.headers.items())
    assert (request.headers["x-GIVEN"], request.headers.get("x-given", type=int)) == ("1", 1)
    assert (request.headers.get("none"), request.headers.get("accept", 5, type=int)) == (None, 5)
    assert (request.args.get("n", type=int), request.args.get("none", 2, type=int)) == (3, 2)
    assert request.args.to_dict(flat=False) == {"n": ["3", "x"]} == dict(request.args.lists())
    assert request.base_url == "http://h:1/score"


def test_a_file_of_a_form_is_read_as_any_file(tmp_path: Path) -> None:
    file = UploadedFile("rows", "rows.csv", "text/csv", b"a,b\n1,2\n")
    assert list(file) == [b"a,b\n", b"1,2\n"]
    file.stream.seek(0)
    assert file.read(3) == b"a,b"
    file.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == b"a,b\n1,2\n"


def test_header_values_are_split_at_commas_as_azure_does() -> None:
    assert AMLResponse("", 200, {"A": "1, 2"}).headers.get_all("A") == ["1", "2"]


def test_azures_names_lead_to_our_request_and_response() -> None:
    modules: dict[str, Any] = {}
    register_modules(modules)
    for package in ("azureml.contrib.services", "azureml_inference_server_http.api"):
        assert modules[f"{package}.aml_request"].AMLRequest is AMLRequest
        assert modules[package].aml_response.AMLResponse is AMLResponse


def test_the_document_is_behind_the_lock_of_metadata(tmp_path: Path) -> None:
    host = azureml.host({"AZUREML_MODEL_DIR": str(write_scale(tmp_path / "models" / "scale").parent)})
    locked = replace(host.server, http_restricted_api=("metadata:key=value",))
    with running(replace(host, server=locked)) as ports:
        assert ask(ports.http, "GET", "/swagger.json").status == 403
        assert ask(ports.http, "GET", "/swagger.json", headers={"key": "value"}).status != 403
