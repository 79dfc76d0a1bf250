"""Command `remora models`, which lists and changes a server's repository over V2 [M08-M12]."""

from __future__ import annotations

import argparse
import base64
import json
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from remora.cli.client import HttpClient, call_json, model_path, open_client
from remora.cli.output import UsageError, columns, one_line
from remora.errors import MalformedError, NotFoundError, RemoraError

_INDEX = "/v2/repository/index"
_HEADINGS = ("model", "version", "state", "reason")


def show(options: argparse.Namespace) -> int:
    """Print the repository index. Raises RemoraError, NotFoundError for a model that it lacks."""
    client = open_client(options)
    try:
        entries = _index(client, ready=options.ready)
    finally:
        client.close()
    if options.name is not None:
        entries = [entry for entry in entries if entry["name"] == options.name]
        if not entries:
            raise NotFoundError(f"{client.name} has no {'ready ' if options.ready else ''}model '{options.name}'")
    if options.json_out:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
    elif entries:
        print(columns([_HEADINGS, *map(_row, entries)]))
    else:
        print(f"{client.name} has no {'ready ' if options.ready else ''}models")
    return 0


def load(options: argparse.Namespace) -> int:
    """Load a model and print its versions.

    Raises RemoraError with the server's reason, ConfigError for --config.
    """
    parameters: dict[str, str] = {}
    if options.config is not None:
        from remora.config import read_config, to_json

        parameters["config"] = to_json(read_config(options.config)).decode()
    if options.file and not parameters:
        raise UsageError("--file requires --config: the files replace all files of the model [M11]")
    for path, file in options.file:
        parameters[f"file:{path}"] = base64.b64encode(Path(file).read_bytes()).decode()
    return _change(options, "load", {"parameters": parameters} if parameters else {})


def unload(options: argparse.Namespace) -> int:
    """Unload a model and print its remaining state. Raises RemoraError with the server's reason."""
    return _change(options, "unload", {"parameters": {"unload_dependents": True}} if options.dependents else {})


def _change(options: argparse.Namespace, action: str, document: dict[str, Any]) -> int:
    client = open_client(options)
    try:
        path = model_path(options.name).replace("/v2/", "/v2/repository/", 1)
        try:
            call_json(client, "POST", f"{path}/{action}", document)
        except RemoraError as error:
            if reason := _plain_reason(client, options.name, error.message):
                raise RemoraError(f"{client.name} cannot {action} '{options.name}': {reason}") from None
            for note in _more_reasons(client, options.name, error.message):
                error.add_note(note)
            raise
        entries = [entry for entry in _index(client, ready=False) if entry["name"] == options.name]
    finally:
        client.close()
    print(columns([_HEADINGS, *map(_row, entries)]) if entries else f"{options.name}: {action}ed")
    return 0


def _plain_reason(client: HttpClient, name: str, refusal: str) -> str:
    """Return the reason of a refusal whose protocol's text speaks of polling, "" for others."""
    if "if polling is enabled" in refusal:
        return "this server does not let clients load models: start it with --model-control-mode=explicit"
    if f"'{name}'" not in refusal:
        return ""
    with suppress(RemoraError):
        names = [str(entry["name"]) for entry in _index(client, ready=False)]
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            return f"the repository of this server has no such model{hint}"
    return ""


def _more_reasons(client: HttpClient, name: str, refusal: str) -> list[str]:
    """Return the reasons of a model in the index that a refusal lacks."""
    if f"'{name}'" not in refusal:
        return []
    with suppress(RemoraError):
        entries = _index(client, ready=False)
        reasons = [str(entry["reason"]) for entry in entries if entry["name"] == name and entry.get("reason")]
        return [one_line(reason) for reason in reasons if one_line(reason) not in one_line(refusal)]
    return []


def _index(client: HttpClient, *, ready: bool) -> list[dict[str, Any]]:
    entries = call_json(client, "POST", _INDEX, {"ready": ready} if ready else {})
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        raise MalformedError(f"{client.name} did not answer {_INDEX} with an index: is it a V2 server?")
    return entries


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    cells = [one_line(entry.get(key, "")) for key in ("name", "version", "state", "reason")]
    # A model that was never loaded has only a name.
    return tuple(cell or "-" for cell in cells[:3]) + tuple(cells[3:])
