"""Runs of an ONNX Runtime session on tensors on its device.

A ``Binding`` is used by one thread at a time. An input that the session reads on its device is bound at its address
there: a tensor on the device without a copy, an array of the host after one copy through pinned memory. An input that
the session reads on the host is bound there. Outputs are made on the device, and stay there or are copied to the host
once. With CUDA graphs the memory of inputs and outputs is fixed for each set of shapes, because a graph replays
addresses.

Invariant: the bytes of an input are at its address before the input is bound, because ``bind_input`` copies them at
once when a node on another device reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from remora.backends.onnxruntime.opening import run_options
from remora.backends.onnxruntime.plan import GraphPlan
from remora.backends.transfers import Places, Transfer
from remora.messages import DTYPES, Array, Tensor
from remora.tensors.device import Block, DeviceArray, Memory, on_host

_log = logging.getLogger(__name__)
_BFLOAT16 = 16  # TensorProto.DataType.BFLOAT16
_ON_HOST = ("cpu", 0)
_NEVER = -1
"""Graph number that means "run without a graph"."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class _Fixed(NamedTuple):
    """Memory and binding of one set of shapes, with the number of its graph."""

    binding: Any
    inputs: Mapping[str, Block]
    outputs: Sequence[DeviceArray]
    options: Any


class Binding:
    """Bound runs of a session for one instance.

    Args:
        runtime: the module ``onnxruntime``.
        inner: the session.
        memory: memory of the session's device.
        transfer: copies to and from that memory.
        types: wire datatypes of all inputs and outputs.
        entries: configuration entries of each run.
        graphs: which sets of shapes get a CUDA graph; None for no graphs.
    """

    def __init__(
        self,
        runtime: Any,
        inner: Any,
        memory: Memory,
        transfer: Transfer,
        types: Mapping[str, str],
        entries: Mapping[str, str],
        graphs: GraphPlan | None = None,
    ) -> None:
        self._options = partial(run_options, runtime, entries)
        self._inner = inner
        self._memory = memory
        self._transfer = transfer
        self._types = types
        self._device = _ON_HOST if memory.device[0] == 1 else ("cuda", memory.device[1])
        host_inputs = frozenset[str]() if self._device == _ON_HOST else inputs_on_host(inner)
        self._on_host = host_inputs or frozenset()
        """Names of the inputs that are bound in main memory."""
        # A graph replays the host inputs' values at capture, so sessions with host inputs get no graphs.
        self._graphs = graphs if host_inputs is not None and not host_inputs else None
        # The Python classes' checks cost ten times the calls; the engine and the C++ classes check as well.
        session = getattr(inner, "_sess", None)
        self._call = getattr(session, "run_with_iobinding", None)
        self._plain = self._options({} if graphs is None else {"gpu_graph_id": str(_NEVER)})
        self._fixed: dict[tuple[Shapes, tuple[str, ...]], _Fixed] = {}
        self._places = Places(memory)

    @property
    def replays(self) -> bool:
        """True if equal shapes may be answered by a CUDA graph."""
        return self._graphs is not None

    def run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], *, keep_on_device: bool) -> list[Tensor]:
        """Return the outputs ``wanted``, in that order, on the device where they may stay.

        Raises what ONNX Runtime raises.
        """
        outputs = self._graph_run(inputs, wanted) if self._graphs is not None else None
        if outputs is None:
            outputs = self._run(inputs, wanted, self._plain)
        elif keep_on_device:  # the next run overwrites a graph's outputs
            outputs = [array.as_shared().apart() for array in outputs]
        data: Sequence[Any] = outputs if keep_on_device else self._transfer.to_host(outputs)
        return [Tensor(name, self._types[name], value) for name, value in zip(wanted, data, strict=True)]

    def close(self) -> None:
        """Release memory and graphs."""
        self._fixed.clear()
        self._places.close()
        self._transfer.close()

    def _run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], options: Any) -> list[DeviceArray]:
        binding = self._inner.io_binding()
        copies: list[tuple[int, Array]] = []
        addresses: dict[str, int] = {}
        kept: list[Array] = []  # kept alive because the binding borrows their memory
        for name, array in inputs.items():
            if name in self._on_host:
                kept.append(np.ascontiguousarray(on_host(array)))
                addresses[name] = kept[-1].ctypes.data
            else:
                addresses[name] = self._places.of(name, array, copies)
        self._transfer.to_device(copies)
        for name, address in addresses.items():
            self._bind(binding.bind_input, name, inputs[name].shape, address)
        for name in wanted:
            binding.bind_output(name, *self._device)
        self._execute(binding, options)
        del kept
        values = binding.get_outputs()
        # The values are parts of the binding, so each keeps it alive.
        return [
            DeviceArray(self._types[name], value.shape(), self._memory, value.data_ptr(), (value, binding))
            for name, value in zip(wanted, values, strict=True)
        ]

    def _execute(self, binding: Any, options: Any) -> None:
        """Run the session.

        The CPU, CUDA and TensorRT providers synchronize their streams before a run returns. ``synchronize_outputs`` is
        not called, because for CUDA it waits for the whole device with the GIL held.
        """
        inner = getattr(binding, "_iobinding", None)
        if self._call is None or inner is None:
            self._inner.run_with_iobinding(binding, options)
        else:
            self._call(inner, options)

    def _bind(self, bind: Callable[..., None], name: str, shape: Sequence[int], address: int) -> None:
        datatype = self._types[name]
        kind: Any = _BFLOAT16 if datatype == "BF16" else DTYPES[datatype]
        bind(name, *(_ON_HOST if name in self._on_host else self._device), kind, list(shape), address)

    # -- CUDA graphs ------------------------------------------------------------------------------------------------

    def _graph_run(self, inputs: Mapping[str, Array], wanted: tuple[str, ...]) -> list[DeviceArray] | None:
        """Return the outputs of a graph, or None for shapes without a graph.

        The next run of the same shapes overwrites their memory.
        """
        assert self._graphs is not None
        shapes: Shapes = tuple(sorted((name, tuple(array.shape)) for name, array in inputs.items()))
        fixed = self._fixed.get((shapes, wanted))
        if fixed is None:
            if not self._graphs.wants(shapes, len(self._fixed)):
                return None
            return self._capture(shapes, inputs, wanted)
        self._fill(fixed.inputs, inputs)
        self._execute(fixed.binding, fixed.options)
        return _handed_out(fixed)

    def _capture(self, shapes: Shapes, inputs: Mapping[str, Array], wanted: tuple[str, ...]) -> list[DeviceArray]:
        """Return the outputs of a first run of shapes, whose graph is captured.

        If the capture fails, the instance runs without graphs from then on.
        """
        # The run without a graph gives the outputs' shapes and lets the libraries choose their kernels.
        outputs = self._run(inputs, wanted, self._plain)
        fixed = self._prepare(inputs, wanted, outputs)
        try:
            self._execute(fixed.binding, fixed.options)
        except Exception as error:  # ONNX Runtime's classes have no common parent but Exception
            _log.warning("a CUDA graph cannot be captured, so the instance runs without: %s", error)
            self._graphs = None
            return outputs
        self._fixed[shapes, wanted] = fixed
        return _handed_out(fixed)

    def _fill(self, blocks: Mapping[str, Block], inputs: Mapping[str, Array]) -> None:
        """Copy inputs into their fixed memory."""
        copies: list[tuple[int, Array]] = []
        for name, value in inputs.items():
            if isinstance(value, DeviceArray):
                if value.nbytes:
                    self._memory.copy(blocks[name].address, value.address, value.nbytes)
            else:
                copies.append((blocks[name].address, np.ascontiguousarray(value)))
        self._transfer.to_device(copies)

    def _prepare(self, inputs: Mapping[str, Array], wanted: tuple[str, ...], examples: Sequence[DeviceArray]) -> _Fixed:
        binding = self._inner.io_binding()
        blocks = {name: self._memory.take(array.nbytes) for name, array in inputs.items()}
        self._fill(blocks, inputs)
        for name, array in inputs.items():
            self._bind(binding.bind_input, name, array.shape, blocks[name].address)
        outputs = []
        for name, example in zip(wanted, examples, strict=True):
            block = self._memory.take(example.nbytes)
            self._bind(binding.bind_output, name, example.shape, block.address)
            outputs.append(DeviceArray(example.datatype, example.shape, self._memory, block.address, block.owner))
        return _Fixed(binding, blocks, outputs, self._options({"gpu_graph_id": str(len(self._fixed) + 1)}))


def _handed_out(fixed: _Fixed) -> list[DeviceArray]:
    return [DeviceArray(out.datatype, out.shape, out.memory, out.address, out.owner) for out in fixed.outputs]


def inputs_on_host(inner: Any) -> frozenset[str] | None:
    """Return the names of the inputs that a session reads in main memory.

    None if ONNX Runtime does not list them.
    """
    try:
        named = list(zip(inner.get_inputs(), inner.get_input_memory_infos(), strict=True))
    except Exception:  # an older version, or a session that cannot list one of its inputs
        return None
    return frozenset(each.name for each, info in named if info.name.lower().startswith("cpu") or "Pinned" in info.name)
