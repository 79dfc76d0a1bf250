"""Scoring script that runs the engine inside azureml-inference-server-http.

Point ``AZUREML_ENTRY_SCRIPT`` at a copy of this file. A request is V2: JSON, or JSON and raw tensors with the header
``Inference-Header-Content-Length``. ``model_name`` in the query selects one of several models.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse

from remora.api.http import InferCodec, ReplyFormat
from remora.api.models import Arrival
from remora.engine import Engine, FrontEnd
from remora.errors import RemoraError
from remora.messages import InferForm, Outcome, Response, Ticket
from remora.models.served_model import ServedModel
from remora.options import EngineOptions
from remora.protocols.rest.answer import HttpAnswer, Refusal, encode_error, failure
from remora_adapters.azureml import find_models


class _Answered(NamedTuple):
    model: ServedModel
    form: InferForm
    reply: ReplyFormat
    outcome: Outcome


_engine: list[Engine] = []
_codec = InferCodec()


def init() -> None:
    """Load the models of the deployment. Azure's server accepts no request before this returns."""
    mounted = Path(os.environ["AZUREML_MODEL_DIR"])
    options = EngineOptions(model_name=mounted.parent.name, batching_delay=False)  # one request at a time
    _engine[:] = [Engine(find_models(mounted), options=options).start()]


@rawhttp  # type: ignore[untyped-decorator]
def run(request: AMLRequest) -> AMLResponse:
    """Answer one V2 request, with V2's errors."""
    answer = _infer(request)
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
    return AMLResponse(b"".join(answer.body), answer.status, headers)


def _infer(request: AMLRequest) -> HttpAnswer:
    engine = _engine[0]
    name = request.args.get("model_name") or engine.only_model()
    if request.method != "POST":
        return failure(405, "Method Not Allowed", plain=True)
    refusal_text = f"model '{name}' gives any number of answers, which this route cannot"
    answered: Future[_Answered] = Future()
    try:
        engine.submit_to(FrontEnd(_submit, _arrival, refusal_text), name, -1, request, answered)
        model, form, reply, outcome = answered.result()
    except Refusal as refusal:
        return refusal.answer
    except RemoraError as error:
        return encode_error(error, plain=True)
    if isinstance(outcome, RemoraError):
        return encode_error(outcome, plain=True)
    assert isinstance(outcome, Response)  # only decoupled models stream
    return _codec.encode(model.name, model.version_text, form, outcome, reply)


def _submit(model: ServedModel, request: AMLRequest, answered: Future[_Answered]) -> Ticket:
    """Decode a request for ``model`` and submit it. Raises Refusal and RemoraError."""
    length = request.headers.get("Inference-Header-Content-Length")
    form, data, reply = _codec.decode(request.get_data(), length.encode() if length else None, model=model.name)
    return model.submit(form, data, lambda _, outcome: answered.set_result(_Answered(model, form, reply, outcome)))


def _arrival(request: AMLRequest, *_: object) -> Arrival:
    headers = request.headers
    return Arrival("HTTP", lambda name: (headers.get(name.decode()) or "").encode("latin-1", "replace") or None)
