"""The objective as text."""

from __future__ import annotations

import pytest

from remora_tools.deciders.objective import Slo


@pytest.mark.parametrize(("slo", "text"), [(Slo(99.0, 20_000_000), "p99<=20ms"), (Slo(99.9, 500_000), "p99.9<=0.5ms")])
def test_the_text_is_that_of_the_command_line(slo: Slo, text: str) -> None:
    assert slo.text() == text
