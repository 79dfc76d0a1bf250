"""The documentation runs: README.md and docs/**/*.md keep their word.

A fence says what becomes of its block. `python` blocks of one file run in order, as one program. `bash`, `javascript`,
`java` and `go` blocks run, each by itself, and must succeed. All other languages (`console`, `text`, `json` ...) are
only shown. Where a block speaks of the default ports or of the digits example, it gets a real server's ports and a
fresh build of the example. tests/e2e/test_tutorials.py runs the tutorials, whose blocks are files.
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root in (ROOT / "core", ROOT / "adapters")
    for path in root.rglob("*.py")
    if ">>> " in path.read_text()
)
COMPILED = {"javascript": ("node", "main.mjs"), "java": ("java", "Main.java"), "go": ("go run", "main.go")}
"""Languages that run from a file: the command and the file's name."""
RUN = ("python", "bash", *COMPILED)
SHOWN = ("console", "text", "json", "yaml", "toml", "protobuf", "dockerfile", "mermaid")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\s*$")
LINK = re.compile(r"\]\((?!\w+:)(?P<target>[^)#\s]*)(?:#(?P<heading>[^)\s]+))?\)")
HEADING = re.compile(r"^#+ (?P<words>.+)$", re.MULTILINE)
BLOCK_TIMEOUT_S = 200


class Block(NamedTuple):
    """A fenced block: ``line`` is the 1-based line of its first line of code."""

    language: str
    line: int
    code: str


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, in order. Raises ValueError for a fence that is never closed."""
    language, start, code = "", 0, None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if code is None and fence:
            language, start, code = fence["language"], number + 1, list[str]()
        elif fence and not fence["language"]:
            yield Block(language, start, "\n".join(code or []))
            code = None
        elif code is not None:
            code.append(line)
    if code is not None:
        raise ValueError(f"the fence before line {start} is never closed")


def program_of(blocks: list[Block]) -> str:
    """One program of all blocks, each on the lines it has in the document, so that tracebacks point there."""
    program = ""
    for block in blocks:
        program += "\n" * (block.line - 1 - program.count("\n")) + block.code + "\n"
    return program


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def running(language: str) -> list[Path]:
    documents = [path for path in DOCUMENTS if path.name != "tutorials.md"]
    return [path for path in documents if any(block.language == language for block in blocks_of(path.read_text()))]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Where blocks run; starts the digits server."""
    digits, server = request.getfixturevalue("digits"), request.getfixturevalue("digits_server")
    replacements = {
        "localhost:8000": f"127.0.0.1:{server.http}",
        "localhost:8001": f"127.0.0.1:{server.grpc}",
        "localhost:8002": f"127.0.0.1:{server.metrics}",
        "docs/examples/digits/models": str(digits.models),
        "docs/examples/digits/requests": str(digits.requests),
    }
    environment = request.getfixturevalue("child_environment")
    scripts = request.getfixturevalue("tmp_path")
    remora = scripts / "remora"
    remora.write_text(f"#!{sys.executable}\nimport sys\nfrom remora.cli import main\nsys.exit(main())\n")
    remora.chmod(0o755)
    search = os.pathsep.join([str(scripts), str(Path(sys.executable).parent), environment.get("PATH", "")])
    return Place(replacements, {**environment, "PATH": search})


class Place(NamedTuple):
    """What the blocks' own names stand for on this run, and the environment they run in."""

    replacements: dict[str, str]
    environment: dict[str, str]

    def run(self, command: list[str], code: str, where: str) -> None:
        """Run ``code`` as the command's standard input. Fails the test with what it printed."""
        for written, actual in self.replacements.items():
            code = code.replace(written, actual)
        done = subprocess.run(
            command,
            input=code.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=self.environment,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            pytest.fail(f"{where} ended with status {done.returncode}:\n{done.stdout.decode(errors='replace')}")


@pytest.mark.parametrize("path", running("python"), ids=names_of(running("python")))
def test_the_python_blocks_of_a_document_run_as_one_program(path: Path, place: Place) -> None:
    blocks = [block for block in blocks_of(path.read_text()) if block.language == "python"]
    place.run([sys.executable, "-"], program_of(blocks), str(path.relative_to(ROOT)))


@pytest.mark.parametrize("path", running("bash"), ids=names_of(running("bash")))
def test_the_bash_blocks_of_a_document_run(path: Path, place: Place) -> None:
    blocks = [block for block in blocks_of(path.read_text()) if block.language == "bash"]
    called = {word for block in blocks for word in re.findall(r"^\s*([a-z]+)\b", block.code, re.MULTILINE)}
    for tool in ("bash", *sorted({"cc", "curl"} & called)):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    for block in blocks:
        strict = f'set -euo pipefail\ncurl() {{ command curl --fail-with-body --show-error "$@"; }}\n{block.code}\n'
        place.run(["bash", "-s"], strict, f"{path.relative_to(ROOT)}:{block.line}")


@pytest.mark.parametrize("language", COMPILED)
def test_the_blocks_of_other_languages_run(language: str, place: Place, tmp_path: Path) -> None:
    command, name = COMPILED[language]
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    environment = {**place.environment, "GOCACHE": str(tmp_path / "go"), "GOFLAGS": "-mod=mod"}
    found = [(path, block) for path in running(language) for block in blocks_of(path.read_text())]
    blocks = [(path, block) for path, block in found if block.language == language]
    assert blocks
    for path, block in blocks:
        code = block.code
        for written, actual in place.replacements.items():
            code = code.replace(written, actual)
        (tmp_path / name).write_text(code)
        done = subprocess.run(
            [*command.split(), name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{path.relative_to(ROOT)}:{block.line}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    done = doctest.testmod(importlib.import_module(module))
    assert not done.failed


def test_the_options_reference_is_fresh(child_environment: dict[str, str]) -> None:
    check = [sys.executable, str(ROOT / "docs" / "reference.py"), "--check"]
    done = subprocess.run(check, env=child_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_three_notations_of_the_configuration_page_say_the_same() -> None:
    from remora.config import parse_config

    page = ROOT / "docs" / "configuration.md"
    blocks = {block.language: block.code for block in reversed(list(blocks_of(page.read_text())))}  # the first of each
    text, yaml, json = (
        parse_config(blocks["text"], path="config.pbtxt", syntax="pbtxt"),
        parse_config(blocks["yaml"], path="config.yaml", syntax="yaml"),
        parse_config(blocks["json"], path="config.json", syntax="json"),
    )
    assert text == yaml == json
    assert text.max_batch_size == 16


def test_the_monitoring_page_names_every_metric_and_no_other() -> None:
    metric = r"((?:nv|remora)_[a-z_]+)"
    files = ("management/metrics.py", "statistics/__init__.py")
    sources = [(ROOT / "core" / "remora" / file).read_text() for file in files]
    exported = re.findall(f'"{metric}"', "".join(sources))
    named = re.findall(f"`{metric}`", (ROOT / "docs" / "monitoring.md").read_text())
    # Summaries have names made of parts, and are named by one of them.
    assert sorted(set(named) - {"nv_inference_request_summary_us"}) == sorted(set(exported))


def test_the_configuration_page_names_every_group_of_calls_and_no_other() -> None:
    from remora.protocols.restriction import GROUPS

    page = (ROOT / "docs" / "configuration.md").read_text().partition("| Group | Endpoints |")[2]
    rows = re.findall(r"^\| (`.*`) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(rows))) == sorted(GROUPS)


def test_each_defence_on_the_security_page_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text().partition("| Asset | Attack |")[2].partition("\n\n")[0]
    rows = [row for row in page.splitlines()[2:] if row]
    assert len(rows) > 10
    for row in rows:
        tests = re.findall(r"`(tests/[a-z0-9_/]+\.py)`", row.rpartition("|")[0].rpartition("|")[2])
        assert tests, row
        assert all((ROOT / test).is_file() for test in tests), row


def test_the_troubleshooting_page_quotes_errors_that_the_code_has() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    others = ("No matching distribution", "No module named", "unrecognized arguments")  # of pip, Python, argparse
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "core").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    quoted = [
        each for row in re.findall(r"^\| (`.*?`)[^|]* \|", page, re.MULTILINE) for each in re.findall("`(.*?)`", row)
    ]
    assert len(quoted) > 20
    for error in quoted:
        for piece in re.split(r"\s*\.\.\.\s*", error):
            assert len(piece) < 8 or piece.startswith(others) or piece in joined, f"no error contains {piece!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=names_of(DOCUMENTS))
def test_every_block_says_what_becomes_of_it(path: Path) -> None:
    for block in blocks_of(path.read_text()):
        assert block.language in RUN + SHOWN, f"{path.name}:{block.line - 1}: what is {block.language!r}?"


@pytest.mark.parametrize("path", DOCUMENTS, ids=names_of(DOCUMENTS))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for link in LINK.finditer(path.read_text()):
        target = path.parent / link["target"] if link["target"] else path
        assert target.exists(), f"{path.name}: {link['target']} does not exist"
        if link["heading"]:
            assert link["heading"] in headings_of(target), f"{path.name}: {link[0]} names no heading"


def headings_of(path: Path) -> set[str]:
    """Return the names that links to a document may use: its headings in lower case and hyphens, and its anchors."""
    text = path.read_text()
    words = (heading["words"].lower().replace(" ", "-") for heading in HEADING.finditer(text))
    return {re.sub(r"[^\w-]", "", each) for each in words} | set(re.findall(r'<a id="([\w-]+)">', text))


def test_blocks_come_out_with_language_line_and_code() -> None:
    text = "a\n```python\nx = 1\n\ny = 2\n```\nb\n```text\nz\n```\n"
    assert list(blocks_of(text)) == [Block("python", 3, "x = 1\n\ny = 2"), Block("text", 9, "z")]


def test_a_program_keeps_the_lines_of_its_document() -> None:
    program = program_of([Block("python", 3, "x = 1"), Block("python", 7, "y = 2\nz = 3")])
    assert program.splitlines() == ["", "", "x = 1", "", "", "", "y = 2", "z = 3"]


def test_a_fence_that_stays_open_is_refused() -> None:
    with pytest.raises(ValueError, match="never closed"):
        list(blocks_of("```python\nx = 1\n"))


def test_the_readme_ends_after_two_screens() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 900
    table = page.partition("## Documentation by task")[2].partition("\n## ")[0]
    assert 0 < len(re.findall(r"\]\(", table)) <= 12
