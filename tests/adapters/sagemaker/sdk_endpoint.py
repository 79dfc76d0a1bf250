"""Version 3 of SageMaker's SDK with an endpoint, as its users write it; prints what came of it. Run by its own venv.

    python sdk_endpoint.py IMAGE MODEL_S3_URL

Its two services are where AWS_ENDPOINT_URL_SAGEMAKER and AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME say.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import boto3
import numpy as np
from botocore.exceptions import ClientError
from sagemaker.core import deserializers, serializers
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.resources import Endpoint
from sagemaker.serve import ModelBuilder
from sagemaker.serve.mode.function_pointers import Mode

IMAGE, MODEL = sys.argv[1:]
ROLE = "arn:aws:iam::123456789012:role/endpoint"
ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32)
V2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": ROWS.tolist()}]}

session = boto3.Session()
found: dict[str, Any] = {"version": version("sagemaker")}
builder = ModelBuilder(
    image_uri=IMAGE,
    s3_model_data_url=MODEL,
    role_arn=ROLE,
    mode=Mode.SAGEMAKER_ENDPOINT,
    env_vars={"SAGEMAKER_TRITON_LOG_VERBOSE": "2"},
    instance_type="ml.c5.xlarge",
    sagemaker_session=Session(session),
)
found["built"] = builder.build(model_name="built").model_name
endpoint = builder.deploy(endpoint_name="built", instance_type="ml.c5.xlarge", wait=False)
found["deployed"] = Endpoint.get("built", session=session).endpoint_status


def ask(serializer: Any, deserializer: Any, data: object, **more: str) -> Any:
    endpoint.serializer, endpoint.deserializer = serializer, deserializer
    return endpoint.invoke(data, content_type=serializer.CONTENT_TYPE, session=session, **more)


found["json"] = ask(serializers.JSONSerializer(), deserializers.JSONDeserializer(), V2).body
found["csv"] = ask(serializers.CSVSerializer(), deserializers.CSVDeserializer(), ROWS.tolist()).body
npy = ask(serializers.NumpySerializer(), deserializers.NumpyDeserializer(), ROWS, custom_attributes="a=1")
found["npy"], found["custom attributes"] = npy.body.tolist(), npy.custom_attributes
try:
    ask(serializers.CSVSerializer(), deserializers.CSVDeserializer(), [[1, 2]])
except ClientError as error:
    found["error"] = [
        error.response["Error"]["Code"],
        error.response["OriginalStatusCode"],
        error.response["OriginalMessage"],
    ]
print(json.dumps(found, default=str))
