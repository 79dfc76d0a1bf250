"""Writes repositories in the shapes of public ones, and compares remora's verdict on each with a real Triton's.

The weights are counts of keys in 967 public configurations and of calls in 234 public Python models. Each model is
loaded on both servers in explicit mode; if it loads, it gets one request. Models with which the real server falls
silent are only counted. The same seed writes the same repositories.

    python tests/oracle/wild.py --oracle DIR [--folder FOLDER] [--count 500] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from conftest import free_ports  # noqa: E402
from support.process.eventually import eventually  # noqa: E402
from support.servers.live_server import status_of  # noqa: E402

SILENT = -1
FLAGS = ("--model-control-mode=explicit", "--exit-on-error=false")
TYPES = {"FP32": 400, "STRING": 250, "INT32": 120, "INT64": 80, "UINT8": 50, "BOOL": 20, "FP16": 10, "INT8": 5}
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|[-+]?\d+(?:\.\d+)?")
PATIENCE_S = 15


class Wild(NamedTuple):
    """A written model: its input, and the elements of one request."""

    name: str
    datatype: str
    shape: list[int]


class Writer:
    """Writer of one repository from one source of random numbers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)

    def models(self, count: int) -> Iterator[Wild]:
        """Write models, each of which may be a step of the next ensemble."""
        last: Wild | None = None
        for number in range(count):
            if last is not None and self._happens(173, 967):
                yield self._ensemble(f"ensemble{number}", last)
                last = None
            else:
                yield (last := self._python(f"python{number}"))

    # -- configurations -----------------------------------------------------------------------------------------------

    def _python(self, name: str) -> Wild:
        (datatype,) = self._random.choices(list(TYPES), list(TYPES.values()))
        batch = self._random.choice([0, 0, 1, 8, 16, 128]) if self._happens(805, 942) else None
        dims = self._random.choice([[1], [1], [-1], [3], [2, 2], [-1, 3], [3, 4, 4]])
        rows = [
            self._tensor("input", "IN", datatype, dims, batch),
            self._tensor("output", "OUT", datatype, dims, batch),
        ]
        if self._happens(20, 942):
            self._random.choice([rows.pop, rows.clear, lambda: rows.append(rows[-1])])()
        more = [text for chance, text in self._stanzas(batch or 0) if self._happens(chance, 942)]
        decoupled = self._happens(56, 942)
        if decoupled:
            more.append("model_transaction_policy { decoupled: true }")
        head = [f'name: "{name if not self._happens(5, 942) else "other"}"'] if self._happens(900, 942) else []
        head += [self._random.choice(['backend: "python"', 'backend: "python"', 'platform: "python"'])]
        head += [] if batch is None else [f"max_batch_size: {batch}"]
        self._write(name, [*head, *rows, *more], self._code(datatype, decoupled=decoupled))
        shape = [size if size > 0 else 2 for size in dims]
        return Wild(name, "BYTES" if datatype == "STRING" else datatype, [1, *shape] if batch else shape)

    def _tensor(self, kind: str, name: str, datatype: str, dims: list[int], batch: int | None) -> str:
        parts = [f'name: "{name}"', f"data_type: TYPE_{datatype}"]
        listed = ", ".join(map(str, dims))
        parts.append(self._random.choice([f"dims: [ {listed} ]", "\n".join(f"dims: {size}" for size in dims)]))
        if kind == "input":
            parts += ["optional: true"] if self._happens(30, 942) else []
            parts += ["format: FORMAT_NONE"] if self._happens(48, 942) else []
            parts += ["allow_ragged_batch: true"] if self._happens(22, 942) else []
        elif self._happens(26, 942):
            parts.append('label_filename: "labels.txt"')
        if -1 not in dims and self._happens(60, 942):
            parts.append(f"reshape {{ shape: [ {' , '.join(map(str, dims))} ] }}")
        if self._happens(8, 942):
            parts.append(self._random.choice(["dim: 3", "data_typ: TYPE_FP32", "dims: 0", 'is_shape_tensor: "x"']))
        separator = self._random.choice(["\n  ", ", ", "; "])
        body = separator.join(parts)
        return self._random.choice([f"{kind} [ {{ {body} }} ]", f"{kind} {{ {body} }}", f"{kind}: {{\n  {body}\n}}"])

    def _stanzas(self, batch: int) -> list[tuple[int, str]]:
        choose = self._random.choice
        sizes = ", ".join(map(str, sorted({1, max(batch // 2, 1), choose([batch or 4, 64])})))
        delay = choose([100, 1000, 500000])
        control = (
            'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]'
        )
        return [
            (169, choose(["dynamic_batching { }", f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}",
                          f"dynamic_batching {{ preferred_batch_size: [ {sizes} ] }}",
                          "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
                          "dynamic_batching { default_queue_policy { timeout_action: DELAY max_queue_size: 8 } }"])),
            (499, choose(["instance_group [ { kind: KIND_CPU } ]", "instance_group [ { count: 2 kind: KIND_CPU } ]",
                          "instance_group { count: 1 }", "instance_group [ { kind: KIND_AUTO count: 1 } ]",
                          "instance_group [ { kind: KIND_MODEL } ]", "instance_group [ { count: 1 kind: KIND_GPU } ]",
                          "instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]", "instance_group [ { count: -1 } ]"])),
            (191, choose(['parameters { key: "A" value { string_value: "1" } }',
                          'parameters: { key: "A", value: { string_value: "1" } }',
                          'parameters [ { key: "A" value: { string_value: "$$TRITON_MODEL_DIRECTORY/x" } } ]',
                          'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'])),
            (55, choose(["version_policy { latest { num_versions: 1 } }", "version_policy: { all { } }",
                         "version_policy { specific { versions: [ 1 ] } }",
                         "version_policy { specific { versions: [ 7 ] } }"])),
            (60, choose([f"sequence_batching {{ max_sequence_idle_microseconds: 5000000 {control} }}",
                         f"sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} {control} }}",
                         "sequence_batching { direct { } }", "sequence_batching { iterative_sequence: true }"])),
            (26, choose(["optimization { priority: PRIORITY_MAX }", "optimization { cuda { graphs: true } }",
                         "optimization { input_pinned_memory { enable: true } }"])),
            (10, 'model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] '
                 "zero_data: true } } } ]"),
            (7, "response_cache { enable: true }"),
            (118, choose(['default_model_filename: "model.py"', 'default_model_filename: "other.py"'])),
            (5, "rate_limiter { resources [ { name: \"R\" count: 1 } ] }"),
            (12, choose(["max_batch: 8", "dynamic_batchng { }", "instance_group [ { kind: KIND_TPU } ]", "}",
                         "input ["])),
        ]  # fmt: skip

    def _ensemble(self, name: str, step: Wild) -> Wild:
        maps = 'input_map { key: "IN" value: "E_IN" } output_map { key: "OUT" value: "E_OUT" }'
        if self._happens(15, 173):
            maps = self._random.choice([maps.replace("IN", "NO", 1), maps.replace("E_OUT", "LOST"), "", maps + maps])
        dims = step.shape[1:] if len(step.shape) > 1 else step.shape
        batch = "max_batch_size: 8" if len(step.shape) > 1 else "max_batch_size: 0"
        datatype = "STRING" if step.datatype == "BYTES" else step.datatype
        tensors = [
            f'{kind} [ {{ name: "E_{end}" data_type: TYPE_{datatype} dims: {dims} }} ]'
            for kind, end in (("input", "IN"), ("output", "OUT"))
        ]
        if self._happens(5, 173):
            tensors.append(tensors[-1])
        model = step.name if not self._happens(5, 173) else "absent"
        scheduling = f'ensemble_scheduling {{ step [ {{ model_name: "{model}" model_version: -1 {maps} }} ] }}'
        self._write(name, [f'name: "{name}"', 'platform: "ensemble"', batch, *tensors, scheduling], "")
        return Wild(name, step.datatype, step.shape)

    # -- models -------------------------------------------------------------------------------------------------------

    def _code(self, datatype: str, *, decoupled: bool) -> str:
        lines = ["import json", "import numpy as np", "import triton_python_backend_utils as pb_utils", ""]
        if self._happens(30, 234):
            lines.append(self._random.choice(["import not_installed_anywhere", "from . import missing", "import os"]))
        lines += ["class TritonPythonModel:"]
        if self._happens(13, 234):
            lines += ["    @staticmethod", "    def auto_complete_config(auto_complete_model_config):"]
            lines += [self._random.choice([
                "        return auto_complete_model_config",
                "        auto_complete_model_config.set_max_batch_size(8); return auto_complete_model_config",
                '        auto_complete_model_config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [1]})\n'
                "        return auto_complete_model_config",
                "        pass",
            ])]  # fmt: skip
        if self._happens(200, 234):
            lines += ["    def initialize(self, args):", '        self.config = json.loads(args["model_config"])']
            lines += [self._random.choice([
                '        row = pb_utils.get_output_config_by_name(self.config, "OUT")\n'
                '        self.dtype = pb_utils.triton_string_to_numpy(row["data_type"])',
                '        self.a = self.config["parameters"]["A"]["string_value"]',
                '        pb_utils.Logger.log_info("loaded " + args["model_name"])',
                "        self.kind = args['model_instance_kind'], args['model_instance_device_id']",
                "        raise pb_utils.TritonModelException('no weights')",
                "        self.path = args['model_repository'] + '/' + args['model_version']",
            ])]  # fmt: skip
        asynchronous = "async " if self._happens(6, 234) else ""
        lines += [
            f"    {asynchronous}def execute(self, requests):",
            "        responses = []",
            "        for request in requests:",
        ]
        lines += ['            tensor = pb_utils.get_input_tensor_by_name(request, "IN")']
        lines += [self._random.choice([
            '            out = pb_utils.Tensor("OUT", tensor.as_numpy())',
            '            out = pb_utils.Tensor("OUT", tensor.as_numpy())',
            '            out = pb_utils.Tensor("OUT", np.array(tensor.as_numpy()))',
            '            out = pb_utils.Tensor("OTHER", tensor.as_numpy())',
            "            responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError('bad'))); continue",
        ])]  # fmt: skip
        if decoupled:
            lines += ["            sender = request.get_response_sender()"]
            lines += ["            sender.send(pb_utils.InferenceResponse(output_tensors=[out]))"]
            lines += ["            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"]
        else:
            lines += ["            responses.append(pb_utils.InferenceResponse(output_tensors=[out]))"]
        lines += [f"        return {'None' if decoupled else 'responses'}"]
        if self._happens(100, 234):
            lines += ["    def finalize(self):", "        print('Cleaning up...')"]
        return "\n".join(lines) + "\n"

    def _write(self, name: str, stanzas: list[str], code: str) -> None:
        folder = self._folder / name
        (folder / "1").mkdir(parents=True)
        body = stanzas[:1] + self._random.sample(stanzas[1:], len(stanzas) - 1)
        comment = "# made by hand\n" if self._happens(200, 942) else ""
        (folder / "config.pbtxt").write_text(comment + "\n".join(body) + "\n")
        (folder / "labels.txt").write_text("a\nb\n")
        if code:
            (folder / "1" / "model.py").write_text(code)

    def _happens(self, times: int, of: int) -> bool:
        return self._random.random() < times / of


# -- verdicts ---------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What a server did with a model: loaded it or not, and the status of one request."""

    loads: bool
    status: int
    text: str


def verdict(port: int, model: Wild) -> Verdict:
    status, text = ask(port, f"/v2/repository/models/{model.name}/load", {})
    if status != 200:
        return Verdict(False, min(status, 0), text)
    size = 1
    for dim in model.shape:
        size *= dim
    data = {"BYTES": "a", "BOOL": True, "FP32": 0.5}.get(model.datatype, 1)
    name = "E_IN" if model.name.startswith("ensemble") else "IN"
    tensor = {"name": name, "datatype": model.datatype, "shape": model.shape, "data": [data] * size}
    status, text = ask(port, f"/v2/models/{model.name}/infer", {"inputs": [tensor]})
    return Verdict(True, status, text)


def ask(port: int, path: str, body: object) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except TimeoutError:
        return SILENT, "no answer"


@contextmanager
def running(command: list[str], log: Path, port: int) -> Iterator[None]:
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        eventually(lambda: status_of(port, "/v2/health/live") == 200, process=process, log=log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:  # Triton waits without end for a model's process that has ended
            process.kill()
            process.wait()


def kind(theirs: Verdict, ours: Verdict) -> str:
    """Return a difference without its names and numbers."""
    shown = [
        f"{'loads' if each.loads else 'refuses'} {each.status or ''}: {VARYING.sub('*', each.text)[:200]}"
        for each in (theirs, ours)
    ]
    return f"Triton {shown[0]}\n  remora {shown[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="for the repository and the logs; default: a new one in /tmp")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="wild-"))
    models = folder / "models"
    if models.exists():
        parser.error(f"'{models}' exists: choose another folder")
    models.mkdir(parents=True)
    written = list(Writer(models, options.seed).models(options.count))
    ports = free_ports(6)
    triton = [str(options.oracle / "run_triton.sh"), str(models), *map(str, ports[:3]), *FLAGS]
    remora = [sys.executable, "-m", "remora", "serve", "--model-repository", str(models), *FLAGS]
    remora += [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports[3:], strict=True)]
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    silent, agreed = 0, collections.Counter[str]()
    with running(triton, folder / "triton.log", ports[0]), running(remora, folder / "remora.log", ports[3]):
        for model in written:
            theirs, ours = verdict(ports[0], model), verdict(ports[3], model)
            if theirs.status == SILENT:
                silent += 1
            elif theirs[:2] == ours[:2]:
                agreed[f"answered {ours.status}" if ours.loads else "refused"] += 1
            else:
                kinds[kind(theirs, ours)].append(model.name)
            if not model.name.startswith("python"):  # a step stays for the next ensemble
                for port in (ports[0], ports[3]):
                    ask(port, f"/v2/repository/models/{model.name}/unload", {"parameters": {"unload_dependents": True}})
    for difference, names in sorted(kinds.items(), key=lambda row: -len(row[1])):
        print(f"{len(names)} x {', '.join(names[:3])}\n  {difference}")
    shown = ", ".join(f"{count} {what}" for what, count in sorted(agreed.items()))
    print(f"wild: {agreed.total()} of {len(written)} verdicts agree ({shown})")
    print(f"the real server did not answer for {silent}; models and logs are in {folder}")
    return 1 if kinds else 0


if __name__ == "__main__":
    raise SystemExit(main())
