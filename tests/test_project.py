"""The rules of the house that no other tool checks: names, openings, who reads clock and environment, records."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import LONG_FILES
from support.process.makefiles import described, included, make_text

ROOT = Path(__file__).resolve().parent.parent
SOURCE = sorted(
    path for root in ("core", "adapters") for path in (ROOT / root).rglob("*.py") if not path.stem.endswith("_pb2")
)
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager", "handler", "factory", "service"}
# The API that models import by this name is Triton's, not ours.
TRITONS_NAMES = {"triton_python_backend_utils"}

# Each acts in one place, so that everything else can be tested with an argument instead (docs/architecture.md).
READS_ENVIRONMENT = (
    "core/remora/server/main.py",
    "core/remora/cli",
    "core/remora/system/",
    "core/remora_tools/",
    "core/remora_llm/export_llm.py",
    "adapters/",
)
# A backend stamps the phases of a run, so backends may read the time as well.
READS_CLOCK = (
    "core/remora/system/clock.py",
    "core/remora/backends/",
    "core/remora/cli",
    "core/remora/server/",
    "core/remora_llm/backends/",
    "core/remora_llm/routes/",
    "core/remora_runtimes/",
    "core/remora_tools/",
    "adapters/",
)
STARTS_THREADS = (
    "core/remora/scheduling/running.py",
    "core/remora/scheduling/expiry.py",
    "core/remora/scheduling/thread_dispatch.py",
    "core/remora/scheduling/sequences/scheduler.py",
    "core/remora/models/loads.py",
    "core/remora_tools/rollout/releases.py",
    "core/remora_tools/rollout/shadowing.py",
    "core/remora/models/on_demand.py",
    "core/remora/models/polling.py",
    "core/remora/tracing/writer.py",
    "core/remora/management/export.py",
    # The only place where a language model's steps run.
    "core/remora_llm/generation/task_book.py",
    "core/remora_llm/backends/vllm/engine.py",
    "core/remora/server/",
    # The load of a server's models, and the work of commands that Ctrl-C interrupts.
    "core/remora/system/threads.py",
    # Coroutines of decoupled models run on between executions, as in Triton; that takes a loop, and a thread for it.
    "core/remora/backends/python/coroutines.py",
    "core/remora/functions/runtime.py",
    # It says that an engine is still being built, while the call that builds it takes minutes.
    "core/remora/backends/onnxruntime/engine_cache.py",
    # One keeps each worker process, and ends with it; the others hand on streams whose clients may be slow.
    "core/remora/backends/worker/",
    # A function waits in a call of the Runtime API, which therefore stands beside the checks.
    "adapters/remora_deploy/emulate/lambda_runtime.py",
    # The conformance kit plays the engine.
    "core/remora/testing/",
    "core/remora_llm/testing.py",
)
MAKES_REQUESTS = (
    "core/remora/system/http_client.py",
    # The copies of requests keep a connection for each thread and must be cheap.
    "core/remora_tools/rollout/shadow_targets.py",
    # The Runtime API has no timeout between events and takes trailers, which no other server gets.
    "adapters/remora_adapters/aws_lambda/streaming.py",
)
MANY_ATTRIBUTES = 38
"""Number of classes with more than 12 attributes. It goes down only."""
HOT_MACHINES = (
    # The state of a connection or a stream, which each frame and each message reads.
    "core/remora/protocols/http2/connection.py:Http2",
    "core/remora/server/grpc/stream.py:InferStream",
    "core/remora/server/http/http1.py:Connection",
)
HTTP_CLIENTS = {"http.client", "urllib.request", "urllib3", "requests", "httpx", "aiohttp"}
CLOCK = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"}
GENERATOR = "1.62.3"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def attributes_of(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Which of a module's attributes a file uses, and in which line; however it imports them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == module:
            yield from ((alias.name, node.lineno) for alias in node.names)


def uses(module: str, attributes: set[str], allowed: tuple[str, ...]) -> list[str]:
    """Where a source file outside the allowed places uses one of a module's attributes."""
    return [
        f"{name_of(path)}:{line}: {module}.{attribute}"
        for path in SOURCE
        if not name_of(path).startswith(allowed)
        for attribute, line in attributes_of(ast.parse(path.read_text()), module)
        if attribute in attributes
    ]


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold code: docstrings, comments, blank lines and imports are not counted."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prose.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


@pytest.mark.parametrize("path", SOURCE, ids=map(name_of, SOURCE))
def test_a_module_opens_with_what_it_is(path: Path) -> None:
    opening = ast.get_docstring(ast.parse(path.read_text()))
    assert opening, f"{name_of(path)} has no docstring"
    assert len(opening.splitlines()[0]) > 20, f"{name_of(path)}: the first line says too little"


@pytest.mark.parametrize("path", SOURCE, ids=map(name_of, SOURCE))
def test_a_name_says_what_the_module_does(path: Path) -> None:
    if path.stem not in TRITONS_NAMES:
        assert not VAGUE & set(path.stem.split("_")), f"{name_of(path)}: a vague name hides a vague job"


@pytest.mark.parametrize("path", SOURCE, ids=map(name_of, SOURCE))
def test_a_module_has_at_most_400_lines_of_code(path: Path) -> None:
    lines = lines_of_code(path.read_text())
    assert lines <= 400, f"{name_of(path)} has {lines} lines of code: split it by subject"


def test_the_server_without_its_plug_ins_has_at_most_72_000_lines() -> None:
    """Measures only; what is not needed to serve belongs into another package (docs/decisions/0050)."""
    lines = [path.read_text().count("\n") for path in SOURCE if path.is_relative_to(ROOT / "core" / "remora")]
    assert sum(lines) <= 72_000


@pytest.mark.parametrize("path", TEST_FILES, ids=map(name_of, TEST_FILES))
def test_a_test_file_has_at_most_600_lines(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 600, f"{name_of(path)} has {lines} lines: split it by subject"


def test_prose_and_imports_do_not_count_as_code() -> None:
    prose = '"""Title.\n\nText.\n"""\n\nimport os\n\n\n'
    code = 'def name() -> str:\n    """Return the name."""\n    # A reason.\n    return (\n        os.name\n    )\n'
    assert lines_of_code(prose + code) == 4


def test_the_environment_is_read_where_the_process_starts() -> None:
    assert not uses("os", {"environ", "getenv", "putenv"}, READS_ENVIRONMENT)


def test_the_clock_is_read_in_one_place() -> None:
    assert not uses("time", CLOCK, READS_CLOCK)


def test_no_test_sleeps_but_in_eventually() -> None:
    """Clients that run in another process are not tests."""
    others = ("tests/support/process/eventually.py", "tests/oracle/", "tests/deploy/emulate/faulty_")
    found = [
        f"{name_of(path)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not name_of(path).startswith(others)
        for name, line in attributes_of(ast.parse(path.read_text()), "time")
        if name == "sleep"
    ]
    assert not found, "wait with tests/support/process/eventually.py"


def test_threads_start_in_named_places() -> None:
    assert not uses("threading", {"Thread", "Timer"}, STARTS_THREADS)


def test_http_requests_are_made_in_named_places() -> None:
    found = {
        name_of(path)
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", "") or "", *(alias.name for alias in node.names))
        if name in HTTP_CLIENTS or (isinstance(node, ast.ImportFrom) and f"{node.module}.{name}" in HTTP_CLIENTS)
    }
    assert found == set(MAKES_REQUESTS)


def attributes_of_instances(node: ast.ClassDef) -> set[str]:
    """Return the attributes of instances: the fields of a dataclass, and what methods assign."""
    names = set()
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        names |= {
            each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and type(each.target) is ast.Name
        }
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        own = method.args.args[0].arg
        names |= {
            each.attr
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            if isinstance(each.value, ast.Name) and each.value.id == own
        }
    return names


def has_state(node: ast.ClassDef) -> bool:
    """Return False for contracts and records, whose fields are a schema and not state."""
    contract = {"Protocol", "NamedTuple", "TypedDict", "Enum"}
    if contract & {ast.unparse(base).partition("[")[0] for base in node.bases}:
        return False
    marks = [ast.unparse(each) for each in node.decorator_list if "dataclass" in ast.unparse(each)]
    methods = any(isinstance(each, ast.FunctionDef) for each in node.body)
    return not marks or (methods and not any("frozen=True" in mark for mark in marks))


def test_few_classes_have_more_than_12_attributes_and_none_more_than_20() -> None:
    found = {
        f"{name_of(path)}:{node.name}": len(attributes)
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and has_state(node)
        if len(attributes := attributes_of_instances(node)) > 12
    }
    assert len(found) <= MANY_ATTRIBUTES, sorted(found.items(), key=lambda row: row[1])
    largest = {name: count for name, count in found.items() if count > 20}
    assert largest.keys() <= set(HOT_MACHINES), "parts that change together are an object with a name of the field"


def test_state_and_records_are_told_apart() -> None:
    text = """
@dataclass(frozen=True)
class Options:
    a: int
    def of(cls): ...
class Row(NamedTuple):
    a: int
class Machine:
    __slots__ = ("a", "b")
    def __init__(self): self.a, self.b.c = 1, 2
    def step(me): me.d += 1
@dataclass
class Run:
    a: int
    def step(self): self.b = 1
"""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes if has_state(node)] == ["Machine", "Run"]
    assert [attributes_of_instances(node) for node in classes[2:]] == [{"a", "d"}, {"a", "b"}]


def test_source_roots_and_tests_are_not_packages() -> None:
    roots = [ROOT / "core", ROOT / "adapters", ROOT / "tests"]
    strays = [root / "__init__.py" for root in roots[:2] if (root / "__init__.py").exists()]
    assert not strays + list(roots[2].rglob("__init__.py"))


@pytest.mark.parametrize("path", RECORDS, ids=map(name_of, RECORDS))
def test_a_decision_record_says_its_number_context_decision_reason_and_price(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {path.name[:4]}: ")
    parts = re.findall(r"^\*\*(Context|Decision|Because|We give up)\.\*\*", text, re.MULTILINE)
    assert parts == ["Context", "Decision", "Because", "We give up"]


def test_decision_records_are_numbered_without_gaps_or_repeats() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == [*range(1, len(RECORDS) + 1)]


def dependencies(*leave_out: str) -> set[str]:
    """The names of all packages that the project asks for, those of some extras left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra: lines for extra, lines in project["optional-dependencies"].items() if extra not in leave_out}
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    return {re.split(r"[\[<>=;! ]", line)[0] for line in wanted} - {"remora"}


def test_every_dependency_has_a_line_that_says_why() -> None:
    record = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    assert not {name for name in dependencies() if f"| `{name}` |" not in record}


def test_every_dependency_that_make_installs_has_an_exact_version() -> None:
    locked = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = ("gpu", "torch", "tensorrt", "trees", "openvino", "openvino-genai", "vllm", "tensorflow", "sagemaker-sdk")
    assert not {name.lower() for name in dependencies(*extras)} - locked


def test_the_changelog_tells_of_this_version() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "core" / "remora" / "_version.py").read_text())
    assert version
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_has_at_most_80_lines_for_a_version() -> None:
    head, *versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert versions
    for each in versions:
        assert len(f"{head}{each}".splitlines()) <= 80, (
            f"{each.splitlines()[0]}: one line for each theme, not each change"
        )


def test_the_files_that_begin_first_exist() -> None:
    assert [name for name in LONG_FILES if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.parametrize("target", ["serve", "test", "check", "fmt", "bench", "venv", "clean", "proto", "test-oracle"])
def test_the_promised_make_targets_exist(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_help_shows_at_most_fifteen_targets_and_help_all_shows_each_once() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    first, every = (
        subprocess.run(["make", "--silent", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for target in ("help", "help-all")
    )
    listed, all_listed = (re.findall(r"^([a-z-]+)  ", text, re.MULTILINE) for text in (first, every))
    assert {"serve", "test", "help-all"} <= set(listed)
    assert len(listed) <= 15
    assert sorted(all_listed) == sorted(set(described(make_text())))
    assert f"make help-all lists the {len(all_listed) - len(listed)} targets" in first


def test_targets_with_programs_of_other_projects_are_in_included_files() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"\$\(VENV\)-([a-z-]+)/stamp:", makefile)) == {"docs", "proto"}
    assert set((ROOT / "tests").rglob("*.mk")) == set(included())


def test_the_paths_that_makefiles_name_exist() -> None:
    named = set(re.findall(r"(?<![\w./-])((?:tests|docs|\.ci)/[\w./-]*\w)", make_text()))
    made = {"docs/examples/digits/models", "docs/examples/digits/requests", "docs/examples/sentence-embedding/models"}
    made |= {"docs/examples/chat/models", "docs/examples/chat/others"}
    assert len(named) > 50
    assert sorted(path for path in named - made if not list(ROOT.glob(f"{path}*"))) == []


def test_the_targets_that_ci_does_not_run_are_listed() -> None:
    prerequisites = {
        name: set(rest.split()) for name, rest in re.findall(r"^([a-z-]+):(.*?)##", make_text(), re.MULTILINE)
    }
    script = re.sub(r"#.*|\\\n", "", (ROOT / ".ci" / "run").read_text())
    reached = {word for line in re.findall(r"make (--.*)", script) for word in line.split()} & prerequisites.keys()
    while more := {name for each in reached for name in prerequisites[each]} & prerequisites.keys() - reached:
        reached |= more
    assert {"unit", "test-kserve", "test-browser"} <= reached
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Tests that CI does not run")[2].partition("## ")[0]
    listed = set(re.findall(r"^\| `make ([a-z-]+)`", section, re.MULTILINE))
    assert listed <= prerequisites.keys() - reached
    assert {name for name in prerequisites.keys() - reached if name.startswith("test-")} <= listed


def test_the_generated_messages_are_fresh(tmp_path: Path) -> None:
    python = ROOT / ".venv-proto" / "bin" / "python"
    if not python.exists():
        if "grpcio-tools" not in {each.name for each in importlib.metadata.distributions()}:
            pytest.skip(f"grpcio-tools {GENERATOR} is not installed: make proto")
        if importlib.metadata.version("grpcio-tools") != GENERATOR:
            pytest.skip(
                f"the messages are generated by grpcio-tools {GENERATOR}, another version is installed: make proto"
            )
        python = Path(sys.executable)
    subprocess.run([python, ".ci/proto.py", str(tmp_path)], cwd=ROOT, check=True)
    for fresh in (tmp_path / "remora" / "proto").iterdir():
        committed = ROOT / "core" / "remora" / "proto" / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{committed.name} is stale: make proto"
