"""Which client a request has behind proxies, and by which scheme it came."""

from __future__ import annotations

import pytest

from remora.protocols.forwarding import TrustedProxies

PROXIES = TrustedProxies(("10.0.0.0/8, 192.168.1.1", "fd00::/8"))


def xff(*values: str) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((b"X-Forwarded-For", value.encode()) for value in values)


def forwarded(value: str) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"forwarded", value.encode()),)


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", xff("203.0.113.7"), "203.0.113.7"),
        ("203.0.113.9", xff("198.51.100.1"), "203.0.113.9"),
        ("10.0.0.1", xff("1.1.1.1, 203.0.113.7"), "203.0.113.7"),
        ("10.0.0.1", xff("1.1.1.1", "203.0.113.7"), "203.0.113.7"),
        ("10.0.0.1", xff("1.1.1.1, 203.0.113.7, 10.9.9.9"), "203.0.113.7"),
        ("10.0.0.1", xff("10.1.1.1, 10.2.2.2"), "10.1.1.1"),
        ("10.0.0.1", xff("203.0.113.7, unknown"), "10.0.0.1"),
        ("10.0.0.1", xff("203.0.113.7, , 10.9.9.9"), "10.9.9.9"),
        ("10.0.0.1", xff(""), "10.0.0.1"),
        ("10.0.0.1", xff("203.0.113.7:4711"), "203.0.113.7"),
        ("::ffff:10.0.0.1", xff("2001:db8::7"), "2001:db8::7"),
        ("fd00::1", xff("[2001:db8::7]:80"), "2001:db8::7"),
        ("192.168.1.1", forwarded("for=203.0.113.7;proto=https;by=10.0.0.1"), "203.0.113.7"),
        ("192.168.1.1", forwarded('For="[2001:db8::7]:4711"'), "2001:db8::7"),
        ("192.168.1.1", forwarded("for=1.1.1.1, for=203.0.113.7, for=10.3.3.3"), "203.0.113.7"),
        ("192.168.1.1", forwarded("for=203.0.113.7, for=_hidden"), "192.168.1.1"),
        ("192.168.1.2", forwarded("for=203.0.113.7"), "192.168.1.2"),
        ("10.0.0.1", forwarded('for=1.1.1.1;host="a, for=7.7.7.7"'), "1.1.1.1"),
        ("10.0.0.1", forwarded('for=1.1.1.1;host="a; for=7.7.7.7"'), "1.1.1.1"),
        ("10.0.0.1", forwarded(r'for=1.1.1.1;host="a\", for=7.7.7.7"'), "1.1.1.1"),
        ("10.0.0.1", forwarded(r'host="a\\", for="203.0.113.\7" ; x_1=2'), "203.0.113.7"),
        ("10.0.0.1", forwarded(', for=203.0.113.7; proto=https, , for="10.9.9.9" ,'), "203.0.113.7"),
        ("10.0.0.1", forwarded('for=6.6.6.6, for=7.7.7.7;host=", for=203.0.113.7'), "10.0.0.1"),
        ("10.0.0.1", forwarded('for=6.6.6.6, for=7.7.7.7;host="\\'), "10.0.0.1"),
        ("10.0.0.1", forwarded("for=6.6.6.6, for 7.7.7.7"), "10.0.0.1"),
        ("10.0.0.1", (*forwarded('for="6.6.6.6'), *forwarded("for=203.0.113.7")), "203.0.113.7"),
        ("", xff("203.0.113.7"), ""),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy(
    peer: str, headers: tuple[tuple[bytes, bytes], ...], client: str
) -> None:
    assert PROXIES.client_of(peer, headers) == client


def test_the_client_stays_the_same_when_it_is_asked_twice() -> None:
    """Front processes relay the address that they found."""
    for headers in (xff("203.0.113.7, 10.9.9.9"), xff("10.1.1.1, 10.2.2.2"), forwarded("for=10.4.4.4")):
        found = PROXIES.client_of("10.0.0.1", headers)
        assert PROXIES.client_of(found, headers) == found


def test_a_long_list_of_hops_is_not_followed_to_its_end() -> None:
    assert PROXIES.client_of("10.0.0.1", xff(", ".join(["203.0.113.7"] + ["10.5.5.5"] * 5000))) == "10.5.5.5"


@pytest.mark.parametrize(
    ("peer", "headers", "scheme"),
    [
        ("10.0.0.1", ((b"X-Forwarded-Proto", b"https"),), "https"),
        ("10.0.0.1", ((b"x-forwarded-proto", b"HTTPS, http"),), "https"),
        ("10.0.0.1", ((b"x-forwarded-proto", b"javascript"),), ""),
        ("10.0.0.1", forwarded("for=1.1.1.1;proto=https"), "https"),
        ("10.0.0.1", (), ""),
        ("203.0.113.9", ((b"x-forwarded-proto", b"https"),), ""),
    ],
)
def test_the_scheme_is_that_of_the_first_proxy(
    peer: str, headers: tuple[tuple[bytes, bytes], ...], scheme: str
) -> None:
    assert PROXIES.scheme_of(peer, headers) == scheme


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "proxy.example", "10.0.0.0/33", "10.0.0.0/8,"])
def test_other_words_are_no_networks(text: str) -> None:
    with pytest.raises(ValueError, match="--trusted-proxy="):
        TrustedProxies((text,))


def test_a_bounded_number_of_decisions_is_remembered() -> None:
    proxies = TrustedProxies(("10.0.0.0/8",))
    for number in range(5_000):
        assert not proxies.trusts(f"203.0.{number >> 8}.{number & 255}")
    assert proxies.trusts("10.0.0.1")
    assert len(proxies._known) < 4_500
