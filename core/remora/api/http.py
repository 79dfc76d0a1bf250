"""Names for plug-ins: routes, bodies and answers of HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remora.api import lazily

if TYPE_CHECKING:
    from remora.protocols.api_keys import LOAD_CONTENT, KeyEntry, caller_of, digest_of, print_entries, read_entries
    from remora.protocols.json.long_lists import release
    from remora.protocols.json.printer import dumps
    from remora.protocols.json.reader import LONG_BYTES, MAX_DEPTH, loads
    from remora.protocols.json.tensors import flatten
    from remora.protocols.path_names import decode_name
    from remora.protocols.rest.content_encoding import inflate
    from remora.protocols.rest.infer import InferCodec, json_length
    from remora.protocols.rest.request import RequestLimits
    from remora.protocols.rest.response import ReplyFormat, serialized
    from remora.protocols.rest.routes import HOME, method_of, route
    from remora.server.held_mailbox import HeldMailbox
    from remora.server.http import deadlines
    from remora.server.http.asgi import V2App
    from remora.server.http.asgi_transfers import Receive, Scope, Send
    from remora.server.http.deadlines import HEADER
    from remora.server.http.large_bodies import LARGE_BYTES, LargeBodies
    from remora.server.http.predict import Predictor
    from remora.server.http.probes import PATHS
    from remora.server.http.rest import Later, RestService
    from remora.server.loop import LoopMailbox
    from remora.server.startup import with_workers

__getattr__ = lazily(
    __name__,
    {
        "remora.protocols.api_keys": "KeyEntry LOAD_CONTENT caller_of digest_of print_entries read_entries",
        "remora.protocols.json.long_lists": "release",
        "remora.protocols.json.printer": "dumps",
        "remora.protocols.json.reader": "LONG_BYTES MAX_DEPTH loads",
        "remora.protocols.json.tensors": "flatten",
        "remora.protocols.path_names": "decode_name",
        "remora.protocols.rest.content_encoding": "inflate",
        "remora.protocols.rest.infer": "InferCodec json_length",
        "remora.protocols.rest.request": "RequestLimits",
        "remora.protocols.rest.response": "ReplyFormat serialized",
        "remora.protocols.rest.routes": "HOME method_of route",
        "remora.server.held_mailbox": "HeldMailbox",
        "remora.server.http": "deadlines",
        "remora.server.http.asgi": "V2App",
        "remora.server.http.asgi_transfers": "Receive Scope Send",
        "remora.server.http.deadlines": "HEADER",
        "remora.server.http.large_bodies": "LARGE_BYTES LargeBodies",
        "remora.server.http.predict": "Predictor",
        "remora.server.http.probes": "PATHS",
        "remora.server.http.rest": "Later RestService",
        "remora.server.loop": "LoopMailbox",
        "remora.server.startup": "with_workers",
    },
)
