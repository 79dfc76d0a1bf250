"""The README of each Terraform module, with its inputs and outputs, and the table of values in the chart's README.

usage: python tests/infra/readmes.py    writes them all; tests/infra/test_readmes.py holds them fresh
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

INFRA = Path(__file__).resolve().parents[2] / "infra"
CHART = INFRA / "helm" / "remora"
MODULES = [path.parent for path in sorted(INFRA.rglob("versions.tf"))]
MARK = "## Values\n"


def module_readme(module: Path) -> str:
    """A module's README: what its first comment says, providers, inputs, outputs and examples."""
    name = module.relative_to(INFRA)
    code = "\n".join(path.read_text() for path in sorted(module.glob("*.tf")))
    intro = re.match(r"(?:# .*\n)+", (module / "main.tf").read_text())
    assert intro, f"{name}/main.tf begins with what the module is"
    providers = re.findall(r'source  = "(.+)"\n\s+version = "(.+)"', (module / "versions.tf").read_text())
    (terraform,) = re.findall(r'required_version = "(.+)"', (module / "versions.tf").read_text())
    needs = ", ".join(f"`{source}` {version}" for source, version in providers)
    examples = sorted(path.parent for path in module.glob("examples/*/main.tf"))
    parts = [
        f"# {name}",
        re.sub(r"^# ?", "", intro[0], flags=re.MULTILINE).strip(),
        f"Needs Terraform {terraform} and the providers {needs}. To leave the module out, give its block `count = 0`.",
        "## Inputs",
        "\n".join(["| Name | Type | Default | Description |", "|---|---|---|---|", *inputs(code)]),
        "## Outputs",
        "\n".join(["| Name | Description |", "|---|---|", *outputs(code)]),
        "## Examples",
        "\n".join(f"- [{path.name}](examples/{path.name}): {first_comment(path / 'main.tf')}" for path in examples),
        "The tables are made by `python tests/infra/readmes.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def blocks(code: str, kind: str) -> list[tuple[str, str]]:
    """The blocks of a kind: name and body."""
    found = re.finditer(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', code, re.MULTILINE | re.DOTALL)
    return sorted((match[1], match[2]) for match in found)


def inputs(code: str) -> list[str]:
    return [
        f"| `{name}` | {cell(kind_of(body))} | {default_of(body)} | {described(body)} |"
        for name, body in blocks(code, "variable")
    ]


def outputs(code: str) -> list[str]:
    return [f"| `{name}` | {described(body)} |" for name, body in blocks(code, "output")]


def described(body: str) -> str:
    match = re.search(r'^  description = "(.*)"$', body, re.MULTILINE)
    assert match
    return match[1].replace('\\"', '"').replace("|", "\\|")


def expression(body: str, name: str) -> str | None:
    """The text of an argument of a block, on one line; None where the block lacks it."""
    match = re.search(rf"^  {name}\s+= (.*(?:\n    .*|\n  [)}}\]].*)*)", body, re.MULTILINE)
    return re.sub(r"\s+", " ", match[1]).strip() if match else None


def kind_of(body: str) -> str:
    kind = expression(body, "type")
    assert kind
    # Fields on separate lines have no commas between.
    kind = re.sub(r"(?<=[\w)]) (?=\w+ = )", ", ", kind)
    return (
        re.sub(r"([({]) | (?=[)}])", lambda match: (match[1] or "").strip(), kind)
        .replace("({", "({ ")
        .replace("})", " })")
    )


def default_of(body: str) -> str:
    default = expression(body, "default")
    return "required" if default is None else cell(default)


def cell(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def first_comment(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def chart_readme() -> str:
    """The chart's README with the table of its values; what stands above the table is kept."""
    head = (CHART / "README.md").read_text().partition(MARK)[0]
    rows = ["| Name | Default | Description |", "|---|---|---|"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    comments = comments_of((CHART / "values.yaml").read_text())
    for key, value in values.items():
        fields = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) and value else {}
        for name, default in (fields or {key: value}).items():
            said = comments.get(name) or comments.get(key, "")
            rows.append(f"| `{name}` | `{json.dumps(default)}` | {said} |")
    return head + MARK + "\n" + "\n".join(rows) + "\n\nThe table is made by `python tests/infra/readmes.py`.\n"


def comments_of(text: str) -> dict[str, str]:
    """The comments above the keys of a file of values, by the key's path."""
    found: dict[str, str] = {}
    section, said = "", []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            said.append(line.strip().removeprefix("#").strip())
        elif match := re.match(r"( *)([\w]+):", line):
            section = section if match[1] else match[2]
            path = f"{section}.{match[2]}" if match[1] else section
            if said:
                found[path] = " ".join(said)
            said = []
        else:
            said = []
    return found


def readmes() -> dict[Path, str]:
    """All the files, as they have to be."""
    return {module / "README.md": module_readme(module) for module in MODULES} | {CHART / "README.md": chart_readme()}


if __name__ == "__main__":
    for path, text in readmes().items():
        path.write_text(text)
