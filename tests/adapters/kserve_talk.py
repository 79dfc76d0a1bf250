"""KServe's own client with a predictor; prints what came of it as JSON. Run by its own process.

    python kserve_talk.py HTTP_PORT GRPC_PORT MODEL

kserve registers messages under the names that tritonclient's have, so the two cannot be in one process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

HTTP, GRPC, MODEL = f"http://127.0.0.1:{sys.argv[1]}", f"127.0.0.1:{sys.argv[2]}", sys.argv[3]
ROWS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
WRONG = InferInput("nothing", [2, 4], "FP32", [*ROWS[0], *ROWS[1]])


def request(name: str, tensor: InferInput | None = None) -> InferRequest:
    if tensor is None:
        tensor = InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(np.array(ROWS, np.float32), binary_data=True)
    return InferRequest(name, [tensor], request_id="7")


async def refused(asked: Any) -> list[Any]:
    """The code and the words of a refusal, by either door."""
    try:
        await asked
    except httpx.HTTPStatusError as error:
        return [error.response.status_code, sorted(error.response.json())]
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return ["answered"]


async def talk() -> dict[str, Any]:
    found: dict[str, Any] = {"version": version("kserve")}
    v1, v2 = (InferenceRESTClient(RESTConfig(protocol=name)) for name in ("v1", "v2"))
    async with grpc.aio.insecure_channel(GRPC) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)  # a server may answer HTTP before
    by_grpc = InferenceGRPCClient(GRPC)
    found["ready"] = [
        await v1.is_model_ready(HTTP, MODEL),
        await v2.is_server_live(HTTP),
        await v2.is_server_ready(HTTP),
        await v2.is_model_ready(HTTP, MODEL),
        await by_grpc.is_server_live(),
        await by_grpc.is_server_ready(),
        await by_grpc.is_model_ready(MODEL),
    ]
    found["v1"] = (await v1.infer(HTTP, {"instances": ROWS}, model_name=MODEL))["predictions"]
    for name, answer in (
        ("v2", await v2.infer(HTTP, request(MODEL), model_name=MODEL)),
        ("grpc", await by_grpc.infer(request(MODEL))),
    ):
        found[name] = [answer.id, answer.model_name, answer.outputs[0].as_numpy().tolist()]
    found["unknown"] = [
        await refused(v1.infer(HTTP, {"instances": ROWS}, model_name="none")),
        await refused(v2.infer(HTTP, request("none"), model_name="none")),
        await refused(by_grpc.infer(request("none"))),
    ]
    found["wrong"] = [
        await refused(v1.infer(HTTP, {"instances": [[1.0]]}, model_name=MODEL)),
        await refused(v2.infer(HTTP, request(MODEL, WRONG), model_name=MODEL)),
        await refused(by_grpc.infer(request(MODEL, WRONG))),
    ]
    return found


print(json.dumps(asyncio.run(talk())))
