"""Routes from an HTTP method and path to an action, as Triton has them, in linear time.

V2's paths are not percent-decoded and have no query string [H02]. Requests without a route are refused with Triton's
bodies and content types [H02, H03].
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from remora.protocols.path_names import decode_name
from remora.protocols.rest.answer import Refusal

METRICS_PATH = "/v2/metrics"
"""Path of the metrics on the port that carries requests, because a host may pass on only that port."""
SCRAPE_PATH = "/metrics"
"""Path of the metrics on their own port and on other servers, where the endpoint pickers of gateways look."""
METRICS_PATHS = frozenset((METRICS_PATH, SCRAPE_PATH))
"""Both on the port that carries requests."""
HOME = "/"
"""Path of the application for browsers; other clients get Triton's 404."""
PAGES = frozenset((HOME, "/v2/docs", "/v2/openapi.json", "/v2/status"))
"""Paths of the pages, which Triton does not have."""
_MAX_VERSION = 2**63 - 1
_MEMO_PATH = 256
_POST = ("POST",)
_GET = ("GET",)
_BOTH = ("GET", "POST")

_MODEL_ACTIONS = {
    "": "model_metadata",
    "infer": "infer",
    "generate": "generate",
    "generate_stream": "generate_stream",
    "ready": "model_ready",
    "config": "model_config",
    "stats": "model_stats",
    "sequences": "model_sequences",  # ours
    "explain": "model_explain",  # ours
    "release": "release",  # ours
    "trace/setting": "trace",
}
_METHODS = {
    "infer": _POST,
    "generate": _POST,
    "generate_stream": _POST,
    "index": _POST,
    "load": _POST,
    "unload": _POST,
    "trace": _BOTH,
    "logging": _BOTH,
    "release": _BOTH,
}
# Their errors found before the body is read are text/plain, those of all others application/json [H11].
_PLAIN = frozenset(("infer", "model_ready", "live", "ready"))


class Route(NamedTuple):
    """Action and arguments that a request's path names.

    ``version`` is -1 if the path names none. ``plain_errors`` is True if errors found before the body is read are sent
    as text/plain. ``verb`` is the method of "trace", "logging" and "release" ("GET" or "POST"), and "status",
    "register" or "unregister" of shared memory; ``region`` is the region of shared memory and ``repository`` the
    repository in the path. ``request`` is the request to explain.
    """

    action: str
    model: str = ""
    version: int = -1
    plain_errors: bool = False
    verb: str = ""
    region: str = ""
    repository: str = ""
    request: str = ""


def route(method: bytes | str, path: str) -> Route:
    """Return the route of a request.

    Raises Refusal: 404 without a route, 405 for another method, 400 for a version out of range.
    """
    # Long paths are not cached, because clients choose them and the memo counts entries, not bytes.
    return _remembered(method, path) if len(path) <= _MEMO_PATH else _route(method, path)


def _route(method: bytes | str, path: str) -> Route:
    verb = method.decode("latin-1") if isinstance(method, bytes) else method
    match = _find(path.split("/", 9))
    if match is None:
        raise Refusal(404, "Not Found")
    where, version = match
    where = where._replace(plain_errors=where.action in _PLAIN)
    if verb not in _methods(where):
        raise Refusal(405, "Method Not Allowed", plain=where.plain_errors, action=where.action)
    if where.action in ("trace", "logging", "release"):
        where = where._replace(verb=verb)
    return where._replace(version=_version(version, where.plain_errors)) if version else where


def method_of(path: str) -> str:
    """Return the method of a redirect to a path.

    It is POST, or GET if the path's route does not have POST.
    """
    try:
        route("POST", path)
    except Refusal as refusal:
        return "GET" if refusal.status == 405 else "POST"
    return "POST"


def typed_route(path: str) -> Route | None:
    """Return the route of plain JSON, ``/models/M`` or ``/models/M/versions/V``, or None for other paths.

    Raises Refusal: 400 for a version out of range.
    """
    match path.split("/", 6)[1:]:
        case ["models", segment] if model := decode_name(segment):
            return Route("infer", model)
        case ["models", segment, "versions", version] if version.isascii() and version.isdigit():
            model = decode_name(segment)
            return Route("infer", model, _version(version, plain=False)) if model else None
    return None


_remembered = lru_cache(maxsize=4096)(_route)


def _methods(where: Route) -> tuple[str, ...]:
    if where.action in ("system_shm", "cuda_shm"):
        return _GET if where.verb == "status" else _POST
    return _METHODS.get(where.action, _GET)


def _find(parts: list[str]) -> tuple[Route, str] | None:
    """Return the route of a split path and the text of its version."""
    if parts[:2] != ["", "v2"]:
        return None
    match parts[2:]:
        case []:
            return Route("server_metadata"), ""
        case ["health", ("live" | "ready") as probe]:
            return Route(probe), ""
        case ["models", "stats"]:
            return Route("all_stats"), ""
        case ["models", model, *rest] if model:
            return _model(model, rest)
        case ["repository", *rest]:
            return _repository(rest)
        case ["trace", "setting"]:
            return Route("trace"), ""
        case ["trace", "recent"]:  # ours
            return Route("recent_traces"), ""
        case ["logging"]:
            return Route("logging"), ""
        case ["startup"]:  # ours
            return Route("startup"), ""
        case ["systemsharedmemory", *rest]:
            return _shared_memory("system_shm", rest)
        case ["cudasharedmemory", *rest]:
            return _shared_memory("cuda_shm", rest)
    return None


def _model(model: str, rest: list[str]) -> tuple[Route, str] | None:
    version = ""
    if len(rest) > 1 and rest[0] == "versions" and rest[1].isascii() and rest[1].isdigit():
        version, rest = rest[1], rest[2:]
    if len(rest) > 1 and rest[0] == "explain":  # ours
        return Route("model_explain", model, request="/".join(rest[1:])), version
    kind = "/".join(rest)
    action = _MODEL_ACTIONS.get(kind)
    # `/v2/models/m/` has an empty rest of one part, and trace settings and releases have no versions.
    if action is None or rest == [""] or (action in ("trace", "release") and version):
        return None
    return Route(action, model), version


def _repository(rest: list[str]) -> tuple[Route, str] | None:
    match rest:
        case ["index"]:
            return Route("index"), ""
        case [repository, "index"] if repository:
            return Route("index", repository=repository), ""
        case ["models", model, ("load" | "unload") as action] if model:
            return Route(action, model), ""
        case [repository, "models", model, ("load" | "unload") as action] if repository and model:
            return Route(action, model, repository=repository), ""
    return None


def _shared_memory(action: str, rest: list[str]) -> tuple[Route, str] | None:
    match rest:
        case [("status" | "register" | "unregister") as verb]:
            return Route(action, verb=verb), ""
        case ["region", region, ("status" | "register" | "unregister") as verb] if region:
            return Route(action, verb=verb, region=region), ""
    return None


def _version(text: str, plain: bool) -> int:
    # Without leading zeros at most 19 digits can fit; longer texts are never converted.
    digits = text.lstrip("0") or "0"
    if len(digits) <= 19 and int(digits) <= _MAX_VERSION:
        return int(digits)
    raise Refusal(
        400,
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0",
        plain=plain,
    )
