"""Addresses and the families of clients that reach them; and no other module opens a listening socket."""

from __future__ import annotations

import errno
import socket

import pytest

from conftest import ROOT
from remora.server import listening_sockets
from remora.server.http.exchange import peer_of
from remora.server.listening_sockets import is_numeric, listen

NEEDS_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6 with IPv4 in a socket")
PATIENCE_S = 60.0


def reaches(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        client.settimeout(PATIENCE_S)
        return client.connect_ex((host, port)) == 0


@NEEDS_IPV6
@pytest.mark.parametrize(
    ("address", "ipv4", "ipv6"),
    [
        ("::", True, True),
        ("0:0:0:0:0:0:0:0", True, True),
        ("", True, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", True, False),
        ("::ffff:127.0.0.1", True, False),
        ("::1", False, True),
    ],
)
def test_an_address_is_reached_by_its_families(address: str, ipv4: bool, ipv6: bool) -> None:
    assert is_numeric(address)
    with listen(address, 0, reuse_port=False) as listening:
        port = listening.getsockname()[1]
        assert (reaches("127.0.0.1", port), reaches("::1", port)) == (ipv4, ipv6)


def test_all_interfaces_are_those_of_ipv4_where_the_system_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def refuse_ipv6(address: tuple[str, int], *, family: int, **more: bool) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(address, family=family, **more)

    monkeypatch.setattr(listening_sockets.socket, "create_server", refuse_ipv6)
    with listen("::", 0, reuse_port=False) as listening:
        assert reaches("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(OSError, match="family"):
        listen("::1", 0, reuse_port=False)


@pytest.mark.parametrize("address", ["localhost", "example.com", "1.2.3", "::g"])
def test_a_name_is_not_numeric(address: str) -> None:
    assert not is_numeric(address)
    with pytest.raises(OSError, match="is not a numeric address"):
        listen(address, 0, reuse_port=False)


@NEEDS_IPV6
def test_a_client_of_ipv4_has_the_same_address_on_a_socket_of_both_families() -> None:
    class Transport:
        def __init__(self, peer: object) -> None:
            self._peer = peer

        def get_extra_info(self, _name: str) -> object:
            return self._peer

    with (
        listen("::", 0, reuse_port=False) as listening,
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])),
    ):
        accepted, peer = listening.accept()
        accepted.close()
    assert peer_of(Transport(peer)) == "127.0.0.1"  # type: ignore[arg-type]
    assert peer_of(Transport(("::1", 1, 0, 0))) == "::1"  # type: ignore[arg-type]


def test_no_other_module_of_the_server_opens_a_listening_socket() -> None:
    for folder in ("core/remora/server", "core/remora/management", "adapters/remora_adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            if "emulate" not in path.parts and path.name != "listening_sockets.py":
                assert "create_server((" not in path.read_text(), path
                assert "socket.create_server" not in path.read_text(), path
