"""The check of API keys and tokens, the same for every port, protocol and route.

`KeyCheck` holds the keys and counts failures; `TokenCheck` verifies the tokens. `KeyCheck.over` stands in front of a
port's HTTP service and `KeyCheck.over_calls` in front of a gRPC transport: a request without a valid key passes only if
it needs none: a probe, or the page, which has no data. What the key permits is checked by the head, so that the body is
not read, and again where the meaning of the request is known: in `AccessRules.locked`.

The decision is remembered with the request's head and made again when the keys have changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from remora.errors import PermissionDeniedError
from remora.messages import Buffer
from remora.options.roles import INFER
from remora.protocols.api_keys import (
    LOAD_CONTENT,
    OPEN,
    Caller,
    KeyEntry,
    Keys,
    call_of,
    credential_of,
    is_credential,
    parse_word,
    permission_of_action,
    permission_of_call,
    read_entries,
)
from remora.protocols.http1 import Head
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Opener, Receiver, Stream
from remora.protocols.rates import PeerBudget
from remora.protocols.rest.answer import Headers, HttpAnswer, Refusal
from remora.protocols.rest.routes import method_of, route
from remora.protocols.tokens import IssuerError, TokenError, is_token
from remora.server.host_routes import HostRoute, RouteTable, routes_of
from remora.server.http.access_rules import Denied
from remora.server.http.exchange import Answerer, Cancellable, Exchange, Service, binder_of, respond
from remora.server.http.head_plan import action_of_page
from remora.server.http.http2 import OpenRequest
from remora.server.http.probes import PATHS as PROBES
from remora.server.http.route_groups import find_group
from remora.server.key_limits import (
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    CountedExchange,
    Denial,
    Usage,
)

if TYPE_CHECKING:
    from remora.protocols.forwarding import ClientOf
    from remora.server.token_check import TokenCheck

_log = logging.getLogger("remora.keys")

_LOOK_S = 1.0
"""Interval at which the file of keys is looked at."""
_FAILURES_A_SECOND, _FAILURES_AT_ONCE = 1 / 6, 10.0
"""Wrong keys that a peer may send: ten at once, then ten a minute."""
_LOG_S = 60.0
_V2_PROBES = ("/v2/health/live", "/v2/health/ready")

_MISSING = "this server requires an API key: send it as 'X-API-Key: KEY' or 'Authorization: Bearer KEY'"
_MISSING_TOKEN = "this server requires a token or an API key: send it as 'Authorization: Bearer TOKEN'"
_UNKNOWN = "the API key is not valid on this server"
_MOST_USAGES = 4096
_MOST_DECIDED, _MOST_DECIDED_BYTES = 4096, 4096
"""Remembered decisions of a kind, so that a head never seen costs no more than a lookup, and the most bytes of one."""
_NO_ROUTES = RouteTable()


T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound="tuple[str | bytes | None, ...]")
V = TypeVar("V")
_DecidedCalls = dict[tuple[bytes, bytes | None], "Usage | None"]
"""Counts of permitted gRPC calls, None without limits, by path and credential."""
_Request = tuple[str, str, "bytes | None", "bytes | None"]
"""Method, path, ``X-API-Key`` and ``Authorization`` of a request."""


_PERMITTED_NOW = Denial(UNAVAILABLE, "the API keys of this server have changed just now: try again", 1.0)
"""Refusal of a request that is permitted, but whose body was not read because it was not permitted then."""


def permission_of_head(head: Head, row: HostRoute | None) -> str:
    """Return the permission that a request needs by its head.

    It is known for the route of the platform, ``row``, for paths of V2 and of groups, and for the server's own pages.
    `OPEN` stands for other paths: none but the service of the host has a route there.
    """
    target = None if row is None else row.target_of(head)
    if row is not None and target is None:
        return permission_of_action(row.action, head.method)
    method, path = (head.method, head.path) if target is None else (method_of(target), target)
    if path.startswith("/v2/") or path == "/v2":
        return _permission_of_v2(method, path)
    group = find_group(path)
    action = action_of_page(path) if group is None else group.action_of(method, path)
    return permission_of_action(action, method) if action else OPEN


def _permission_of_v2(method: str, path: str) -> str:
    try:
        action = route(method, path).action
    except Refusal as refusal:
        action = refusal.action or action_of_page(path)
    return permission_of_action(action, method) if action else OPEN


def denial_of(caller: Caller | None, permission: str) -> Denial | None:
    """Return why a caller may not do what needs ``permission``, or None if it may."""
    if permission == OPEN:
        return None
    if caller is None:
        return Denial(UNAUTHENTICATED, _MISSING)
    if permission in caller.permissions:
        return None
    roles = f"the role {' and '.join(caller.roles)}, which does" if caller.roles else "no role, which does"
    return Denial(PERMISSION_DENIED, f"the {caller.title} has {roles} not permit '{permission}'")


class KeyCheck:
    """Keys of a server and the failures of its peers. Use it in the loop's thread.

    Args:
        words: entries of ``--api-key``.
        path: file of keys, or "".
        now: monotonic time in seconds.
        tokens: check of tokens; None if they are not accepted.
        client_of: finds the clients behind trusted proxies.

    Raises ValueError if the file cannot be read or two keys have the same name.
    """

    def __init__(
        self,
        words: Sequence[str],
        path: str,
        now: Callable[[], float],
        tokens: TokenCheck | None = None,
        client_of: ClientOf | None = None,
    ) -> None:
        self._client_of = client_of
        self._words = tuple(parse_word(word) for word in words)
        self._path = path
        self._now = now
        self._tokens = tokens
        if tokens is not None:
            tokens.changed = self.renew
        self.epoch = object()
        """Changes whenever callers may have changed."""
        self._seen: object = None
        self._failures = PeerBudget(_FAILURES_A_SECOND, _FAILURES_AT_ONCE)
        self._logged_at = -_LOG_S
        self._change_level, self._error_level = logging.INFO, logging.ERROR
        self._lock = threading.Lock()
        self._usages: dict[str, Usage] = {}
        self._decided_calls: _DecidedCalls = {}
        self._timer: asyncio.TimerHandle | None = None
        self.denied = {"no key": 0, "wrong key": 0, "too many wrong keys": 0}
        """Requests refused for want of a valid key, by reason."""
        try:
            self.keys = self._read()
        except (OSError, ValueError) as error:
            raise ValueError(f"--api-keys-file={path}: {_reason(error)}") from error

    def _read(self) -> Keys:
        entries: tuple[KeyEntry, ...] = ()
        if self._path:
            with open(self._path, encoding="utf-8") as file:
                self._seen = _identity(os.fstat(file.fileno()))
                entries = read_entries(file.read())
        return Keys((*self._words, *entries))

    # -- changes of the file ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the files again that have changed. Call it in a loop's thread."""
        if self._path:
            self.reread()
        if self._tokens is not None:
            self._tokens.reread()

    def follow(self) -> None:
        """Refresh now and every second until `close`."""
        try:
            self.refresh()
        finally:  # an error of one refresh must not end them
            if self._path or self._tokens is not None:
                self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self.follow)

    def log_no_changes(self) -> None:
        """Log changes of keys at the debug level, because another process logs them."""
        self._change_level = self._error_level = logging.DEBUG
        if self._tokens is not None:
            self._tokens.log_no_changes()

    def close(self) -> None:
        """Follow the file no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def reread(self) -> None:
        """Read the file of keys if it has changed. The previous keys stay if it cannot be read."""
        seen = self._seen
        try:
            if _identity(os.stat(self._path)) == seen:
                return
            self.keys = self._read()
        except (OSError, ValueError) as error:
            self._seen = None
            if seen is not None:  # once for each change
                text = "the API keys stay as they were: %s: %s"
                _log.log(self._error_level, text, self._path, _reason(error))
        else:
            self.renew()
            _log.log(self._change_level, "%d API keys from %s", len(self.keys), self._path)

    def renew(self) -> None:
        """Have all decisions made again that are remembered."""
        self.epoch = object()
        self._decided_calls.clear()

    # -- headers ----------------------------------------------------------------------------------------------------

    withholds = staticmethod(is_credential)
    """Returns True for a header that is never passed on to models, because it holds a key or token."""

    # -- ports ------------------------------------------------------------------------------------------------------

    def over(self, service: Service) -> Service:
        """Return the HTTP service of a port behind the check of keys."""
        return _Guarded(service, self)

    def over_calls(self, open_call: OpenRequest) -> OpenRequest:
        """Return what opens gRPC calls behind the check of keys."""
        return partial(_CheckedCall, self, self._decided_calls, open_call)

    def decide_call(self, path: bytes, caller: Caller | None) -> Usage | Literal[False] | None:
        """Return False if a call is not permitted, else the count of a limited caller's requests."""
        if denial_of(caller, permission_of_call(path.decode("latin-1"))) is not None:
            return False
        return self.usage_of(caller)

    def renewed(self, decide: Callable[[T], Callable[..., R]], subject: T) -> Callable[..., R]:
        """Return what ``decide(subject)`` returns, decided again after `renew`."""
        return _Renewed(self, decide, subject)

    def usage_of(self, caller: Caller | None) -> Usage | None:
        """Return the count of a caller's requests, None for a caller without limits."""
        if caller is None or caller.limits is None:
            return None
        usage = self._usages.get(caller.name)
        if usage is None or usage.limits != caller.limits:
            if len(self._usages) >= _MOST_USAGES:  # tokens may have any number of subjects
                self._usages = {name: kept for name, kept in self._usages.items() if not kept.is_idle}
                self.renew()
            usage = self._usages[caller.name] = Usage(caller.title, caller.limits, self._now)
        return usage

    # -- decisions --------------------------------------------------------------------------------------------------

    def caller(self, headers: Headers) -> Caller | None:
        """Return who holds the key or token among the headers, None without a valid one."""
        credential = credential_of(headers)
        if credential is None:
            return None
        if self._tokens is not None and is_token(credential):
            found = self._tokens.find(credential)
            if found is not None:
                return found
        return self.keys.find(credential)

    def reads_body(self, head: Head, routes: RouteTable = _NO_ROUTES) -> bool:
        """Return False for a probe, and for a request that its key does not permit.

        ``routes`` are those of the port's platform.
        """
        caller = self.caller(head.headers)
        if caller is None:
            return False
        return denial_of(caller, permission_of_head(head, routes.find(head.method, head.path))) is None

    def name_of(self, headers: Headers) -> str:
        """Return the name of the valid key among the headers, "" without one."""
        caller = self.caller(headers)
        return "" if caller is None else caller.name

    def name_by(self, carrier: Callable[[bytes], bytes | None]) -> str:
        """Return the name of a valid key; ``carrier`` returns a header by its lower-case name."""
        found = ((name, carrier(name)) for name in (b"authorization", b"x-api-key"))
        return self.name_of(tuple((name, value) for name, value in found if value is not None))

    def deny_action(self, head: Head, action: str) -> HttpAnswer | None:
        """Return the refusal of ``action`` by the roles of the caller, None if they permit it."""
        denial = denial_of(head.caller, permission_of_action(action, head.method))
        return None if denial is None else denial.answer()

    def permits_inference(self, headers: Headers) -> bool:
        """Return True if the key among the headers permits inference without limits."""
        caller = self.caller(headers)
        return caller is not None and caller.limits is None and INFER in caller.permissions

    def permits_call(self, path: str, headers: Headers) -> bool:
        """Return True if a gRPC call with this path and these headers may be served."""
        return denial_of(self.caller(headers), permission_of_call(path)) is None

    def check_content(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raise PermissionDeniedError if a gRPC call's key may not load what a request brings."""
        headers = tuple((name.encode(), each if isinstance(each, bytes) else each.encode()) for name, each in metadata)
        denial = denial_of(self.caller(headers), permission_of_action(LOAD_CONTENT, "POST"))
        if denial is not None:
            raise PermissionDeniedError(denial.text)

    def deny_call(self, path: str, headers: Headers, peer: str) -> Denial:
        """Return the refusal of a gRPC call that is not permitted, and count it."""
        caller = self.caller(headers)
        denial = None if caller is None else denial_of(caller, permission_of_call(path))
        return denial or self.deny(headers, peer)

    def deny(self, headers: Headers, peer: str) -> Denial:
        """Return the refusal of a request without a valid key, and count it."""
        credential = credential_of(headers)
        if credential is None:
            self.denied["no key"] += 1
            return Denial(UNAUTHENTICATED, _MISSING if self._tokens is None else _MISSING_TOKEN)
        now, reason = self._now(), _UNKNOWN
        if self._client_of is not None:
            peer = self._client_of(peer, headers)
        if self._tokens is not None and is_token(credential):
            try:
                self._tokens.verify(credential)
            except IssuerError as error:
                return Denial(UNAVAILABLE, f"the token {error}", 1.0)
            except TokenError as error:
                reason = f"the token {error}"
            else:
                self.renew()
                return Denial(UNAVAILABLE, "the token has become valid just now: try again", 1.0)
        with self._lock:  # grpcio refuses calls in other threads
            wait_s = self._failures.take(peer, now)
            self.denied["too many wrong keys" if wait_s else "wrong key"] += 1
        if wait_s:
            return Denial(RESOURCE_EXHAUSTED, "too many requests with wrong API keys: try again later", wait_s)
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            kind = "API key" if reason is _UNKNOWN else "token"
            _log.warning("a client%s sent a wrong %s", f" at {peer}" if peer else "", kind)
        return Denial(UNAUTHENTICATED, reason)


class _Renewed(Generic[T, R]):
    """Decision about a subject, and the epoch of keys for which it holds.

    Calling it acts on the decision for the current keys. One is kept for each head, so it is a single object.
    """

    __slots__ = ("_act", "_check", "_decide", "_epoch", "_subject")

    def __init__(self, check: KeyCheck, decide: Callable[[T], Callable[..., R]], subject: T) -> None:
        self._check = check
        self._decide = decide
        self._subject = subject
        self._epoch = check.epoch
        self._act = decide(subject)

    def __call__(self, *arguments: Any) -> R:
        epoch = self._check.epoch
        if epoch is not self._epoch:
            self._act = self._decide(self._subject)
            self._epoch = epoch  # now, because an error of the decision must leave no older one in force
        return self._act(*arguments)


def _remember(decided: dict[K, V], request: K, decision: V) -> None:
    """Keep the decision about a request of a valid caller, whose parts are texts or bytes."""
    if sum(len(part) for part in request if part is not None) > _MOST_DECIDED_BYTES:
        return
    if len(decided) >= _MOST_DECIDED:
        decided.clear()  # or a caller with many paths would keep out all others
    decided[request] = decision


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


# -- HTTP -------------------------------------------------------------------------------------------------------------


@runtime_checkable
class OpenService(Protocol):
    """Service with paths that need no key: probes of its platform, and a page without data."""

    @property
    def open_paths(self) -> Container[str]:
        """These paths, for GET and HEAD."""


class _Guarded:
    """Service that lets requests with a valid key through, and those that need none."""

    def __init__(self, service: Service, keys: KeyCheck) -> None:
        self._bind = binder_of(service)
        self.keys = keys
        self._open: Container[str] = service.open_paths if isinstance(service, OpenService) else ()
        self._routes = RouteTable(routes_of(service))
        self._epoch = keys.epoch
        self._permitted: dict[_Request, tuple[Caller, Usage | None]] = {}

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Cancellable | None:
        """Answer one request; see `Service.handle`."""
        return self.decide(head)(body, exchange)

    def bind(self, head: Head) -> Answerer:
        """See `BindingService.bind`."""
        return _GuardedHead(self, head)

    def reads_body(self, head: Head) -> bool:
        """See `HeadReadingService`."""
        return self.keys.reads_body(head, self._routes)

    def decide(self, head: Head) -> Answerer:
        """Return what answers requests with this head, by the current keys."""
        if self.keys.epoch is not self._epoch:
            self._epoch, self._permitted = self.keys.epoch, {}
        request = head.method, head.path, head.get(b"x-api-key"), head.get(b"authorization")
        known = self._permitted.get(request)
        # The body was not read by a newer decision than a remembered one, and only one of several keys is looked up.
        if known is None or head.unread or head.repeats or head.notes is not None:
            return self._decide_anew(head, request)
        return self._bound(head, known[0], known[1])

    def _decide_anew(self, head: Head, request: _Request) -> Answerer:
        keys = self.keys
        caller, usage = keys.caller(head.headers), None
        if caller is None and not self._is_open(head):
            return partial(self._refuse, head)
        if caller is not None:
            row = self._routes.find(head.method, head.path)
            denial = denial_of(caller, permission_of_head(head, row))
            if denial is None and head.unread:
                denial = _PERMITTED_NOW
            if denial is not None:
                return partial(respond, self._rendered(denial, head))
            usage = keys.usage_of(caller)
            if not head.repeats and (row is None or not row.redirect):  # which another header decides
                _remember(self._permitted, request, (caller, usage))
        if head.notes is not None or caller is None:  # notes may hold what was decided about another key
            head = head.to(head.path)
        if caller is None:
            head.query = ""  # the details of a probe are for holders of a key
        return self._bound(head, caller, usage)

    def _bound(self, head: Head, caller: Caller | None, usage: Usage | None) -> Answerer:
        head.caller = caller
        return self._bind(head) if usage is None else partial(self._count, usage, head, self._bind(head))

    def _is_open(self, head: Head) -> bool:
        path = head.path
        return head.method in ("GET", "HEAD") and (path in PROBES or path in _V2_PROBES or path in self._open)

    def _refuse(self, head: Head, _body: Buffer, exchange: Exchange) -> None:
        exchange.respond(self._rendered(self.keys.deny(head.headers, exchange.peer), head))

    def _rendered(self, denial: Denial, head: Head) -> HttpAnswer:
        """Return a refusal in the form of the route's own protocol, which its clients read."""
        answer = denial.answer()
        is_platforms = self._routes.find(head.method, head.path) is not None
        group = None if is_platforms else find_group(head.path)
        return answer if group is None else group.refuse(Denied(answer), head.path)

    def _count(
        self, usage: Usage, head: Head, answer: Answerer, body: Buffer, exchange: Exchange
    ) -> Cancellable | None:
        """Answer a request of a limited key."""
        denial = usage.begin()
        if denial is not None:
            exchange.respond(self._rendered(denial, head))
            return None
        return answer(body, CountedExchange(exchange, usage))


class _GuardedHead:
    """Head of requests behind the check, with the decision about it by the keys of an epoch."""

    __slots__ = ("_answer", "_epoch", "_guard", "_head")

    def __init__(self, guard: _Guarded, head: Head) -> None:
        self._guard = guard
        self._head = head
        self._epoch = guard.keys.epoch
        self._answer = guard.decide(head)

    def __call__(self, body: Buffer, exchange: Exchange) -> Cancellable | None:
        epoch = self._guard.keys.epoch
        if epoch is not self._epoch:
            self._answer = self._guard.decide(self._head)
            self._epoch = epoch  # see `_Renewed`
        return self._answer(body, exchange)


# -- gRPC -------------------------------------------------------------------------------------------------------------


class _CheckedCall:
    """Opener of gRPC calls with the same header fields, for an epoch of keys."""

    __slots__ = ("_decided", "_epoch", "_fields", "_keys", "_open_call", "_opener")

    def __init__(self, keys: KeyCheck, decided: _DecidedCalls, open_call: OpenRequest, fields: Fields) -> None:
        self._keys = keys
        self._decided = decided
        self._open_call = open_call
        self._fields = fields
        self._decide()

    def __call__(self, link: Stream) -> Receiver | None:
        if self._keys.epoch is not self._epoch:
            self._decide()
        return self._opener(link)

    def _decide(self) -> None:
        keys, fields = self._keys, self._fields
        call = path, _ = call_of(fields)
        usage: Usage | Literal[False] | None = self._decided.get(call, False)  # only permitted calls are there
        if usage is False:
            caller = keys.caller(fields)
            usage = keys.decide_call(path, caller)
            if usage is not False and caller is not None:  # an open call may have any wrong key
                _remember(self._decided, call, usage)
        self._opener: Opener
        if usage is None:
            self._opener = self._open_call(fields)
        elif usage is False:
            self._opener = partial(_refuse_call, keys, path.decode("latin-1"), fields)
        else:
            self._opener = partial(_open_counted, usage, self._open_call(fields))
        self._epoch = keys.epoch  # now, as in `_Renewed`


def _open_counted(usage: Usage, opener: Opener, link: Stream) -> Receiver | None:
    """Open a call of a limited key."""
    from remora.server.grpc.call import GrpcCall

    denial = usage.begin()
    if denial is not None:
        _refuse_with(denial, link)
        return None
    call = opener(link)
    if not (isinstance(call, GrpcCall) and call.add_callback(usage.end)):
        usage.end()
    return call


def _refuse_call(keys: KeyCheck, path: str, fields: Fields, link: Stream) -> None:
    _refuse_with(keys.deny_call(path, fields, link.peer), link)


def _refuse_with(denial: Denial, link: Stream) -> None:
    from remora.protocols.grpc.framing import trailers  # imported here, because most servers refuse no call

    link.headers(trailers(denial.status, denial.text, alone=True), end=True)
