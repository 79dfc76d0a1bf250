"""V2 over HTTP, all of it under one name; the law: pure functions, each found in the module that explains it.

route                        which action a method and path ask for          v2_routes
InferCodec, ReplyFormat,
v2_binary_headers            inference requests and answers                  v2_infer, v2_request, v2_reply
decode_call, encode_result   management requests and answers                 v2_calls
answer_region                shared memory: no engine is asked               v2_regions
inflate, choose_encoding,
compress                     compressed bodies                               content_encoding
encode_error, Refusal        errors of the engine, refusals of HTTP itself   http_answer
"""

from __future__ import annotations

from remora.protocols.rest.answer import HttpAnswer, Refusal, encode_error
from remora.protocols.rest.content_encoding import choose_encoding, compress, inflate
from remora.protocols.rest.infer import InferCodec
from remora.protocols.rest.management import decode_call, encode_result
from remora.protocols.rest.response import BinaryHeaders, ReplyFormat, v2_binary_headers
from remora.protocols.rest.routes import Route, route
from remora.protocols.shared_memory import answer_region

__all__ = [
    "BinaryHeaders",
    "HttpAnswer",
    "InferCodec",
    "Refusal",
    "ReplyFormat",
    "Route",
    "answer_region",
    "choose_encoding",
    "compress",
    "decode_call",
    "encode_error",
    "encode_result",
    "inflate",
    "route",
    "v2_binary_headers",
]
