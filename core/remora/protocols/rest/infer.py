"""V2 REST codec for inference, with a memo of binary request headers.

A request is a JSON header, optionally followed by raw tensors [H14, B01], or just the bytes of a model's only input
[B03]. `remora.protocols.rest.request` reads it, `remora.protocols.rest.response` prints the answer; the memo here makes
repeated requests fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from remora.messages import Data, InferForm
from remora.protocols.reserved_names import refuse_reserved
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.request import DEFAULT_LIMITS, RequestLimits, read_request
from remora.protocols.rest.response import BinaryHeaders, ReplyFormat, ReplyPrinter, v2_binary_headers
from remora.tensors.shared_memory import DISABLED, Regions

_NOTHING_FORWARDED: Mapping[str, str] = {}
_RAW_FORM = InferForm(inputs=(), raw=True)
_ALL_BINARY = ReplyFormat.of(True, {})
_LEADING_NUMBER = re.compile(rb"[ \t\n\v\f\r]*+([+-]?)0*+([0-9]*+)")
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 16 * 1024
_MAX_KNOWN_TOTAL = 2 * 1024 * 1024


class KnownHeader:
    """Binary header in the memo.

    ``slices`` are its tensors, ``body_length`` the length that its body must have.
    """

    __slots__ = ("body_length", "form", "reply", "slices")

    def __init__(self, form: InferForm, reply: ReplyFormat, slices: tuple[slice, ...], body_length: int) -> None:
        self.form = form
        self.reply = reply
        self.slices = slices
        self.body_length = body_length

    def parts(self, body: bytes | bytearray | memoryview) -> tuple[InferForm, list[Data], ReplyFormat]:
        """Return the result of `InferCodec.decode` for a body with this header."""
        return self.form, [*map(memoryview(body).__getitem__, self.slices)], self.reply


class InferCodec:
    """Decoder of inference requests and encoder of answers, for one thread.

    Memos are its only state.

    Args:
        limits: limits of a JSON request [H28].
        forward_pattern: searched for in the names of request headers, with the flags it was compiled with; matching
            headers become parameters [H25].
        regions: shared memory that tensors may name.
        binary_headers: makes the headers of answers with raw tensors.
        withholds: returns True for a header, by name and value, that never becomes a parameter.
    """

    def __init__(
        self,
        limits: RequestLimits = DEFAULT_LIMITS,
        forward_pattern: re.Pattern[str] | None = None,
        regions: Regions = DISABLED,
        binary_headers: BinaryHeaders = v2_binary_headers,
        withholds: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.limits = limits
        """Limits of a JSON request."""
        self._forward = forward_pattern
        self._withholds = withholds
        self._binary_headers = binary_headers
        self.regions = regions
        """Shared memory that tensors may name."""
        self._known: dict[bytes, KnownHeader] = {}
        self._known_bytes = 0
        self.encode = ReplyPrinter(binary_headers).answer
        """Returns the answer of a version of a model to a request; see `ReplyPrinter.answer`."""
        self.forwards = forward_pattern is not None
        """True if request headers may become parameters."""

    def twin(self, binary_headers: BinaryHeaders | None = None, limits: RequestLimits | None = None) -> InferCodec:
        """Return a codec with the same settings, separate memos and perhaps other headers or limits."""
        headers = binary_headers or self._binary_headers
        return InferCodec(limits or self.limits, self._forward, self.regions, headers, self._withholds)

    def recall(self, body: bytes, header_length: int) -> KnownHeader | None:
        """Return the binary header of a body if it is in the memo, else None.

        The same bytes give the same object. This is the fast path for clients that repeat a request; no headers are
        forwarded on it.
        """
        known = self._known.get(body[:header_length])
        return known if known is not None and header_length <= known.body_length == len(body) else None

    def decode(
        self,
        body: bytes | bytearray | memoryview,
        header_length: bytes | None,
        forwarded: Mapping[str, str] = _NOTHING_FORWARDED,
        model: str = "",
    ) -> tuple[InferForm, list[Data], ReplyFormat]:
        """Return the form, the tensors in the order of the form's inputs, and the reply format.

        Raw tensors are views of ``body``, JSON tensors flat arrays or lists of bytes; None marks a shape with more than
        2**63-1 elements. Equal binary headers give the same form object.

        Args:
            body: the body, already inflated.
            header_length: value of Inference-Header-Content-Length, None without one.
            forwarded: result of `forwarded`.
            model: model named in some errors.

        Raises Refusal for a header length out of range [B04], RemoraError and SlowTextError as `read_request` does.
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
            return known.parts(view)
        form, data, reply, slices = read_request(view, length, model, self.limits, self.regions)
        # A header with an id or a sequence rarely repeats and would only evict those that do.
        if slices is not None and not reply.places and not form.id and not form.sequence_id:
            self._remember(header, KnownHeader(form, reply, slices, len(body)))
        return form, data, reply

    def _remember(self, header: bytes, entry: KnownHeader) -> None:
        if self._known.pop(header, None) is not None:  # the same header with a body of another length
            self._known_bytes -= len(header)
        while len(self._known) >= _MAX_KNOWN or self._known_bytes + len(header) > _MAX_KNOWN_TOTAL:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._known_bytes -= len(oldest)
        self._known[header] = entry
        self._known_bytes += len(header)

    def forwarded(self, headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
        """Return the request headers that become parameters, as text [H25].

        Raises InvalidArgumentError for names that are reserved for Triton.
        """
        if self._forward is None:
            return _NOTHING_FORWARDED
        parameters = {}
        for key, value in headers:
            name = key.decode("latin-1")
            if self._forward.search(name):
                refuse_reserved(name)
                text = value.decode("utf-8", "surrogateescape")
                if self._withholds is None or not self._withholds(name, text):
                    parameters[name] = text
        return parameters


def _raw(body: bytes | bytearray | memoryview) -> tuple[InferForm, list[Data], ReplyFormat]:
    return _RAW_FORM, [body], _ALL_BINARY


def json_length(text: bytes, body_length: int) -> int:
    """Return the length of the JSON part that a header names, 0 for a raw request.

    Reads numbers as C's atoi [B03, Q01]. Raises Refusal for a length beyond the body [B04].
    """
    if text.isdigit() and len(text) <= 18:
        length = int(text)
        if length <= body_length:
            return length
    else:
        sign, digits = _LEADING_NUMBER.match(text).groups()  # type: ignore[union-attr]  # it matches any text
        # 18 digits exceed any body; longer texts are never converted
        length = int(sign + digits[:18] or b"0") if digits else 0
    if 0 <= length <= body_length:
        return length
    shown = text.decode("latin-1")
    raise Refusal(400, f"inference header size should be in range (0, {body_length}), got: {shown}")
