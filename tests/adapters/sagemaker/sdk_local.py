"""SageMaker's SDK in its local mode, as its users write it; prints what came of each step as JSON. Run by its own venv.

    python sdk_local.py MODEL_TAR_GZ RECORDS_CSV SCRATCH_FOLDER PORT

Version 2 has it in `sagemaker`, version 3 in `sagemaker.core`; the calls are the same.
"""

from __future__ import annotations

import io
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import boto3
import numpy as np

try:
    from sagemaker.core import deserializers, serializers
    from sagemaker.core.local import LocalSession
    from sagemaker.core.transformer import Transformer
except ImportError:
    from sagemaker import deserializers, serializers
    from sagemaker.local import LocalSession
    from sagemaker.transformer import Transformer

ARCHIVE, RECORDS, SCRATCH, PORT = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
ROLE = "arn:aws:iam::123456789012:role/endpoint"
IMAGE = "remora:sagemaker"
ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32)
V2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": ROWS.tolist()}]}

session = LocalSession(boto3.Session(region_name="eu-west-1"))
session.config = {"local": {"local_code": True, "serving_port": PORT, "container_root": str(SCRATCH)}}
client, runtime = session.sagemaker_client, session.sagemaker_runtime_client
client.create_model(
    ModelName="scale",
    PrimaryContainer={
        "Image": IMAGE,
        "ModelDataUrl": f"file://{ARCHIVE}",
        "Environment": {"SAGEMAKER_TRITON_LOG_INFO": "true"},
    },
    ExecutionRoleArn=ROLE,
)


def ask(serializer: Any, data: object, deserializer: Any, **more: str) -> Any:
    """What a predictor does with its two halves and an endpoint."""
    accept = deserializer.ACCEPT
    answer = runtime.invoke_endpoint(
        serializer.serialize(data),
        "scale",
        ContentType=serializer.CONTENT_TYPE,
        Accept=accept if isinstance(accept, str) else ", ".join(accept),
        **more,
    )
    body = answer["Body"]
    return deserializer.deserialize(io.BytesIO(body.read()), body.headers["content-type"])


def transform(name: str, strategy: str | None, **settings: str) -> str:
    """A batch transform of the records; the text that it leaves."""
    place = SCRATCH / f"answers-{name}"
    transformer = Transformer(
        "scale",
        1,
        "local",
        strategy=strategy,
        output_path=f"file://{place}",
        accept="text/csv",
        sagemaker_session=session,
        **settings,
    )
    transformer.transform(
        f"file://{RECORDS.parent}", content_type="text/csv", split_type="Line", job_name=name, wait=False
    )
    (answer,) = [path for path in place.rglob("*.out") if path.is_file()]
    return answer.read_text()


found: dict[str, Any] = {"version": version("sagemaker")}
client.create_endpoint_config(
    "scale", [{"VariantName": "AllTraffic", "ModelName": "scale", "InitialInstanceCount": 1, "InstanceType": "local"}]
)
client.create_endpoint("scale", "scale")
found["status"] = client.describe_endpoint("scale")["EndpointStatus"]
try:
    found["json"] = ask(serializers.JSONSerializer(), V2, deserializers.JSONDeserializer())
    found["csv"] = ask(serializers.CSVSerializer(), ROWS.tolist(), deserializers.CSVDeserializer())
    found["csv of one row"] = ask(serializers.CSVSerializer(), ROWS[0], deserializers.CSVDeserializer())
    found["npy"] = ask(serializers.NumpySerializer(), ROWS, deserializers.NumpyDeserializer()).tolist()
    lines = [{"x": row} for row in ROWS.tolist()]
    found["jsonlines"] = ask(serializers.JSONLinesSerializer(), lines, deserializers.JSONLinesDeserializer())
    found["csv to json"] = ask(serializers.CSVSerializer(), ROWS.tolist(), deserializers.JSONDeserializer())
    found["pandas"] = ask(
        serializers.CSVSerializer(), ROWS.tolist(), deserializers.PandasDeserializer()
    ).columns.tolist()
    found["wrong"] = ask(serializers.CSVSerializer(), [[1, 2]], deserializers.StringDeserializer())
finally:
    client.delete_endpoint("scale")
found["transformed"] = {
    "by default": transform("default", None, assemble_with="Line"),
    "one by one": transform("single", "SingleRecord", assemble_with="Line"),
    "many": transform("multi", "MultiRecord", max_payload=6),
}
print(json.dumps(found, default=str))
