"""`remora explain` against a server in this process: its report, and its text when the model has served no request."""

from __future__ import annotations

import json

import pytest

from remora.cli import main
from remora.config import BatchPolicy
from remora.scheduling.batching import IDLE, REASONS
from remora.statistics import ModelStatistics, RanBatch
from remora_tools.client.explain import MEANINGS, text_of
from remora_tools.deciders.explaining import Setup, explain
from support.engine.fakes import MS, START


def explained(count: int = 300) -> dict[str, object]:
    policy = BatchPolicy(max_batch_size=8, dynamic=True, preferred=(8,))
    runs = [RanBatch(START + at * 10 * MS, 1, 1 + at % 2, 0, 2 * MS, IDLE) for at in range(count)]
    stats = ModelStatistics().snapshot("m", "3")
    return explain(Setup(policy, 1), runs, stats, START + 10_000 * MS).document()


def test_everything_that_was_found_is_printed() -> None:
    text = text_of(explained())
    assert text.startswith("m version 3\n")
    for part in ("arrival rate", "instance_idle", "100%", "model alone, req/s", "as it is", "worth trying:", "note:"):
        assert part in text


def test_without_traffic_there_is_only_the_note() -> None:
    assert text_of(explained(0)) == (
        "m version 3\n\nnote: not enough traffic seen: 0 requests of the 200 a prediction needs"
    )


def test_each_reason_has_a_meaning() -> None:
    assert set(REASONS) <= MEANINGS.keys()


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "m", "--url", "127.0.0.1:9"]) == 1
    assert "cannot connect to http://127.0.0.1:9" in capsys.readouterr().err


def test_the_document_fits_its_schema() -> None:
    from remora.management.explanation import Explanation
    from remora.server.http.pages import schema_of

    schema = schema_of(Explanation)
    for document in (explained(), explained(0)):
        assert fits(schema, json.loads(json.dumps(document))), document
    assert not fits(schema, {**explained(), "notes": 3})


def fits(schema: dict[str, object], value: object) -> bool:
    """Whether a value fits a schema, as far as ours use the language."""
    kinds = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "null": type(None)}
    match schema:
        case {"anyOf": list(options)}:
            return any(fits(option, value) for option in options)
        case {"type": "array", "items": dict(items)}:
            return isinstance(value, list) and all(fits(items, item) for item in value)
        case {"type": "object", "properties": dict(properties), "required": list(required)}:
            return (
                isinstance(value, dict)
                and set(required) == value.keys()
                and all(fits(properties[name], item) for name, item in value.items())
            )
        case {"type": "object", "additionalProperties": dict(items)}:
            return isinstance(value, dict) and all(fits(items, item) for item in value.values())
        case {"type": str(kind)}:
            return isinstance(value, kinds[kind])  # type: ignore[arg-type]
    return False
