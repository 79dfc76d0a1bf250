"""Requirements files: what they name and whether that is met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.backends.python.requirements import Requirement, applies, read_requirements, satisfies, unmet

HERE = {"python_version": "3.11", "sys_platform": "linux"}
FILE = """# models need these
numpy>=1.26,<3   # arrays
tokenizers == 0.15.*
uvloop ; sys_platform != 'win32'
-r other.txt
--index-url https://example.invalid/simple
git+https://example.invalid/x.git
requests[socks]>=2 \\
    --hash=sha256:00
thing @ https://example.invalid/thing.whl

Old-Name; python_version < "3.9"
"""


def test_lines_are_named_with_their_numbers_and_what_is_no_package_is_left_to_the_installer() -> None:
    assert [(row.line, row.name, row.specifier, row.marker) for row in read_requirements(FILE)] == [
        (2, "numpy", ">=1.26,<3", ""),
        (3, "tokenizers", "== 0.15.*", ""),
        (4, "uvloop", "", "sys_platform != 'win32'"),
        (8, "requests", ">=2", ""),
        (10, "thing", "", ""),
        (12, "Old-Name", "", 'python_version < "3.9"'),
    ]


@pytest.mark.parametrize("installed", [{}, {"numpy": "2.1.0", "tokenizers": "0.15.2", "uvloop": "1", "requests": "2"}])
def test_what_is_missing_or_too_old_is_unmet(installed: dict[str, str]) -> None:
    names = [row.requirement.name for row in unmet(read_requirements(FILE), installed.get, HERE)]
    assert names == (["thing"] if installed else ["numpy", "tokenizers", "uvloop", "requests", "thing"])


def test_the_installed_version_is_told() -> None:
    (row,) = unmet(read_requirements("numpy<2"), {"numpy": "2.1"}.get, HERE)
    assert (row.installed, row.requirement.text) == ("2.1", "numpy<2")
    assert isinstance(row.requirement, Requirement)


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("1.2.3", "", True),
        ("1.2.3", "==1.2.3", True),
        ("1.2", "==1.2.0", True),
        ("1.10", ">1.9", True),
        ("1.2.3", "!=1.2.3", False),
        ("1.2.3", "==1.2.*", True),
        ("1.3", "==1.2.*", False),
        ("1.3", "!=1.2.*", True),
        ("1.4.5", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("1.5", "~=1.4.2", False),
        ("1.4.9", "~=1.4.2", True),
        ("2.1+cpu", "==2.1", True),
        ("2.1", ">=1,<2", False),
        ("2.1", ">= 1 , <= 3", True),
        ("1.0rc1", ">=1", True),
        ("1.0", "===anything", True),
    ],
)
def test_versions_are_compared(version: str, specifier: str, fits: bool) -> None:
    assert satisfies(version, specifier) is fits


@pytest.mark.parametrize(
    ("marker", "true"),
    [
        ("", True),
        ("python_version >= '3.10'", True),
        ("python_version < '3.10'", False),
        ("sys_platform == 'linux' and python_version > \"3.2\"", True),
        ("sys_platform == 'win32' and python_version > '3.2'", False),
        ("extra == 'gpu'", False),
        ("sys_platform == 'linux' or 1", False),
        ("sys_platform > 'a'", False),
    ],
)
def test_plain_markers_are_judged_and_others_count_as_false(marker: str, true: bool) -> None:
    assert applies(marker, HERE) is true


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    for row in read_requirements(text):
        assert row.name in row.text
        assert satisfies("1.0", row.specifier) in (True, False)


versions = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(versions, versions)
def test_the_comparisons_of_two_versions_agree_with_each_other(one: str, other: str) -> None:
    less, same, more = (satisfies(one, f"{operator}{other}") for operator in ("<", "==", ">"))
    assert [less, same, more].count(True) == 1
    assert satisfies(one, f"<={other}") is (less or same)
    assert satisfies(one, f">={other}") is (more or same)
    assert satisfies(one, f"!={other}") is not same
