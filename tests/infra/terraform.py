"""Terraform as the tests call it: each module in a separate copy, providers real or stubbed, away from any cloud."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
INFRA = ROOT / "infra"
MODULES = {str(path.parent.relative_to(INFRA)): path.parent for path in sorted(INFRA.rglob("versions.tf"))}


class Prepared(NamedTuple):
    """An initialised copy of a module, and the environment that Terraform runs in."""

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return terraform(*arguments, folder=self.folder, environment=self.environment)


class Verdict(NamedTuple):
    """A module whose own tests ran once, and what Terraform said of them: events, in order."""

    prepared: Prepared
    done: subprocess.CompletedProcess[str]

    def events(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in self.done.stdout.splitlines())

    def resources(self, file: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """What the runs of a test file plan or make: run, address, values (what is not known yet is left out)."""
        assert self.done.returncode == 0, self.done.stderr
        for event in self.events():
            if event.get("@testfile") != f"tests/{file}":
                continue
            run = event.get("@testrun", "")
            for change in event.get("test_plan", {}).get("resource_changes", ()):
                yield run, change["address"], change["change"]["after"] or {}
            state = event.get("test_state", {})
            for made in state.get("root_module", state.get("values", {}).get("root_module", {})).get("resources", ()):
                yield run, made["address"], made["values"]


def mirrored(mirror: Path | None, settings: Path) -> dict[str, str]:
    """The environment to run Terraform in: away from any account, providers out of a mirror and nowhere else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "AWS_"))}
    place = f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n'
    settings.write_text(place if mirror else "")
    return environment | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": str(settings)}


def terraform(*arguments: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["terraform", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def providers(module: str) -> set[str]:
    """The names of the providers that a module needs."""
    return set(
        re.findall(r"^    (\w+) = \{\n      source", (MODULES[module] / "versions.tf").read_text(), re.MULTILINE)
    )
