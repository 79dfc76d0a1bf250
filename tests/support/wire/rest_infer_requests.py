"""Bodies of V2 inference requests over REST."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FP32 = {"name": "IN", "shape": [1, 4], "datatype": "FP32"}
JSON_INPUT = {**FP32, "data": [1, 2, 3, 4]}


def body_of(*inputs: Mapping[str, Any], **members: Any) -> bytes:
    """Return a JSON request with those inputs, by default JSON_INPUT."""
    return json.dumps({**members, "inputs": list(inputs or [JSON_INPUT])}).encode()


def binary(*sizes: int, **members: Any) -> tuple[bytes, bytes]:
    """Return the JSON header of raw inputs of those sizes, and its length as the HTTP header states it."""
    inputs = [
        {"name": f"IN{i}", "shape": [size // 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
        for i, size in enumerate(sizes)
    ]
    header = json.dumps({**members, "inputs": inputs}).encode()
    return header, str(len(header)).encode()
