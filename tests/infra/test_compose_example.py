"""The compose file of docs/examples/monitoring against the schema of Compose."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make test-infra")
ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".venv-stub" / "wheels"


def test_the_compose_file_matches_the_schema_of_compose() -> None:
    wheels = list(WHEELS.glob("docker_compose-*.whl"))
    if not wheels:
        pytest.skip("the wheel of docker-compose is missing: make test-infra")
    schema = json.loads(zipfile.ZipFile(wheels[0]).read("compose/config/compose_spec.json"))
    document = yaml.safe_load((ROOT / "docs/examples/monitoring/compose.yaml").read_text())
    # The schema is older than the member `name` of a project.
    described = {key: value for key, value in document.items() if key != "name"}
    jsonschema.Draft201909Validator(schema).validate(described)
