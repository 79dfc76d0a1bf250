"""The READMEs below infra/ are those that their script makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import readmes

MADE = readmes.readmes()


@pytest.mark.parametrize("path", MADE, ids=lambda path: str(path.relative_to(readmes.INFRA).parent))
def test_a_readme_is_what_its_script_makes(path: Path) -> None:
    assert path.exists()
    assert path.read_text() == MADE[path], "run: python tests/infra/readmes.py"


def test_types_and_defaults_are_on_one_line() -> None:
    body = '  type = object({\n    a = string\n    b = optional(number, 1)\n  })\n  default = { a = "x" }\n'
    assert readmes.kind_of(body) == "object({ a = string, b = optional(number, 1) })"
    assert readmes.default_of(body) == '`{ a = "x" }`'
    assert readmes.default_of("  type = string\n") == "required"
