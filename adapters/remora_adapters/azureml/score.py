"""A scoring script for those who must use azureml-inference-server-http: remora's engine inside its process.

Point ``AZUREML_ENTRY_SCRIPT`` at a copy of this file. A request is V2: JSON, or JSON and raw tensors with the header
``Inference-Header-Content-Length``. ``model_name`` in the query says which model (needless where there is one).
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse

from remora.engine import Engine
from remora.errors import RemoraError, UnsupportedError
from remora.messages import Outcome, Response
from remora.options import EngineOptions
from remora.protocols.rest.answer import HttpAnswer, Refusal, encode_error, failure
from remora.protocols.rest.infer import InferCodec
from remora.tracing.tracer import Arrival
from remora_adapters.azureml import find_models

_engine: list[Engine] = []
_codec = InferCodec()


def init() -> None:
    """Load the models of the deployment. Azure's server answers nothing before this returns."""
    mounted = Path(os.environ["AZUREML_MODEL_DIR"])
    options = EngineOptions(model_name=mounted.parent.name, batching_delay=False)  # one request at a time
    _engine[:] = [Engine(find_models(mounted), options=options).start()]


@rawhttp  # type: ignore[untyped-decorator]
def run(request: AMLRequest) -> AMLResponse:
    """The answer to one V2 request, with V2's errors."""
    answer = _infer(request)
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
    return AMLResponse(b"".join(answer.body), answer.status, headers)


def _infer(request: AMLRequest) -> HttpAnswer:
    engine = _engine[0]
    name = request.args.get("model_name") or engine.only_model()
    if request.method != "POST":
        return failure(405, "Method Not Allowed", plain=True)
    try:
        model = engine.resolve(name)
        if model.decoupled:
            raise UnsupportedError(f"model '{name}' gives any number of answers, which this route cannot")
        length = request.headers.get("Inference-Header-Content-Length")
        form, data, reply = _codec.decode(request.get_data(), length.encode() if length else None, model=name)
        done: Future[Outcome] = Future()
        headers = request.headers
        arrival = Arrival("HTTP", lambda name: (headers.get(name.decode()) or "").encode("latin-1", "replace") or None)
        traced = engine.traces.over(model, arrival)
        traced.submit(form, data, lambda _, outcome: done.set_result(outcome))
        outcome = done.result()
    except Refusal as refusal:
        return refusal.answer
    except RemoraError as error:
        return encode_error(error, plain=True)
    if isinstance(outcome, RemoraError):
        return encode_error(outcome, plain=True)
    assert isinstance(outcome, Response)  # only decoupled models stream
    return _codec.encode(model.name, model.version_text, form, outcome, reply)
