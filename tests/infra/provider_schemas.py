"""Schemas of Terraform providers, recovered from the last wheels of the bindings that were generated from them.

A wheel carries a description of every resource: which arguments there are, which are needed, of which type, which are
blocks. That is enough for Terraform to refuse what does not exist. What is not in it (how many of a block, which
arguments exclude each other, allowed values) stays unchecked, and so does what providers changed after those wheels.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
_LINK = re.compile(r"/docs/(?P<kind>resources|data-sources)/(?P<page>[\w-]+)#(?P<attribute>\w+)")
_META = {"connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"}

# The provider's one resource, which is all there is to it: type, name, place, and a body of any shape.
AZAPI: Schema = {
    "resources": {
        "azapi_resource": {
            "attributes": {
                "type": {"type": "string", "required": True},
                "name": {"type": "string"},
                "parent_id": {"type": "string"},
                "location": {"type": "string"},
                "tags": {"type": ["map", "string"]},
                "body": {"type": "dynamic"},
                "response_export_values": {"type": "dynamic"},
                "schema_validation_enabled": {"type": "bool"},
                "ignore_missing_property": {"type": "bool"},
                "id": {"type": "string", "computed": True},
                "output": {"type": "dynamic", "computed": True},
            },
            "blocks": {
                "identity": {
                    "attributes": {
                        "type": {"type": "string", "required": True},
                        "identity_ids": {"type": ["list", "string"]},
                        "principal_id": {"type": "string", "computed": True},
                    },
                    "blocks": {},
                },
                "timeouts": {
                    "attributes": {name: {"type": "string"} for name in ("create", "read", "update", "delete")},
                    "blocks": {},
                },
            },
        },
        "azapi_update_resource": {
            "attributes": {
                "type": {"type": "string", "required": True},
                "resource_id": {"type": "string"},
                "name": {"type": "string"},
                "parent_id": {"type": "string"},
                "body": {"type": "dynamic"},
                "id": {"type": "string", "computed": True},
                "output": {"type": "dynamic", "computed": True},
            },
            "blocks": {},
        },
    },
    "data": {},
}


def wanted_by(folder: Path) -> set[tuple[str, str]]:
    """("resource" or "data", type) of all that the Terraform files below a folder name."""
    pattern = re.compile(r'^(resource|data) "(\w+)"', re.MULTILINE)
    return {match for path in folder.rglob("*.tf") for match in pattern.findall(path.read_text())}


def of_wheel(wheel: Path, provider: str, wanted: Iterable[tuple[str, str]]) -> Schema:
    """The schemas of the resources and data sources wanted. Raises KeyError for one that the provider does not have."""
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(archive.read(name))) as packed:
        member = packed.extractfile("package/.jsii")
        assert member is not None
        types: dict[str, Any] = json.loads(member.read())["types"]
    configurations = {
        fqn.rpartition(".")[2].removesuffix("Config").lower(): fqn
        for fqn, entry in types.items()
        if fqn.endswith("Config") and entry["kind"] == "interface" and "interfaces" in entry
    }
    schema: Schema = {"resources": {}, "data": {}}
    for kind, type_name in sorted(wanted):
        if not type_name.startswith(f"{provider}_"):
            continue
        words = type_name.removeprefix(f"{provider}_").replace("_", "")
        key = f"data{provider}{words}" if kind == "data" else words
        fqn = configurations.get(key)
        if fqn is None:
            raise KeyError(f"{provider} has no {kind} {type_name}")
        block = _block(types, fqn)
        for attribute, described in _computed(types, fqn.removesuffix("Config")).items():
            if attribute not in block["blocks"]:
                block["attributes"].setdefault(attribute, described)
        schema["data" if kind == "data" else "resources"][type_name] = block
    return schema


def _block(types: dict[str, Any], fqn: str) -> Schema:
    attributes: Schema = {}
    blocks: Schema = {}
    for each in types[fqn].get("properties", ()):
        docs = each.get("docs", {})
        link = _LINK.search(docs.get("remarks", "") + docs.get("summary", ""))
        attribute = link["attribute"] if link else _snake(each["name"])
        if attribute in _META and not link:
            continue
        kind = _type(each["type"])
        if isinstance(kind, str) and kind in types:
            blocks[attribute] = _block(types, kind)
        else:
            optional = bool(each.get("optional"))
            attributes[attribute] = {"type": kind, "required": not optional, "computed": optional and attribute == "id"}
    return {"attributes": attributes, "blocks": blocks}


def _computed(types: dict[str, Any], fqn: str) -> Schema:
    """What only the provider says: the resource's own properties besides its arguments and their echoes."""
    found: Schema = {}
    for each in types[fqn].get("properties", ()):
        if each.get("static") or each["name"].endswith("Input"):
            continue
        kind = _type(each["type"])
        plain = not (isinstance(kind, str) and "." in kind)
        found[_snake(each["name"])] = {"type": kind if plain else "dynamic", "computed": True}
    return found


def _type(described: dict[str, Any]) -> Any:
    """Terraform's type, or the name of a nested structure."""
    if "primitive" in described:
        return {"string": "string", "number": "number", "boolean": "bool"}.get(described["primitive"], "dynamic")
    if "collection" in described:
        of = described["collection"]
        element = _type(of["elementtype"])
        if isinstance(element, str) and "." in element:
            return element  # a block that may be repeated
        return ["map" if of["kind"] == "map" else "list", element]
    if "union" in described:
        kinds = [_type(each) for each in described["union"]["types"]]
        return next(kind for kind in kinds if kind != "cdktf.IResolvable")
    if described.get("fqn") == "cdktf.StringMap":
        return ["map", "string"]
    return described["fqn"]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
