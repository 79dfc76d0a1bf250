"""Texts of more than 256 KB as raw data over gRPC, which threads split and join: calls and streams in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Serving
from remora.proto import inference_pb2 as pb
from support.models.python_models import write_echo

grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install '.[dev]'")

PATIENCE_S = 60.0
SERVICE = "/inference.GRPCInferenceService"
COUNT = 100_000
LONG, SHORT = b"\3\0\0\0abc" * COUNT, b"\1\0\0\0x"


def request(raw: bytes, count: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="BYTES", shape=[count])
    message = pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[raw])
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("transport", ["own", "grpcio"])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_long_texts_pass_in_calls_and_streams_in_order(
    serving: Serving, tmp_path: Path, transport: str, isolation: str
) -> None:
    write_echo(tmp_path / "models", "STRING")
    flags = (f"--grpc-transport={transport}", f"--backend-config=python,isolation={isolation}")
    options = [("grpc.max_receive_message_length", -1)]
    with (
        serving(tmp_path / "models", *flags) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.grpc}", options=options) as channel,
    ):
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        for _ in range(2):  # the second message is known
            answer = pb.ModelInferResponse.FromString(call(request(LONG, COUNT), timeout=PATIENCE_S))
            assert answer.raw_output_contents[0] == LONG
        with pytest.raises(grpc.RpcError) as refused:
            call(request(LONG, COUNT + 1), timeout=PATIENCE_S)
        assert "expected 100001 string elements" in refused.value.details()
        sent = [(LONG, COUNT), (SHORT, 1), (LONG, COUNT + 1), (SHORT, 1)]
        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
        messages = stream(iter([request(*each) for each in sent]), timeout=PATIENCE_S)
        answers = [pb.ModelStreamInferResponse.FromString(message) for message in messages]
        found = [each.error_message or each.infer_response.raw_output_contents[0] for each in answers]
        assert found[:2] == [LONG, SHORT]
        assert "expected 100001 string elements" in found[2]
        assert found[3] == SHORT
