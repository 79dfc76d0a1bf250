"""JSON that others have written: deep texts are invalid, and no module reads such texts another way."""

from __future__ import annotations

import json
import re

import pytest

from conftest import ROOT
from remora.system.json_text import MAX_DEPTH, read_json

OURS = (
    "core/remora_llm/generation",  # texts of models and clients, with separate limits
    "core/remora/protocols",  # the request path
    "core/remora/server/fronts",
    "core/remora/backends/worker",
    "core/remora_llm/backends/vllm",
    "core/remora/models/trial_load.py",
    "core/remora_tools/load/generator.py",
    "core/remora/config/documents.py",  # has the line of every key
    "core/remora_runtimes/formats/__init__.py",
    "core/remora/functions/json_values.py",  # runs without remora in an exported model
    "core/remora/system/json_text.py",
    "core/remora/traffic",
)
"""Places that read what remora itself has written, or that limit the depth themselves."""


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 1_500, 100_000])
@pytest.mark.parametrize("ends", [True, False])
def test_a_deep_text_is_invalid_json(opening: str, depth: int, ends: bool) -> None:
    text = opening * depth + ("1" + ("]" if opening == "[" else "}") * depth if ends else "")
    for given in (text, text.encode()):
        with pytest.raises(json.JSONDecodeError):
            read_json(given)


def test_other_texts_are_read_as_usual() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read_json(deep)) == deep
    assert read_json('{"a": [1, {"b": null}], "c": NaN}')["a"] == [1, {"b": None}]
    assert read_json('{"a": 1, "a": 2}', pairs=list) == [("a", 1), ("a", 2)]
    with pytest.raises(ValueError, match="Expecting"):
        read_json("")


def test_no_module_reads_json_of_others_another_way() -> None:
    for folder in ("core/remora", "adapters/remora_adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(OURS):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"(?<![\w.])json\.loads?\(", line) and "json.dumps" not in line:
                    assert "results_from_json" in line, f"{name}:{number} reads JSON without remora.system.json_text"
