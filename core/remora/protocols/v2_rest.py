"""V2 over HTTP, all of it under one name; the law: pure functions, each found in the module that explains it.

route                        which action a method and path ask for          v2_routes
InferCodec, ReplyFormat      inference requests and answers                  v2_infer, v2_request, v2_reply
decode_call, encode_result   management requests and answers                 v2_calls
immediate                    answers that need no engine                     v2_calls
inflate, choose_encoding,
compress                     compressed bodies                               content_encoding
encode_error, Refusal        errors of the engine, refusals of HTTP itself   http_answer
"""

from __future__ import annotations

from remora.protocols.content_encoding import choose_encoding, compress, inflate
from remora.protocols.http_answer import HttpAnswer, Refusal, encode_error
from remora.protocols.v2_calls import decode_call, encode_result, immediate
from remora.protocols.v2_infer import InferCodec
from remora.protocols.v2_reply import ReplyFormat
from remora.protocols.v2_routes import Route, route

__all__ = [
    "HttpAnswer",
    "InferCodec",
    "Refusal",
    "ReplyFormat",
    "Route",
    "choose_encoding",
    "compress",
    "decode_call",
    "encode_error",
    "encode_result",
    "immediate",
    "inflate",
    "route",
]
