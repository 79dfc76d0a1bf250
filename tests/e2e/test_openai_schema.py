"""Published schema of OpenAI's routes, with bad input that schemathesis makes of it in a separate environment.

`make test-openai` creates the environment; without it the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RunningServer, Serving
from generation_models import ROOT, tiny

TOOL = Path(os.environ.get("SCHEMATHESIS", ROOT / ".venv-schemathesis" / "bin" / "st"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
"""Not positive_data_acceptance, because the schema allows combinations that the routes refuse by name."""
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    tiny(models)
    with serving(models, "--openai", "--allow-grpc=false") as made:
        yield made


def test_no_request_made_of_the_schema_is_a_fault_of_the_server(server: RunningServer, tmp_path: Path) -> None:
    if not TOOL.exists():
        pytest.skip(f"{TOOL} is missing: run make test-openai")
    base = f"http://127.0.0.1:{server.http}"
    command = [TOOL, "run", f"{base}/v1/openapi.json", "--url", base, "--checks", ",".join(CHECKS), "--seed", "1"]
    more = ["--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--no-color"]
    run = subprocess.run(
        [*command, *more],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(ROOT / "tests")},
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
