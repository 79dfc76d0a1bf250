"""KServe's own server with the model `scale`, the reference of what ours answers: HTTP_PORT [GRPC_PORT]."""

from __future__ import annotations

import sys

import numpy
from kserve import InferOutput, InferResponse, Model, ModelServer


class Scale(Model):
    def load(self):
        self.ready = True

    def predict(self, request, headers=None, response_headers=None):
        if isinstance(request, dict):
            rows = numpy.array(request["inputs"] if "inputs" in request else request["instances"], numpy.float32)
            return {"predictions": (rows * 2).tolist()}
        rows = request.inputs[0].as_numpy()
        output = InferOutput("y", list(rows.shape), "FP32")
        output.set_data_from_numpy(rows * 2, binary_data=False)
        return InferResponse(request.id, "scale", [output])


if __name__ == "__main__":
    model = Scale("scale")
    model.load()
    by_grpc = {"grpc_port": int(sys.argv[2])} if len(sys.argv) > 2 else {"enable_grpc": False}
    ModelServer(http_port=int(sys.argv[1]), **by_grpc).start([model])
