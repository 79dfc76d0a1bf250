"""Scoring scripts, and requests that are sent to them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.process.eventually import eventually
from support.servers.hosting import ask

PLAIN = """
import json, os, time
import numpy

def init():
    global factor
    factor = 2

def run(data):
    value = json.loads(data)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "raise":
        raise ValueError("a reason that only the log has")
    if kind == "none":
        return None
    if kind == "text":
        return "text"
    if kind == "unprintable":
        return numpy.zeros(2)
    if kind == "query":
        return value
    if kind == "wait":
        while not os.path.exists(value["until"]):
            time.sleep(0.005)
    return [factor * number for number in value["data"]]
"""
Case = tuple[str, str, bytes, dict[str, str]]


class Deployed(NamedTuple):
    """A scoring script with a request, and the variables and files of its deployment."""

    script: str
    cases: list[Case]
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


def environment(folder: Path, script: str) -> dict[str, str]:
    return deployed(folder, Deployed(script, []))


def deployed(folder: Path, what: Deployed) -> dict[str, str]:
    for name, text in {"score.py": what.script, **what.files}.items():
        (folder / name).write_text(text)
    (folder / "models").mkdir()
    return {
        **what.variables,
        "AML_APP_ROOT": str(folder),
        "AZUREML_ENTRY_SCRIPT": "score.py",
        "AZUREML_MODEL_DIR": str(folder / "models"),
    }


def wait_until_healthy(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until ``/`` answers 200. Fails the test if the process ends."""
    eventually(lambda: ask(port, "GET", "/").status == 200, process=process)
