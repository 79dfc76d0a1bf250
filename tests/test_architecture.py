"""docs/architecture.md and the map of the packages against the tree."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest

from remora import plugins
from remora.server.host import find_adapter

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"`(?P<path>(?:core|adapters|tests|docs)/[\w./-]+)`")
ANSWER = re.compile(r"^\| [^|]+\? \| `(?P<module>[\w.]+)(?::(?P<name>[\w.]+))?` \|$", re.MULTILINE)
CORE = ROOT / "core" / "remora"
TEST_ROOTS = {
    "core": CORE,
    "llm": ROOT / "core" / "remora_llm",
    "runtimes": ROOT / "core" / "remora_runtimes",
    "tools": ROOT / "core" / "remora_tools",
    "deploy": ROOT / "adapters" / "remora_deploy",
}
"""Packages by the folder of their tests."""
PARTS = {
    *(row.target for row in (*plugins.BACKENDS.values(), *plugins.COMMANDS.values(), *plugins.ROUTES)),
    *plugins.HOSTS.values(),
    *plugins.METRICS,
    plugins.ANSWERS,
    plugins.BATCHES,
    *plugins.CACHES.values(),
    *plugins.METRIC_SINKS.values(),
    plugins.SPAN_SINK,
    plugins.CAPTURE,
    plugins.RELEASES,
    plugins.SHADOWS,
    plugins.LOG_EXPORT,
}
"""Parts of all packages that the tables of `remora.plugins` name."""
PACKAGES = (*(folder.name for folder in TEST_ROOTS.values()), "remora_adapters")


@pytest.fixture(scope="module")
def imports() -> Mapping[str, set[str]]:
    """Which module imports which, imports for types included: a reader follows them, too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_plug_ins_import_only_the_modules_that_their_page_lists(imports: Mapping[str, set[str]]) -> None:
    table = (ROOT / "docs" / "plugins.md").read_text().partition("## Modules to import")[2]
    listed = set(re.findall(r"`(remora(?:\.\w+)*)`", table))
    used: dict[str, str] = {}
    for module in imports:
        if module.partition(".")[0] in PACKAGES[1:]:
            used |= {name: module for name in imports[module] if name.partition(".")[0] == "remora"}
    assert {name: module for name, module in used.items() if name not in listed | {"remora._version"}} == {}
    assert len(used) <= 60


def circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of more than one module (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in imports:
        work = [(root, iter(sorted(imports[root])))] if root not in index else []
        while work:
            module, targets = work[-1]
            if module not in index:
                index[module] = low[module] = len(index)
                stack.append(module)
            for target in targets:
                if target not in index:
                    work.append((target, iter(sorted(imports.get(target, ())))))
                    break
                if target in stack:
                    low[module] = min(low[module], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    component = stack[stack.index(module) :]
                    del stack[stack.index(module) :]
                    if len(component) > 1:
                        yield sorted(component)


def test_no_modules_import_each_other_in_a_circle(imports: Mapping[str, set[str]]) -> None:
    assert list(circles(imports)) == []


def test_a_circle_of_imports_would_be_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert list(circles(imports)) == [["a", "b", "c"]]


def test_the_layer_contract_has_at_most_sixteen_rows() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    assert len(layers) <= 16
    assert "\n".join(layers) in PAGE.read_text()


def test_the_top_level_shows_packages_and_at_most_fourteen_files() -> None:
    files = sorted(path.name for path in CORE.glob("*.py"))
    assert len(files) <= 14, files


@pytest.mark.parametrize("path", sorted({match["path"] for match in FILE.finditer(PAGE.read_text())}))
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("answer", list(ANSWER.finditer(PAGE.read_text())), ids=lambda answer: str(answer["module"]))
def test_a_question_leads_to_code_that_exists(answer: re.Match[str]) -> None:
    found: object = importlib.import_module(answer["module"])
    for name in (answer["name"] or "").split(".") if answer["name"] else ():
        found = getattr(found, name)


def test_every_question_of_the_page_has_an_answer_in_code() -> None:
    table = PAGE.read_text().partition("## Where to find it")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 30
    assert [row for row in rows if not ANSWER.fullmatch(row)] == []


def test_each_table_of_plug_ins_is_the_answer_to_a_question() -> None:
    answers = {match["name"] for match in ANSWER.finditer(PAGE.read_text()) if match["module"] == "remora.plugins"}
    assert {"ROUTES", "COMMANDS", "BACKENDS", "METRICS", "HOSTS"} <= answers


@pytest.mark.parametrize("target", sorted(PARTS))
def test_each_row_names_a_part_that_is_there(target: str) -> None:
    assert plugins.is_present(target)
    assert plugins.load(target) is not None


@pytest.mark.parametrize("name", plugins.HOSTS)
def test_every_platform_has_an_adapter_with_a_host(name: str) -> None:
    assert callable(find_adapter(name).host)


def test_the_page_ends_after_two_pages() -> None:
    assert len(PAGE.read_text().split()) <= 1700


def module_of_test(path: Path) -> Path | None:
    """Return the module that a test file belongs to: the longest name at the same place that begins its own."""
    root, *parts = path.relative_to(ROOT / "tests").parent.parts
    folder = TEST_ROOTS[root].joinpath(*parts)
    words = path.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        name = "_".join(words[:count])
        if (folder / f"{name}.py").exists() or (folder / name).is_dir():
            return folder / name
        if name == folder.name and (folder / "__init__.py").exists():
            return folder
    return None


TESTS = sorted(path for root in TEST_ROOTS for path in (ROOT / "tests" / root).rglob("test_*.py"))


@pytest.mark.parametrize("path", TESTS, ids=[str(path.relative_to(ROOT)) for path in TESTS])
def test_a_test_file_has_the_place_and_name_of_its_module(path: Path) -> None:
    assert module_of_test(path), f"{path.relative_to(ROOT)}: no module at that place has that name"


def sentences_read_as_states(text: str) -> Iterator[str]:
    """Yield the conditions that depend on the reason of a version's state, which is text for people."""
    for node in ast.walk(ast.parse(text)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operands = [node.operand]
        for operand in operands:
            is_reason = isinstance(operand, ast.Attribute) and operand.attr == "reason"
            is_row = is_reason and ast.unparse(operand) in ("row.reason", "version.reason", "state.reason")
            if is_row or (isinstance(operand, ast.Constant) and operand.value == "unloaded"):
                yield ast.unparse(node)


@pytest.mark.parametrize("package", ["core", "adapters"])
def test_no_code_reads_a_versions_state_out_of_a_sentence(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): conditions
        for path in sorted((ROOT / package).rglob("*.py"))
        if (conditions := list(sentences_read_as_states(path.read_text())))
    }
    assert not found


@pytest.mark.parametrize(
    "condition",
    ["row.reason == UNLOADED", "not row.reason", "entry.why != 'unloaded'", "row.reason in ('', 'unknown')"],
)
def test_a_state_read_out_of_a_sentence_would_be_found(condition: str) -> None:
    assert list(sentences_read_as_states(f"if {condition}: pass")) == [condition]
