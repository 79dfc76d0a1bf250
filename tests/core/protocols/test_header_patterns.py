"""Patterns of operators: which are refused, and that each refusal is one error on every port."""

from __future__ import annotations

import pytest

from remora.engine import Engine
from remora.errors import ConfigError
from remora.options import ServerOptions
from remora.protocols.grpc.status import open_forward
from remora.protocols.header_patterns import open_header_pattern
from remora.server.http.asgi import V2App
from remora.server.option_checks import StartError, compile_pattern

REFUSED = {
    "(": "missing ), unterminated subpattern at position 0",
    "(" * 2000 + ")" * 2000: "its groups are nested too deep",
    "a{99999999999999999999}": "the repetition number is too large",
    "a" * 5000: "it has 5000 characters, more than 4096",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda text: text[:8])
def test_a_pattern_that_cannot_be_compiled_is_refused_with_the_reason_everywhere(pattern: str) -> None:
    reason = REFUSED[pattern].replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=f"^{reason}$"):
        open_header_pattern(pattern)
    with pytest.raises(ConfigError, match=f"is not a regular expression.*{reason}"):
        open_forward(pattern)
    with pytest.raises(StartError, match=f"not a regular expression: {reason}"):
        compile_pattern(pattern, "--flag")
    with pytest.raises(ValueError, match=f"is not a regular expression: {reason}"):
        V2App(Engine(), ServerOptions(http_header_forward_pattern=pattern))


def test_the_case_counts_only_where_the_pattern_says_so() -> None:
    assert open_header_pattern("x-a").search("X-A")
    assert not open_header_pattern("x-a", case_sensitive=True).search("X-A")
