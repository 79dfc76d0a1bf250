"""Routes of other servers, and the route here that does the same. Pure.

A client that was written for another server gets 404 with the nearest route in place of Triton's bare text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from remora.protocols.rest.answer import HttpAnswer, failure

_SHOWN_PATH = 100
_PLAIN = "POST /models/{model} takes plain JSON"


class _Other(NamedTuple):
    """Paths of another server, and the hint for them.

    ``{model}`` in the hint is the path's group of that name, or a served model.
    """

    path: re.Pattern[str]
    text: str


def _other(path: str, text: str) -> _Other:
    return _Other(re.compile(path), text)


_OTHERS = (
    _other(
        r"/v1/models/(?P<model>[^/:]+)(/versions/\d+)?:(predict|classify|regress|explain)",
        f"this is a route of KServe V1, which --host-platform kserve serves; here {_PLAIN}",
    ),
    _other(r"/v1/models/(?P<model>[^/]+)/(infer|predict)", f"here {_PLAIN}"),
    _other(
        r"/(openai/)?v1/(chat/completions|completions|responses(/input_tokens)?)",
        "OpenAI's routes for texts need a language model, and none is served; {plain}",
    ),
    _other(
        r"/(openai/)?v1/(models(/.*)?|embeddings|rerank|score|tokenize|detokenize)|/tokenize|/detokenize|/rerank",
        "OpenAI's routes are served with a language model or --openai; {plain}",
    ),
    _other(r"/invocations", f"this is a route of SageMaker, which --host-platform sagemaker serves; here {_PLAIN}"),
    _other(r"/score", f"this is a route of Azure ML, which --host-platform azureml serves; here {_PLAIN}"),
    _other(
        r"/2015-03-31/functions/[^/]+/invocations",
        f"this is a route of Lambda's runtime interface emulator; here {_PLAIN}",
    ),
    _other(r"/(v1/)?generate", "the route is POST /v2/models/{model}/generate"),
    _other(r"/(v1/)?generate_stream", "the route is POST /v2/models/{model}/generate_stream"),
    _other(r"/models/(?P<model>[^/]+)/.+", f"here {_PLAIN}, and /v2/models/{{model}}/infer V2"),
    _other(r"/predictions/(?P<model>[^/]+)(/[^/]*)?", f"this is a route of TorchServe; here {_PLAIN}"),
    _other(r"/(predict|infer|inference|predictions|api/predict|run)", f"here {_PLAIN}"),
    _other(r"/models", "the models are listed by POST /v2/repository/index, and shown by the page /v2/status"),
    _other(r"/(health|healthz|ping|status)", "the probes are GET /v2/health/live and GET /v2/health/ready"),
    _other(r"/(docs|redoc)|/openapi\.json", "the documentation is at /v2/docs, and /v2/openapi.json for programs"),
)


def nearest_route(path: str, models: Sequence[str]) -> str:
    """Return what to use in place of a path of another server, "" for other paths."""
    path = path.partition("?")[0]
    path = path.rstrip("/") or path
    for other in _OTHERS:
        match = other.path.fullmatch(path)
        if match is not None:
            named = match.groupdict().get("model") or (models[0] if len(models) == 1 else "NAME")
            return other.text.format(model=named, plain=_PLAIN.format(model=named))
    return ""


def with_hint(refusal: HttpAnswer, path: str, models: Sequence[str]) -> HttpAnswer:
    """Return the refusal of a path, with the nearest route if another server has the path."""
    hint = nearest_route(path, models)
    return failure(404, f"there is no route {path[:_SHOWN_PATH]}: {hint}", plain=False) if hint else refusal
