"""The V2 REST codec for inference; the law: the header of a binary request that was met before is not read again.

A request is a JSON header, perhaps with raw tensors after it [H14, B01], or nothing but the bytes of a model's
one input [B03]. `v2_request` reads it, `v2_reply` prints the answer; here is what makes both quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from remora.errors import InvalidArgumentError
from remora.messages import Data, InferForm, Response
from remora.protocols.rest.answer import HttpAnswer, Refusal
from remora.protocols.rest.request import DEFAULT_LIMITS, RequestLimits, read_request
from remora.protocols.rest.response import BinaryHeaders, ReplyFormat, ReplyPrinter, v2_binary_headers
from remora.tensors.shared_memory import DISABLED, Regions

_NOTHING_FORWARDED: Mapping[str, str] = {}
_RAW_FORM = InferForm(inputs=(), raw=True)
_ALL_BINARY = ReplyFormat.of(True, {})
_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
"""Header names that are refused as parameters in just this spelling, as by Triton's newer releases."""
_LEADING_NUMBER = re.compile(rb"[ \t\n\v\f\r]*+([+-]?)0*+([0-9]*+)")
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 16 * 1024
_MAX_KNOWN_TOTAL = 2 * 1024 * 1024


class _Known(NamedTuple):
    """A binary header that was read before: what it says, where its tensors lie, how long its body must be."""

    form: InferForm
    reply: ReplyFormat
    slices: tuple[slice, ...]
    body_length: int


class InferCodec:
    """Decodes requests and encodes answers. Keeps nothing but memos; to be used by one thread.

    ``limits`` is what a JSON request may take [H28].
    ``forward_pattern`` is searched for in the names of request headers, with the flags it was compiled with: those
    that have it become parameters [H25]. ``regions`` has the tensors that lie in shared memory.
    ``binary_headers`` makes the headers of answers with raw tensors.
    """

    def __init__(
        self,
        limits: RequestLimits = DEFAULT_LIMITS,
        forward_pattern: re.Pattern[str] | None = None,
        regions: Regions = DISABLED,
        binary_headers: BinaryHeaders = v2_binary_headers,
    ) -> None:
        self.limits = limits
        """What a JSON request may take."""
        self._forward = forward_pattern
        self.regions = regions
        """Where tensors in shared memory are."""
        self._known: dict[bytes, _Known] = {}
        self._known_bytes = 0
        self._printer = ReplyPrinter(binary_headers)
        self.forwards = forward_pattern is not None
        """Whether request headers may become parameters."""

    def twin(self, binary_headers: BinaryHeaders = v2_binary_headers) -> InferCodec:
        """A codec with the same settings, memos of its own and perhaps other headers."""
        return InferCodec(self.limits, self._forward, self.regions, binary_headers)

    def recall(self, body: bytes, header_length: int) -> tuple[InferForm, list[Data], ReplyFormat] | None:
        """What `decode` gives for a body whose binary header it has seen before; None when it has not.

        The short way for clients that send the same again and again. Nothing is forwarded on it.
        """
        known = self._known.get(body[:header_length])
        if known is None or not header_length <= known.body_length == len(body):
            return None
        view = memoryview(body)
        return known.form, [view[place] for place in known.slices], known.reply

    def decode(
        self,
        body: bytes | bytearray | memoryview,
        header_length: bytes | None,
        forwarded: Mapping[str, str] = _NOTHING_FORWARDED,
        model: str = "",
    ) -> tuple[InferForm, list[Data], ReplyFormat]:
        """The request in a body (already inflated), its tensors in the order of the form's inputs, and how to answer.

        ``header_length`` is the value of Inference-Header-Content-Length, None without one. ``forwarded`` comes from
        `forwarded`. ``model`` is named in some errors. Raw tensors are views of ``body``, JSON tensors flat arrays or
        lists of bytes; None stands for a shape with more than 2**63-1 elements. Equal binary headers give the same
        form object.

        Raises Refusal for a header length out of range [B04], RemoraError as `read_request` does.
        """
        length = len(body) if header_length is None else json_length(header_length, len(body))
        form, data, reply = self._decode(body, length, model) if length else _raw(body)
        if forwarded:
            # A header wins over a parameter of the same name in the body.
            form = replace(form, parameters={**form.parameters, **forwarded})
        return form, data, reply

    def _decode(
        self, body: bytes | bytearray | memoryview, length: int, model: str
    ) -> tuple[InferForm, list[Data], ReplyFormat]:
        view = memoryview(body)
        if length > _MAX_KNOWN_BYTES:
            return read_request(view, length, model, self.limits, self.regions)[:3]
        header = bytes(body[:length])
        known = self._known.get(header)
        if known is not None and known.body_length == len(body):
            return known.form, [view[place] for place in known.slices], known.reply
        form, data, reply, slices = read_request(view, length, model, self.limits, self.regions)
        # A header with an id or a sequence rarely comes twice: it would only push out those that do.
        if slices is not None and not reply.places and not form.id and not form.sequence_id:
            self._remember(header, _Known(form, reply, slices, len(body)))
        return form, data, reply

    def _remember(self, header: bytes, known: _Known) -> None:
        if self._known.pop(header, None) is not None:  # with a body of another length
            self._known_bytes -= len(header)
        while len(self._known) >= _MAX_KNOWN or self._known_bytes + len(header) > _MAX_KNOWN_TOTAL:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._known_bytes -= len(oldest)
        self._known[header] = known
        self._known_bytes += len(header)

    def forwarded(self, headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
        """The request headers that become parameters, as text [H25].

        Raises InvalidArgumentError for names that are Triton's own.
        """
        if self._forward is None:
            return _NOTHING_FORWARDED
        found = {}
        for key, value in headers:
            name = key.decode("latin-1")
            if self._forward.search(name):
                if name in _RESERVED or name.lower().startswith("triton_"):
                    raise InvalidArgumentError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
                found[name] = value.decode("utf-8", "surrogateescape")
        return found

    def encode(self, name: str, version: str, form: InferForm, response: Response, reply: ReplyFormat) -> HttpAnswer:
        """The answer of version ``version`` of the model ``name`` to the request ``form`` [H15, B07].

        Never raises for what a model may answer: outputs that JSON cannot carry become Triton's error [H17].
        """
        return self._printer.answer(name, version, form, response, reply)


def _raw(body: bytes | bytearray | memoryview) -> tuple[InferForm, list[Data], ReplyFormat]:
    return _RAW_FORM, [body], _ALL_BINARY


def json_length(text: bytes, body_length: int) -> int:
    """The JSON part's length that a header names, 0 for a raw request. Reads numbers as C's atoi [B03, Q01].

    Raises Refusal for a length that the body does not have [B04].
    """
    if text.isdigit() and len(text) <= 18:
        length = int(text)
        if length <= body_length:
            return length
    else:
        sign, digits = _LEADING_NUMBER.match(text).groups()  # type: ignore[union-attr]  # it matches any text
        # 18 digits are beyond any body; longer texts are never turned into a number.
        length = int(sign + digits[:18] or b"0") if digits else 0
    if 0 <= length <= body_length:
        return length
    shown = text.decode("latin-1")
    raise Refusal(400, f"inference header size should be in range (0, {body_length}), got: {shown}")
