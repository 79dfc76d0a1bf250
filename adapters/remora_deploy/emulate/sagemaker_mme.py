"""Emulator of an Amazon SageMaker multi-model endpoint, which loads and unloads models.

The platform unpacks an archive below its root, gives it an opaque name, and calls the container's API to load it. On a
507 it unloads other models and tries again; on a 409 it takes the model as loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from remora.api.storage import unpack
from remora.errors import ConfigError
from remora.system.json_text import read_json
from remora_deploy.emulate import Check, EmulateSettings, Failed, Inapplicable, Launch, Platform, Probe, Skipped
from remora_deploy.emulate.asking import HttpReply
from remora_deploy.emulate.container import must_answer
from remora_deploy.emulate.sagemaker import END, GRACE_S, LISTENERS, PING_S, START, launch
from remora_deploy.emulate.stage import Stage

TARGET = "X-Amzn-SageMaker-Target-Model"
_FIRST, _SECOND, _THIRD = "a" * 32, "b" * 32, "c" * 32
_LOAD_S = 360.0
_CYCLES = 6
_LARGE_BYTES = 4 << 20
_JSON = {"Content-Type": "application/json"}


def launch_many(settings: EmulateSettings, port: int, mounts: Path) -> Launch:
    """Return the launch, with the archive unpacked twice below the root and not loaded."""
    root = mounts / "models"
    root.mkdir()
    if settings.model is not None:
        _unpack(settings.model, root / _FIRST / "model")
        _unpack(settings.model, root / _SECOND / "model")
    if "oom-model" in settings.given:
        _unpack(Path(settings.given["oom-model"]), root / _THIRD / "model")
    return launch(EmulateSettings(), port, mounts, SAGEMAKER_MULTI_MODEL="true")


def _unpack(archive: Path, place: Path) -> None:
    """Place the archive's files, as hard links where possible because models are large."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(archive, place, copy_function=link_or_copy)


def api(stage: Stage, port: int) -> AbstractContextManager[object]:
    """Serve the SageMaker Runtime API.

    A TargetModel is an archive or a folder below ``--with archives=DIR``. Raises ValueError without that folder.
    """
    from remora_deploy.emulate.sagemaker_runtime import Endpoint, runtime_api

    if not Path(stage.settings.given.get("archives", "")).is_dir() or "archives" not in stage.settings.given:
        raise ValueError("needs the archives that a TargetModel names: --with archives=DIR")
    archives, taken = Path(stage.settings.given["archives"]).resolve(), Lock()

    def unpack(target: str) -> tuple[str, str]:
        """Unpack a target once under an opaque name, as the platform does.

        Raises OSError or ValueError.
        """
        source = (archives / target.lstrip("/")).resolve()
        if not source.is_relative_to(archives) or source == archives or not source.exists():
            raise FileNotFoundError(f"no archive {target[:200]}")
        name = sha256(os.fsencode(source)).hexdigest()[:32]
        place = stage.mounts / "models" / name / "model"
        with taken:
            if not place.exists():
                _unpack_atomically(source, place)
        return name, str(place)

    objects = Path(stage.settings.given.get("objects", stage.mounts / "objects"))
    return runtime_api(Endpoint(stage.address, objects, unpack), port)


def _unpack_atomically(source: Path, place: Path) -> None:
    """Put an archive's or a folder's files in their place, all or none."""
    part = place.with_name("unpacking")
    shutil.rmtree(part, ignore_errors=True)
    if source.is_dir():
        _unpack(source, part)
    else:
        try:
            unpack(source, part)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    part.rename(place)


def _url(stage: Stage, name: str) -> str:
    """Return the location of a model for the container. Raises Skipped without a model."""
    if name == _FIRST and "url" in stage.settings.given:
        return stage.settings.given["url"]
    if not stage.settings.command or (stage.settings.model is None and name != _THIRD):
        raise Skipped("needs the model's folder and a command to start: --model DIR -- COMMAND")
    return str(stage.mounts / "models" / name / "model")


def _load(stage: Stage, name: str, url: str = "", target: str = "one.tar.gz") -> HttpReply:
    body = json.dumps({"model_name": name, "url": url or _url(stage, name)}).encode()
    return stage.ask("POST", "/models", body, {**_JSON, TARGET: target}, timeout_s=_LOAD_S)


def _unload(stage: Stage, name: str) -> HttpReply:
    return stage.ask("DELETE", f"/models/{name}", timeout_s=_LOAD_S)


def _invoke(stage: Stage, name: str, target: str = "one.tar.gz") -> HttpReply:
    headers = {"Content-Type": stage.settings.content_type, TARGET: target}
    return stage.ask("POST", f"/models/{name}/invoke", stage.body, headers)


def _ensure_loaded(stage: Stage) -> None:
    """Load the first model unless it is loaded."""
    is_loaded = stage.ask("GET", f"/models/{_FIRST}").status == 200
    if not is_loaded and not 200 <= _load(stage, _FIRST).status < 300:
        raise Skipped("the model could not be loaded: see load")


def _expect(answer: HttpReply, status: int, what: str) -> None:
    if answer.status != status:
        raise Failed(f"{what}: {answer.shown}; expected {status}")


def _json_of(answer: HttpReply, what: str) -> Any:
    try:
        return read_json(must_answer(answer, what).body)
    except ValueError as error:
        raise Failed(f"{what} is not JSON: {answer.shown}") from error


# -- the checks -----------------------------------------------------------------------------------------------------


def lists_nothing_at_first(stage: Stage) -> None:
    index = _json_of(stage.ask("GET", "/models"), "GET /models")
    if not isinstance(index, dict) or index.get("models") != []:
        raise Failed(f"GET /models answered {index} before the first load")


def loads(stage: Stage) -> None:
    must_answer(_load(stage, _FIRST), "POST /models")


def shows_what_it_loaded(stage: Stage) -> None:
    _ensure_loaded(stage)
    wanted = {"modelName": _FIRST, "modelUrl": _url(stage, _FIRST)}
    one = _json_of(stage.ask("GET", f"/models/{_FIRST}"), "GET /models/NAME")
    every = _json_of(stage.ask("GET", "/models"), "GET /models")
    rows = every.get("models") if isinstance(every, dict) else None
    for row in (one, *(rows or [{}])):
        if {key: str(row.get(key, "")).rstrip("/") for key in wanted} != wanted:
            raise Failed(f"{row} is shown for the model {wanted}")


def refuses_twice(stage: Stage) -> None:
    _ensure_loaded(stage)
    _expect(_load(stage, _FIRST), 409, "loading a loaded model")


def invokes_by_its_own_name(stage: Stage) -> None:
    _ensure_loaded(stage)
    must_answer(_invoke(stage, _FIRST), "an invocation")
    must_answer(
        _invoke(stage, _FIRST, target="two/other.tar.gz"), "an invocation with another target model in its header"
    )


def knows_what_it_has_not(stage: Stage) -> None:
    for method, path in (("GET", "/models/{}"), ("DELETE", "/models/{}"), ("POST", "/models/{}/invoke")):
        answer = stage.ask(method, path.format("f" * 32), b"{}" if method == "POST" else None, _JSON)
        _expect(answer, 404, f"{method} {path.format('UNKNOWN')}")


def keeps_models_apart(stage: Stage) -> None:
    _ensure_loaded(stage)
    must_answer(_load(stage, _SECOND, target="two.tar.gz"), "POST /models of a second model")
    must_answer(_unload(stage, _SECOND), "DELETE of the second model")
    must_answer(_invoke(stage, _FIRST), "an invocation of the first model after the second was unloaded")


def stays_below_its_root(stage: Stage) -> None:
    _ensure_loaded(stage)
    root = str(stage.mounts / "models")
    for url in ("/etc", "/proc/self", f"{root}/../../etc", f"{root}/{_FIRST}/model/../../.."):
        answer = _load(stage, "d" * 32, url)
        if not 400 <= answer.status < 500:
            raise Failed(f"the url {url} got {answer.shown}")
        if stage.ask("GET", f"/models/{'d' * 32}").status == 200:
            raise Failed(f"the url {url} was loaded")


def refuses_bad_requests(stage: Stage) -> None:
    for body in (b"", b"{", b"[]", b"{}", b'{"model_name": 7}'):
        answer = stage.ask("POST", "/models", body, _JSON)
        if not 400 <= answer.status < 500:
            raise Failed(f"POST /models with {body!r} got {answer.shown}")
    must_answer(stage.ask("GET", "/ping", timeout_s=stage.probe_s), "GET /ping after malformed requests")


def pings_while_loading(stage: Stage) -> None:
    _unload(stage, _FIRST)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(_load, stage, _FIRST)
        pings = [stage.ask("GET", "/ping", timeout_s=stage.probe_s)]
        while not load.done():
            pings.append(stage.ask("GET", "/ping", timeout_s=stage.probe_s))
    if load.result().status != 200:
        raise Skipped("the model could not be loaded: see load and unload")
    bad = [ping for ping in pings if ping.status != 200]
    if bad:
        raise Failed(f"{len(bad)} of {len(pings)} pings while a model was loaded failed, such as: {bad[0].shown}")


def unloads(stage: Stage) -> None:
    _ensure_loaded(stage)
    must_answer(_unload(stage, _FIRST), "DELETE /models/NAME")
    _expect(stage.ask("GET", f"/models/{_FIRST}"), 404, "GET /models/NAME after its DELETE")
    must_answer(_load(stage, _FIRST), "POST /models of the model again")


def gives_memory_back(stage: Stage) -> None:
    model = stage.settings.model
    size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file()) if model else 0
    if size < _LARGE_BYTES:
        raise Inapplicable(f"needs a model of {_LARGE_BYTES >> 20} MiB or more, which this one is not")
    process = stage.process
    _ensure_loaded(stage)
    sizes = []
    for _ in range(_CYCLES):
        must_answer(_unload(stage, _FIRST), "DELETE /models/NAME")
        sizes.append(process.resident_bytes())
        if _load(stage, _FIRST).status != 200:
            raise Skipped("the model could not be loaded again: see load and unload")
    grown = sizes[-1] - sizes[0]
    if grown > (_CYCLES - 1) * size / 2:
        raise Failed(f"after {_CYCLES} unloads the process has {grown >> 20} MiB more than after the first")


def says_when_memory_is_full(stage: Stage) -> None:
    if "oom-model" not in stage.settings.given:
        raise Skipped("needs a model that does not fit into memory: --with oom-model=DIR")
    _expect(_load(stage, _THIRD), 507, "loading a model that does not fit")
    _expect(stage.ask("GET", f"/models/{_THIRD}"), 404, "GET of a model that did not fit")


def _table(*rows: tuple[str, str, str, Callable[[Stage], None]]) -> tuple[Check, ...]:
    return tuple(Check(*row) for row in rows)


MODELS = _table(
    (
        "list-empty",
        "GET /models is empty at first",
        "the platform reads the loaded models there; /ping must answer 200 without a model",
        lists_nothing_at_first,
    ),
    ("load", "POST /models loads a model", "a model's first invocation waits for it", loads),
    (
        "show",
        "GET /models and /models/NAME show modelName and modelUrl",
        "an unlisted model is loaded again, or never unloaded",
        shows_what_it_loaded,
    ),
    (
        "load-again",
        "loading a loaded model gets a 409",
        "another error fails the client's call; 200 hides that the load had no effect",
        refuses_twice,
    ),
    (
        "invoke",
        "models are identified by model_name, not by the target header",
        "the header is the client's path, for logs; the platform routes by the opaque name",
        invokes_by_its_own_name,
    ),
    (
        "unknown",
        "a model that is not loaded gets a 404",
        "on a 404 the platform loads the model",
        knows_what_it_has_not,
    ),
    (
        "apart",
        "two models, even of one archive, are independent",
        "archives of one pipeline often contain the same names",
        keeps_models_apart,
    ),
    (
        "below-root",
        "urls outside the models' root are refused",
        "otherwise any client of the port could read any folder; Triton had to fix this",
        stays_below_its_root,
    ),
    (
        "bad-load",
        "a malformed load request gets a 4xx and does not end the process",
        "one such request ended Triton 2.51",
        refuses_bad_requests,
    ),
    (
        "ping-while-loading",
        "/ping is answered within 2 s while a model is loaded",
        "an instance that fails its pings is replaced, with all its models",
        pings_while_loading,
    ),
    (
        "unload",
        "DELETE unloads a model, which can then be loaded again",
        "the platform frees memory this way, with a timeout of 360 s",
        unloads,
    ),
    (
        "memory",
        "the memory is free once DELETE answers",
        "the platform loads the next model at once, which otherwise would not fit",
        gives_memory_back,
    ),
    (
        "out-of-memory",
        "a model that does not fit gets a 507",
        "only on a 507 does the platform unload other models and retry",
        says_when_memory_is_full,
    ),
)

PLATFORM = Platform(
    title="sagemaker-mme",
    launch=launch_many,
    probe=Probe("/ping", PING_S, 5.0, 240.0),
    grace_s=GRACE_S,
    checks=(*START, *LISTENERS, *MODELS, *(check for check in END if check.id == "sigterm-exit")),
    api=api,
)
