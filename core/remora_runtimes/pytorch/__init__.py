"""PyTorch backend with one copy of the weights per device, and no unpickling.

Serves TorchScript (``model.pt``), exported programs and AOTInductor packages (``model.pt2``). PyTorch is imported when
the first model is opened.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remora.api.backends import CUDA, HOST, DeviceId, concurrent_instances, try_rows
from remora.backends import Instance, Placement, Source
from remora.backends.arrays import input_types, output_types
from remora.backends.model_files import cpu_as_device, default_max_batch, load_failure, model_path, require_file
from remora.backends.ragged import array_instance
from remora.config import BatchingChoice, Trial, complete_from_tensors
from remora.errors import ConfigError, InternalError, RemoraError
from remora.messages import Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig, ModelInstanceGroup
from remora_runtimes.pytorch.archive import COMPILED, SCRIPT, archive_kind, compiled_kind
from remora_runtimes.pytorch.plan import Bound, RunPlan, bind_inputs, bind_outputs, plan_run
from remora_runtimes.pytorch.program import Program, load_program, load_torch, share_parameters, to_array, to_value

_log = logging.getLogger(__name__)
_READING = threading.Lock()
"""Held while a program is read, moved or copied."""
_FILES = {"torch_aoti": "model.pt2"}


class PyTorchBackend:
    """Backend for ``model.pt`` and ``model.pt2``, whose settings are defaults for `plan_run`."""

    name = "pytorch"

    def open(self, source: Source, config: ModelConfig) -> PyTorchModel:
        """Load the program for the device of its first instance.

        Raises:
            NotFoundError: there is no model file.
            ConfigError: a parameter is invalid, or a GPU is missing.
            InternalError: PyTorch cannot read the file, or reading it could run code.
        """
        path = require_file(
            model_path(source, config, _FILES.get(config.platform, "model.pt")), source, "*.pt", "*.pt2"
        )
        return PyTorchModel(load_torch(source.name), source, path, config)


class PyTorchModel:
    """Opened model with a program for each device."""

    def __init__(self, torch: Any, source: Source, path: Path, config: ModelConfig) -> None:
        self._torch = torch
        self._source = source
        self._path = path
        self._plan = plan_run(config, source.settings)
        for key in self._plan.ignored:
            _log.warning("model '%s': the pytorch backend does not use the parameter '%s'", source.name, key)
        self._programs: dict[str, Program] = {}
        self._assigned: set[str] = set()
        self.batching: BatchingChoice | None = None
        self._runners = concurrent_instances(config)
        self._set_inter_op_threads()
        with self._failing():
            self._compiled_for = compiled_kind(path) if archive_kind(path) == COMPILED else ""
        gpus = 0 if self._compiled_for == "CPU" else torch.cuda.device_count()
        self._first = self._device(_first_placement(config, gpus))
        self._program(self._first)

    @property
    def preferred_kinds(self) -> tuple[str, ...]:
        """Kinds that KIND_AUTO resolves to (`Backend`)."""
        if self._compiled_for:
            return (self._compiled_for,)
        return ("GPU", "CPU") if self._torch.cuda.device_count() else ("CPU",)

    def complete(self, config: ModelConfig) -> None:
        """Fill in and check inputs and outputs that an exported program declares [C15].

        The other formats declare none.

        Raises:
            ConfigError: the configuration contradicts the program, or omits what the program does not declare.
        """
        program = self._programs[str(self._first)]
        if program.inputs is None or program.outputs is None:
            if not (config.input and config.output):
                raise ConfigError(
                    f"model '{config.name}': its format, {program.kind}, declares no types and shapes of tensors: "
                    "declare input and output in the configuration, or serve what torch.export.save writes"
                    f"{_folder_for(self._source)}"
                )
            return
        if not config.input and not config.output:
            batch = default_max_batch(self._source.settings)
            self.batching = complete_from_tensors(
                config,
                program.inputs,
                program.outputs,
                default_max_batch=batch,
                trial=lambda: self._try_rows(config, program),
            )

    def _try_rows(self, config: ModelConfig, program: Program) -> Trial:
        """Compare rows that run together with each alone, on the device of the first instance."""
        assert program.inputs is not None
        assert program.outputs is not None
        unbatched = ModelConfig()
        unbatched.CopyFrom(config)
        complete_from_tensors(unbatched, program.inputs, program.outputs, default_max_batch=0)
        run = ProgramRun(self._torch, program, self._plan, unbatched, self._first, self._threads())
        return try_rows(run, program.inputs, program.outputs)

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Return an instance on its device, which shares the weights there.

        Raises ConfigError.
        """
        device = self._device(placement)
        program = self._program(device, own=True)
        run = ProgramRun(self._torch, program, self._plan, config, device, self._threads())
        return array_instance(
            placement.name,
            config,
            run,
            quick=device is not None and device.type == "cpu",
            staying=run.staying,
            devices=self._input_devices(device),
            gpu=device.index if device is not None and device.type == "cuda" else None,
        )

    def _input_devices(self, device: Any) -> frozenset[DeviceId]:
        """Return the devices whose tensors an instance accepts (decision 0030)."""
        if device is not None and device.type == "cuda":
            return frozenset({(CUDA, device.index)})
        return frozenset({HOST}) if cpu_as_device(self._source.settings) else frozenset()

    def close(self) -> None:
        """Release the programs."""
        self._programs.clear()

    def _device(self, placement: Placement) -> Any:
        """Return the ``torch.device`` of a placement.

        None for KIND_MODEL, where the program chooses its device. Raises ConfigError.
        """
        torch = self._torch
        if placement.kind == "MODEL":
            return None
        if self._compiled_for not in ("", placement.kind):
            raise ConfigError(
                f"model '{self._source.name}': its package was compiled for a {self._compiled_for}, and its instance "
                f"group asks for a {placement.kind}: compile it for a {placement.kind}, or set the instance group's "
                f"kind to KIND_{self._compiled_for}"
            )
        if placement.kind == "CPU":
            return torch.device("cpu")
        if placement.device_id >= torch.cuda.device_count():
            raise ConfigError(
                f"model '{self._source.name}' asks for GPU {placement.device_id}, but torch {torch.__version__} sees "
                f"{torch.cuda.device_count()}: install a build of torch for CUDA and check the driver, or set the "
                "instance group's kind to KIND_CPU"
            )
        return torch.device("cuda", placement.device_id)

    def _program(self, device: Any, *, own: bool = False) -> Program:
        """Return the program on a device.

        With ``own`` an instance gets a separate copy if instances could disturb each other.
        """
        key = str(device)
        # one lock for the process, because torch's readers and passes have global state
        with _READING, self._failing():
            if key not in self._programs:
                self._programs[key] = load_program(
                    self._torch, self._path, device, runners=self._runners, compiling=self._plan.compiling
                )
            program = self._programs[key]
            apart = own and program.kind == SCRIPT and not program.stateless and not self._plan.share_weights
            if apart and key in self._assigned:
                return share_parameters(self._torch, self._path, device, program)
            if own:
                self._assigned.add(key)
            return program

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except RemoraError as error:
            raise type(error)(str(load_failure(self._source, self._path, error))) from error
        except Exception as error:  # PyTorch's errors have no common class
            raise load_failure(self._source, self._path, str(error).partition("\n")[0]) from error

    def _threads(self) -> int:
        return self._plan.intra_op_threads or max(1, self._source.cpus // self._runners)

    def _set_inter_op_threads(self) -> None:
        """Set the size of the process's inter-op pool, which is possible only before its first use."""
        wanted = self._plan.inter_op_threads
        if wanted and wanted != self._torch.get_num_interop_threads():
            try:
                self._torch.set_num_interop_threads(wanted)
            except RuntimeError:
                _log.warning(
                    "model '%s': INTER_OP_THREAD_COUNT %d comes too late: the process already runs with %d",
                    self._source.name, wanted, self._torch.get_num_interop_threads(),
                )  # fmt: skip


class ProgramRun:
    """Program as a function from arrays to arrays (``arrays.Run``). Several threads may call it."""

    def __init__(
        self, torch: Any, program: Program, plan: RunPlan, config: ModelConfig, device: Any, threads: int
    ) -> None:
        self._torch = torch
        self._program = program
        self._plan = plan
        self._device = device
        self._threads = threads
        self._thread = threading.local()
        self._types = input_types(config)
        self._outputs = output_types(config)
        self._dims = {
            row.name: len(row.reshape.shape if row.HasField("reshape") else row.dims) for row in config.output
        }
        self._batched = config.max_batch_size > 0
        self._bound: Bound = bind_inputs(
            config.name, list(self._types), program.arguments, dictionary=program.dictionary
        )
        self._places = bind_outputs(config.name, list(self._outputs))

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        return self._run(inputs, wanted, keep_on_device=False)

    def staying(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """Return the same outputs without copying them to the host."""
        return self._run(inputs, wanted, keep_on_device=True)

    @property
    def _on_gpu(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _run(self, inputs: dict[str, Array], wanted: tuple[str, ...], *, keep_on_device: bool) -> list[Tensor]:
        torch, types = self._torch, self._types
        if getattr(self._thread, "count", 0) != self._threads:
            torch.set_num_threads(self._threads)  # applies to the calling thread, and to threads started by it later
            self._thread.count = self._threads
        with contextlib.ExitStack() as stack:
            if self._on_gpu:
                stack.enter_context(torch.cuda.device(self._device))
                # After a failure too, because the next user of the inputs or outputs has other streams.
                stack.callback(torch.cuda.current_stream().synchronize)
            values = {
                name: self._argument(
                    to_value(torch, name, types[name], array), writable=not getattr(array, "shared", True)
                )
                for name, array in inputs.items()
            }
            stack.enter_context(torch.inference_mode() if self._plan.inference_mode else torch.no_grad())
            self._enter_modes(stack)
            try:
                result = self._call(values)
            except Exception as error:
                raise InternalError(f"PyTorch execute failure: {_reason(error)}", from_model=True) from error
            kept = self._program.kept | _storages(torch, values) if keep_on_device else self._program.kept
            answer = [self._output(name, result, kept, keep_on_device=keep_on_device) for name in wanted]
        if self._plan.clean_cache and self._on_gpu:
            torch.cuda.empty_cache()
        return answer

    def _enter_modes(self, stack: contextlib.ExitStack) -> None:
        torch = self._torch
        if self._program.kind == SCRIPT and not self._plan.optimized:
            stack.enter_context(torch.jit.optimized_execution(False))
        if self._plan.mixed_precision:
            stack.enter_context(torch.autocast("cuda" if self._on_gpu else "cpu"))
        if self._on_gpu and not self._plan.cudnn:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))

    def _argument(self, value: Any, *, writable: bool) -> Any:
        """Return the value for the program.

        ``writable`` is True for a tensor on a device that has no other reader.
        """
        if isinstance(value, list):
            return value
        if self._on_gpu and value.device.type == "cpu":
            return value.to(self._device)
        return value.clone() if self._program.writes and not writable else value

    def _call(self, values: Mapping[str, Any]) -> Any:
        bound = self._bound
        if bound.as_dictionary:
            return self._program.call(dict(values))
        ordered = [values[name] for name in bound.places if name in values]
        named = {word: values[name] for word, name in bound.keywords if name in values}
        return self._program.call(*ordered, **named)

    def _output(self, name: str, result: Any, kept: frozenset[int], *, keep_on_device: bool) -> Tensor:
        datatype = self._outputs[name]
        value = _pick(name, self._places[name], result, text=datatype == "BYTES")
        array = to_array(
            self._torch, name, datatype, value, kept, cast=self._plan.mixed_precision, keep_on_device=keep_on_device
        )
        if datatype == "BYTES" and self._batched and self._dims[name] == 1:
            array = array.reshape(-1, 1)  # a list has one dimension, a batch two
        return Tensor(name, datatype, array)


def _storages(torch: Any, values: Mapping[str, Any]) -> frozenset[int]:
    """Return the addresses of the inputs' memory, which may have other readers."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.numel()]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _pick(name: str, place: int | str, result: Any, *, text: bool) -> Any:
    """Return one of a program's results. Raises InternalError if it is missing."""
    if isinstance(result, dict):
        key = name if name in result else place
        if isinstance(key, int) and key < len(result):
            key = list(result)[key]
        if key not in result:
            listed = ", ".join(map(str, result))
            raise InternalError(
                f"output '{name}' is not in the dictionary that the model returns: {listed}", from_model=True
            )
        return result[key]
    single = not isinstance(result, tuple | list) or (text and all(isinstance(each, str) for each in result))
    results = [result] if single else result
    if not isinstance(place, int) or place >= len(results):
        raise InternalError(f"output '{name}' is result {place}, but the model returns {len(results)}", from_model=True)
    return results[place]


def _first_placement(config: ModelConfig, gpus: int) -> Placement:
    """Return the likely placement of the first instance, before the engine has placed it."""
    group = config.instance_group[0] if config.instance_group else ModelInstanceGroup()
    if group.kind == ModelInstanceGroup.KIND_MODEL:
        return Placement("", "MODEL")
    number = group.gpus[0] if group.gpus else 0
    on_gpu = group.kind == ModelInstanceGroup.KIND_GPU
    if on_gpu or (group.kind == ModelInstanceGroup.KIND_AUTO and number < gpus):
        return Placement("", "GPU", number)
    return Placement("", "CPU")


def _reason(error: Exception) -> str:
    """Return PyTorch's reason in one line.

    TorchScript prints it below a trace of the model's code.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:1000]


def _folder_for(source: Source) -> str:
    """Return advice on a configuration for a model served as a single file, else ""."""
    if not source.path.is_file():
        return ""
    return f"; a file has no configuration: make {source.name}/config.pbtxt and {source.name}/1/model.pt"
