"""Programs of PyTorch behind one face: TorchScript, exported programs, AOTInductor packages; the law: no plain pickles.

A program is a callable and what is known of its arguments. Instances may share one, or have copies that share what
nothing writes to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remora.backends.model_files import import_framework
from remora.backends.pytorch.archive import COMPILED, EXPORTED, SCRIPT, archive_kind, check_exported
from remora.backends.pytorch.values import datatype_name
from remora.errors import UnsupportedError
from remora.messages import TensorInfo


class Program(NamedTuple):
    """A loaded program.

    ``arguments`` names what can be given by place, empty when unknown; ``dictionary``: it takes one dictionary of
    tensors. ``inputs`` and ``outputs`` are what it declares, None where the format does not tell. ``writes`` says
    that it may write to its inputs. ``kept`` are the addresses of the memory that it writes to or gives out itself.
    """

    call: Callable[..., Any]
    kind: str
    arguments: tuple[str, ...] = ()
    dictionary: bool = False
    inputs: tuple[TensorInfo, ...] | None = None
    outputs: tuple[TensorInfo, ...] | None = None
    writes: bool = True
    kept: frozenset[int] = frozenset()
    stateless: bool = False


def load_torch(model: str) -> Any:
    """PyTorch. Raises ConfigError when it cannot be imported."""
    torch = import_framework("torch", model, "PyTorch", "torch")
    # Inputs are views of what was received. Programs that write to theirs get copies, so this warning has no object.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
    return torch


def load_program(torch: Any, path: Path, device: Any, *, runners: int, compiling: Mapping[str, Any] | None) -> Program:
    """The program of a file, on ``device``; None leaves it where its author put it.

    Raises:
        InternalError: the file is no such program, or could run code while it is read.
        Exception: PyTorch's own errors for a file that it cannot read.
    """
    kind = archive_kind(path)
    if kind == SCRIPT:
        if compiling is not None:
            raise UnsupportedError("TorchScript cannot be compiled: export the model with torch.export for that")
        return _script(torch, path, device)
    if kind == EXPORTED:
        return _exported(torch, path, device, compiling)
    return _compiled(torch, path, device, runners)


def share_parameters(torch: Any, path: Path, device: Any, first: Program) -> Program:
    """Another copy of a TorchScript program with its own buffers and attributes, and the first one's parameters."""
    other = _script(torch, path, device)
    theirs = dict(first.call.named_parameters())  # type: ignore[attr-defined]
    for name, parameter in other.call.named_parameters():  # type: ignore[attr-defined]
        parameter.data = theirs[name].data
    return other


def _script(torch: Any, path: Path, device: Any) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is old, and what people have
        module = torch.jit.load(str(path), map_location=device)
        module.eval()
        graph = module.inlined_graph
    arguments = module.forward.schema.arguments[1:]  # the first is the module
    kinds = [str(argument.type) for argument in arguments]
    nodes = _node_kinds(graph)
    return Program(
        module,
        SCRIPT,
        arguments=tuple(argument.name for argument in arguments),
        dictionary=len(kinds) == 1 and kinds[0] == "Dict[str, Tensor]",
        writes=any(kind.endswith("_") and not kind.endswith("__") for kind in nodes),
        kept=_addresses([*module.parameters(), *module.buffers()]),
        stateless="prim::SetAttr" not in nodes and not any(True for _ in module.buffers()),
    )


def _node_kinds(graph: Any) -> set[str]:
    """The kinds of all nodes of a TorchScript graph, those in loops and branches included."""
    found: set[str] = set()
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        found.add(node.kind())
        for block in node.blocks():
            waiting += block.nodes()
    return found


def _exported(torch: Any, path: Path, device: Any, compiling: Mapping[str, Any] | None) -> Program:
    check_exported(path, lambda file: torch.load(file, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of the format, to whoever exports
        program = _moved(torch.export.load(str(path)), device)
        module = program.module(check_guards=False)
        if device is not None:
            module.to(device)
    call = module if compiling is None else torch.compile(module, **compiling)
    signature = program.graph_signature
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = [name for name in signature.user_inputs if isinstance(name, str)]
    inputs = [_info(torch, name, values.get(name)) for name in names]
    results = _result_names(program.call_spec.out_spec, len(signature.user_outputs))
    outputs = [
        _info(torch, shown, values.get(name))
        for shown, name in zip(results, signature.user_outputs, strict=True)
        if isinstance(name, str)
    ]
    return Program(
        call,
        EXPORTED,
        arguments=tuple(names),
        inputs=_all_known(inputs),
        outputs=_all_known(outputs),
        writes=bool(signature.user_inputs_to_mutate),
        kept=_addresses([*module.parameters(), *module.buffers()]),
        stateless=not signature.buffers_to_mutate,
    )


def _moved(program: Any, device: Any) -> Any:
    """A program for a device: exported on a CPU, its nodes create tensors there, and not only its weights must move."""
    if device is None or device.type == "cpu":
        return program
    passes = __import__("torch.export.passes", fromlist=["move_to_device_pass"])
    return passes.move_to_device_pass(program, device)


def _compiled(torch: Any, path: Path, device: Any, runners: int) -> Program:
    package = __import__("torch._inductor.package", fromlist=["load_package"])
    index = -1 if device is None or device.type == "cpu" else device.index
    return Program(package.load_package(str(path), num_runners=runners, device_index=index), COMPILED, stateless=True)


def _result_names(spec: Any, count: int) -> Sequence[str]:
    if spec is not None and spec.type in (dict,) and len(spec.context) == count:
        return [str(key) for key in spec.context]
    return [f"OUTPUT__{index}" for index in range(count)]


def _info(torch: Any, name: str, value: Any) -> TensorInfo | None:
    if not isinstance(value, torch.Tensor) or not datatype_name(value.dtype):
        return None
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return TensorInfo(name, datatype_name(value.dtype), shape)


def _all_known(infos: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...] | None:
    known = tuple(info for info in infos if info is not None)
    return known if len(known) == len(infos) else None


def _addresses(tensors: Sequence[Any]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
