"""Hooks of schemathesis: requests name a model that is served, and their answers are short.

Otherwise nearly all requests would be refused because of an unknown model.
"""

from __future__ import annotations

from typing import Any

import schemathesis

LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2}


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Change what is valid already, and nothing else."""
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(body.get("model"), str):
        changed["model"] = "embed" if {"query", "text_1"} & body.keys() else "tiny"
    for name, most in LIMITS.items():
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            changed[name] = most
    return changed
