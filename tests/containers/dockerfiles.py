"""Dockerfiles as data: their stages, and the configuration (OCI) that their last words make."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from remora_deploy.images import IMAGES

ROOT = Path(__file__).parents[2]
FILES = {path.parent.name: path for path in sorted((ROOT / "containers").glob("*/Dockerfile"))}


class Instruction(NamedTuple):
    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """A Dockerfile's instructions, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def stages(name: str) -> list[list[Instruction]]:
    """The stages of an image's build, each from its FROM on; the first list is what stands before them."""
    split: list[list[Instruction]] = [[]]
    for each in instructions(FILES[name].read_text()):
        if each.word == "FROM":
            split.append([])
        split[-1].append(each)
    return split


def last(name: str, word: str) -> str | None:
    """What the last such instruction of an image's final stage says."""
    said = [each.rest for each in stages(name)[-1] if each.word == word]
    return said[-1] if said else None


def configuration(image: str) -> dict[str, Any]:
    """What an engine would make of an image's final stage, on a base that says nothing but where its programs are."""
    name = IMAGES[image].platform
    pairs = [pair for each in stages(name)[-1] if each.word == "ENV" for pair in each.rest.split()]
    path, devices = "/usr/local/bin:/usr/bin:/bin", IMAGES[image].build_arguments().get("DEVICES", "void")
    return {
        "Env": [pair.replace("$PATH", path).replace("${DEVICES}", devices) for pair in pairs],
        "WorkingDir": last(name, "WORKDIR"),
        "User": last(name, "USER") or "",
        "Entrypoint": json.loads(last(name, "ENTRYPOINT") or "[]"),
        "Cmd": json.loads(last(name, "CMD") or "[]"),
    }
