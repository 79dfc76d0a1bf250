"""Recorded cases, each changed a little: other values, members, bytes, headers, paths.

Pure but for the dice, which the caller brings: the same seed changes the same cases in the same way.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "1", "1.5", "true", "é", "\0", "a" * 300),
    *(0, 1, -1, 2, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(1.0, 0.5, -1.5, 1e3, 1e40),
    *([], {}, [1], ["a"], [[]], [[1, 2], [3, 4]], [1.0], [True], [None], {"a": 1}),
)
MEMBERS = (
    *("name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "id", "headers", "foo", "triton_x"),
    *("binary_data", "binary_data_size", "binary_data_output", "classification", "priority", "timeout"),
    *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "key", "offset", "byte_size"),
    *("sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response"),
    *("ready", "unload_dependents", "config", "model_name", "model_version", "url", "text_input", "stream"),
)
DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16", "STRING", "fp32", ""),
)
LENGTHS = ("0", "-1", "1000000000", "x", "", " 5", "+5", "5x")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
SEGMENTS = (
    *("", "0", "1", "-1", "01", "%41", "v2", "models", "versions", "infer", "ready", "live", "config", "stats"),
    *("index", "load", "unload", "generate", "generate_stream", "region", "status", "register", "unregister"),
    *("repository", "health", "logging", "trace", "setting", "systemsharedmemory", "cudasharedmemory"),
)
ENDINGS = ("/", "//", "/1", "?a=b", "#x", "%2e")
HEADERS = (
    *(
        ("Content-Type", text)
        for text in ("", "text/plain", "application/octet-stream", "application/json; charset=utf-8")
    ),
    *(("Accept-Encoding", text) for text in ("gzip", "deflate", "gzip;q=0", "*", "identity", "br, gzip", "GZIP", "")),
    *(("Content-Encoding", text) for text in ("gzip", "identity", "br", "")),
    *(("Accept", text) for text in ("text/html", "application/octet-stream")),
    *(("endpoint-load-metrics-format", text) for text in ("text", "json", "bin", "")),
    ("Expect", "nothing"),
    ("triton-grpc-protocol-infer", "x"),
)
ORDERLY_ONLY = ("exact", "text-prefix")
CHANGES = ("add", "drop", "value", "value", "twice", "rename", "kind", "near", "near", "wrap")
JSON_MARKS = b'{}[]",:0123456789.-+eEtfn \\\n\x00\xffa'


@dataclass(frozen=True, slots=True)
class Mutator:
    dice: Random

    def mutated(self, case: dict[str, Any]) -> dict[str, Any]:
        """The case with something changed, and without what only its own answer fits."""
        changed = unfitted(case)
        if "requests_http" in changed:
            requests = changed["requests_http"]
            number = self.dice.randrange(len(requests))
            requests[number] = self._http(requests[number])
        elif "path" in changed:
            changed = self._http(changed)
        elif "request" in changed:
            changed["request"] = self.document(changed["request"])
        elif changed.get("requests"):
            requests = changed["requests"]
            number = self.dice.randrange(len(requests))
            requests[number] = self.document(requests[number])
        if "metadata" in changed and self.dice.random() < 0.2:
            changed["metadata"] = self._pairs(changed["metadata"])
        return changed

    # ---- HTTP

    def _http(self, request: dict[str, Any]) -> dict[str, Any]:
        body = body_of(request)
        name = next(
            (key for key in request.get("headers", {}) if key.lower() == "inference-header-content-length"), None
        )
        if body and self.dice.random() < 0.9:
            length = request["headers"][name] if name else ""
            if length.isdigit() and int(length) <= len(body):
                return self._binary(request, name, body[: int(length)], body[int(length) :])
            return with_body(request, self._json_text(body))
        change = self.dice.choice((self._method, self._path, self._path, self._path, self._header))
        return change(request)

    def _binary(self, request: dict[str, Any], name: str, head: bytes, tail: bytes) -> dict[str, Any]:
        what = self.dice.choices(("head", "tail", "length"), (65, 25, 10))[0]
        if what == "head":
            head = self._json_text(head)
        elif what == "tail":
            tail = self.dice.choice((tail[:-1], tail + b"\0", tail[: len(tail) // 2], tail * 2, b"", self.text(tail)))
        length = str(len(head))
        if what == "length":
            near = (len(head) + 1, len(head) - 1, len(head) + len(tail))
            length = self.dice.choice((*LENGTHS, *map(str, near)))
        changed = with_body(request, head + tail)
        changed["headers"] = request["headers"] | {name: length}
        return changed

    def _json_text(self, body: bytes) -> bytes:
        try:
            document = json.loads(body)
        except ValueError:
            return self.text(body)
        what = self.dice.choices(("document", "text", "layout"), (75, 22, 3))[0]
        if what == "text":
            return self.text(body)
        if what == "layout":
            return json.dumps(document, indent=2).encode()
        return json.dumps(self.document(document), ensure_ascii=False).encode("utf-8", "surrogatepass")

    def _method(self, request: dict[str, Any]) -> dict[str, Any]:
        return request | {"method": self.dice.choice(METHODS)}

    def _path(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.dice.random() < 0.3:
            return request | {"path": request["path"] + self.dice.choice(ENDINGS)}
        parts = request["path"].split("/")
        at = self.dice.randrange(len(parts))
        match self.dice.randrange(5):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, self.dice.choice(SEGMENTS))
            case 2:
                parts[at] = self.dice.choice((parts[at] + "x", parts[at].upper(), parts[at][:-1]))
            case _:
                parts[at] = self.dice.choice(SEGMENTS)
        return request | {"path": quote("/" + "/".join(parts).lstrip("/"), safe="/?=&%#")}

    def _header(self, request: dict[str, Any]) -> dict[str, Any]:
        headers = dict(request.get("headers", {}))
        if headers and self.dice.random() < 0.5:
            name = self.dice.choice(sorted(headers))
            if self.dice.random() < 0.5:
                del headers[name]
            else:
                headers[name] = self.dice.choice((headers[name] + "x", "", headers[name].upper(), headers[name][:-1]))
        else:
            name, text = self.dice.choice(HEADERS)
            headers = {key: kept for key, kept in headers.items() if key.lower() != name.lower()} | {name: text}
        return request | {"headers": headers}

    def _pairs(self, metadata: list[list[str]]) -> list[list[str]]:
        pairs = [list(pair) for pair in metadata]
        at = self.dice.randrange(len(pairs))
        pairs[at][1] = self.dice.choice((pairs[at][1] + "x", "", pairs[at][1].upper()))
        return pairs if self.dice.random() < 0.7 else pairs[:at] + pairs[at + 1 :]

    # ---- documents and bytes

    def text(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self.dice.choice((1, 1, 2))):
            at, mark = self.dice.randrange(len(changed) or 1), self.dice.choice(JSON_MARKS)
            match self.dice.randrange(4):
                case 0:
                    del changed[at : at + 1]
                case 1:
                    changed.insert(at, mark)
                case 2:
                    changed[at : at + 1] = bytes([mark])
                case 3:
                    del changed[at : at + self.dice.randrange(1, 20)]
        return bytes(changed)

    def document(self, document: Any) -> Any:
        """The document with one or two of its nodes changed."""
        whole = [copy.deepcopy(document)]
        for _ in range(self.dice.choice((1, 1, 1, 2))):
            parent, key = self.dice.choice(list(places(whole)))
            # Another kind of value at the root would only be refused at once.
            self._change(parent, key, "add" if parent is whole else self.dice.choice(CHANGES))
        return whole[0]

    def _change(self, parent: Any, key: Any, change: str) -> None:
        node = parent[key]
        match change:
            case "add" if isinstance(node, dict):
                node[self.dice.choice(MEMBERS)] = self._value()
            case "add" if isinstance(node, list):
                node.insert(self.dice.randrange(len(node) + 1), self._value())
            case "drop":
                del parent[key]
            case "twice" if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(node))
            case "rename" if isinstance(parent, dict):
                parent[self.dice.choice(MEMBERS)] = parent.pop(key)
            case "kind" if key == "datatype":
                parent[key] = self.dice.choice(DATATYPES)
            case "kind" if isinstance(node, list):
                parent[key] = self.dice.choice((node + node, node[:-1]))
            case "kind":
                parent[key] = str(node)
            case "near" if isinstance(node, (int, float)) and not isinstance(node, bool):
                parent[key] = self.dice.choice(
                    (node + 1, node - 1, -node, node * 2, float(node), str(node), 300, 70000)
                )
            case "near" if isinstance(node, str):
                parent[key] = self.dice.choice((node + "x", node[:-1], node.upper(), node + " ", node + node))
            case "wrap":
                parent[key] = self.dice.choice(([node], [node], {"a": node}))
            case _:
                parent[key] = self._value()

    def _value(self) -> Any:
        return copy.deepcopy(self.dice.choice(VALUES))


def unfitted(case: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the case that waits for no answer and is compared without regard to the order of keys."""
    kept = {key: part for key, part in case.items() if key not in ("expect", "answer", "head_differs", "retry_s")}
    if kept["compare"] in ORDERLY_ONLY:
        kept["compare"] = "json"
    return copy.deepcopy(kept)


def body_of(request: dict[str, Any]) -> bytes:
    if request.get("body_b64") is not None:
        return base64.b64decode(request["body_b64"])
    return (request.get("body") or "").encode()


def with_body(request: dict[str, Any], body: bytes) -> dict[str, Any]:
    kept = {key: part for key, part in request.items() if key not in ("body", "body_b64")}
    try:
        return kept | {"body": body.decode()}
    except UnicodeDecodeError:
        return kept | {"body_b64": base64.b64encode(body).decode()}


def places(parent: Any) -> Iterator[tuple[Any, Any]]:
    """Every node of a document, as what holds it and where."""
    for key in parent if isinstance(parent, dict) else range(len(parent)):
        yield parent, key
        if isinstance(parent[key], (dict, list)):
            yield from places(parent[key])
