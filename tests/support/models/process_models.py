"""Python models in worker processes."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from remora.backends import Placement, Source
from remora.backends.python import PythonBackend
from remora.backends.worker.model import WorkerInstance, WorkerModel
from remora.messages import InferForm, Outcome, Request, Response
from remora.proto.model_config_pb2 import ModelConfig
from remora.testing import backend

CONFIG = """
name: "m" backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
HEAD = """
import logging, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value=7):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])

class TritonPythonModel:
"""
ANSWER = "    def execute(self, requests):\n        return [answer() for _ in requests]\n"
SHARED = hasattr(os, "memfd_create")


def once(fault: str) -> str:
    """A model with a fault that only a request called "now" brings out."""
    lines = "".join(f"            {line}\n" for line in fault.splitlines())
    return (
        "    def execute(self, requests):\n        if requests[0].request_id() == 'now':\n"
        + lines
        + "        return [answer() for _ in requests]\n"
    )


def write_model(root: Path, code: str) -> Path:
    path = root / "m" / "1" / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + code, encoding="utf-8")
    return path


class Models:
    """Opens models in worker processes."""

    def __init__(self, root: Path, transport: str) -> None:
        self.root = root
        self.settings = {"isolation": "process", "transport": transport}
        self.opened: list[WorkerModel | WorkerInstance] = []

    def open(self, code: str, config: str = CONFIG, **settings: str) -> WorkerModel:
        path = write_model(self.root, code)
        chosen = {**self.settings, **{key.replace("_", "-"): value for key, value in settings.items()}}
        source = Source("m", 1, path.parents[1], path.parent, self.root, chosen)
        model = PythonBackend().open(source, text_format.Parse(config, ModelConfig()))
        assert isinstance(model, WorkerModel)
        self.opened.append(model)
        return model

    def start(self, code: str, config: str = CONFIG, **settings: str) -> WorkerInstance:
        model = self.open(code, config, **settings)
        instance = model.instance(text_format.Parse(config, ModelConfig()), Placement("m_0_0"))
        assert isinstance(instance, WorkerInstance)
        self.opened.append(instance)
        return instance


def request(id: str = "", array: Any = None) -> Request:
    values = np.arange(3, dtype=np.int32) if array is None else array
    return Request(InferForm((), id=id), {"IN": values}, ("OUT",), 1, None)


def run(instance: WorkerInstance, *requests: Request) -> list[Outcome | None]:
    return backend.run(instance, *(requests or (request(),)))


def values(outcome: Outcome | None) -> list[Any]:
    assert isinstance(outcome, Response), outcome
    return list(outcome.outputs[0].data.tolist())


def gone(pid: int) -> bool:
    """Has the process ended, also for its parent?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ends(pid: int) -> bool:
    """Return whether a process that is not a child of this one ends within the patience."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    try:
        return bool(poller.poll(60_000))
    finally:
        os.close(handle)
