"""Requirements files: what they name and whether that is met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.environments.requirements import asks_for_anything, read_requirements, unmet

HERE = {"python_version": "3.11", "sys_platform": "linux"}
FILE = """# models need these
numpy>=1.26,<3   # arrays
tokenizers == 0.15.*
uvloop ; sys_platform != 'win32'
-r other.txt
--index-url https://example.invalid/simple
git+https://example.invalid/x.git
./local/package
requests[socks]>=2 \\
    --hash=sha256:00
thing @ https://example.invalid/thing.whl

Old-Name; python_version < "3.9"
"""


def is_met(line: str, version: str | None = "1.0") -> bool:
    """Return True if a file of one line is met where each package has that version."""
    return not unmet(read_requirements(line), lambda name: version, HERE)


def test_lines_are_named_with_their_numbers_and_other_requirements_are_left_to_the_installer() -> None:
    assert [(row.line, row.name) for row in read_requirements(FILE)] == [
        (2, "numpy"),
        (3, "tokenizers"),
        (4, "uvloop"),
        (9, "requests"),
        (11, "thing"),
        (13, "Old-Name"),
    ]
    assert asks_for_anything("./local/package")
    assert not asks_for_anything("--index-url https://example.invalid/simple\n# nothing")


@pytest.mark.parametrize("installed", [{}, {"numpy": "2.1.0", "tokenizers": "0.15.2", "uvloop": "1", "requests": "2"}])
def test_what_is_missing_or_too_old_is_unmet(installed: dict[str, str]) -> None:
    names = [row.requirement.name for row in unmet(read_requirements(FILE), installed.get, HERE)]
    assert names == (["thing"] if installed else ["numpy", "tokenizers", "uvloop", "requests", "thing"])


def test_an_unmet_line_comes_with_its_text_and_the_installed_version() -> None:
    (row,) = unmet(read_requirements("numpy<2"), {"numpy": "2.1"}.get, HERE)
    assert (row.installed, row.requirement.text) == ("2.1", "numpy<2")


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
        ("1.0rc1", ">=1", False),
        ("1.0rc1", ">=1.0rc1", True),
        ("2.1.0rc1", ">=2.0", True),
        ("1.0.post1", ">1.0", False),
        ("1!1.0", ">2", True),
        ("1.0", "===anything", False),
        ("built by hand", ">=1", False),
        ("built by hand", "", True),
    ],
)
def test_versions_are_compared(version: str, specifier: str, fits: bool) -> None:
    assert is_met(f"thing{specifier}", version) is fits


@pytest.mark.parametrize(
    ("marker", "true"),
    [
        ("python_version >= '3.10'", True),
        ("python_version < '3.10'", False),
        ("python_version >= '3.9'", True),
        ("sys_platform == 'linux' and python_version > \"3.2\"", True),
        ("sys_platform == 'win32' and python_version > '3.2'", False),
        ("sys_platform == 'win32' or python_version > '3.2'", True),
        ("sys_platform == 'win32' or (python_version < '3.2' and os_name == 'posix')", False),
        ("extra == 'gpu'", False),
        ("'linux' in sys_platform", True),
    ],
)
def test_a_line_counts_where_its_marker_is_true(marker: str, true: bool) -> None:
    assert is_met(f"thing; {marker}", version=None) is not true


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    for row in read_requirements(text):
        assert row.name in row.text
        assert isinstance(unmet([row], {row.name: "1.0"}.get), list)


versions = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(versions, versions)
def test_the_comparisons_of_two_versions_agree_with_each_other(one: str, other: str) -> None:
    less, same, more = (is_met(f"thing{operator}{other}", one) for operator in ("<", "==", ">"))
    assert [less, same, more].count(True) == 1
    assert is_met(f"thing<={other}", one) is (less or same)
    assert is_met(f"thing>={other}", one) is (more or same)
    assert is_met(f"thing!={other}", one) is not same
