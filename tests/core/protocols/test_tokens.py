"""Tokens: each claim wrong, algorithms, keys of the issuer, and the roles that claims grant."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest

from remora.protocols.api_keys import Limits
from remora.protocols.tokens import (
    ALGORITHMS,
    SigningKeys,
    TokenError,
    TokenTerms,
    UnknownKeyError,
    Verified,
    is_token,
    read_limits,
    read_roles,
    verify,
)
from support.servers.issuer import AUDIENCE, ISSUER, Key, key_set, token

NOW = 1_800_000_000.0
TERMS = TokenTerms(ISSUER, (AUDIENCE,), leeway_s=30)
KEY, OTHER = Key("one"), Key("two")
KEYS = SigningKeys(key_set(KEY, OTHER))


def check(text: str, keys: SigningKeys = KEYS, terms: TokenTerms = TERMS, now_s: float = NOW) -> Verified:
    assert is_token(text.encode())
    return verify(text.encode(), keys, terms, now_s)


def refusal(text: str, keys: SigningKeys = KEYS, terms: TokenTerms = TERMS, now_s: float = NOW) -> str:
    with pytest.raises(TokenError) as caught:
        check(text, keys, terms, now_s)
    return str(caught.value)


def test_a_valid_token_names_its_subject_and_its_end() -> None:
    caller, until_s = check(token(KEY, NOW + 60))
    assert (caller.name, caller.roles, caller.limits) == ("jwt:ann", ("infer",), None)
    assert caller.title == "token of 'jwt:ann'"
    assert until_s == NOW + 90


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://other.example"}, "is of another issuer"),
        ({"iss": None}, "has no claim 'iss'"),
        ({"aud": "other"}, "is for another audience"),
        ({"aud": ["a", "b"]}, "is for another audience"),
        ({"aud": None}, "has no claim 'aud'"),
        ({"exp": NOW - 30}, "has expired"),
        ({"exp": None}, "has no claim 'exp'"),
        ({"exp": True}, "has a claim 'exp' that is not a time"),
        ({"exp": "soon"}, "has a claim 'exp' that is not a time"),
        ({"nbf": NOW + 31}, "is not valid yet"),
        ({"nbf": [1]}, "has a claim 'nbf' that is not a time"),
        ({"sub": None}, "has no claim 'sub'"),
        ({"sub": ""}, "has a claim 'sub' that is not a text"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(claims: dict[str, Any], reason: str) -> None:
    assert refusal(token(KEY, NOW + 60, **claims)) == reason


def test_the_leeway_holds_for_both_ends() -> None:
    assert check(token(KEY, NOW - 29.5)).until_s == NOW + 0.5
    assert check(token(KEY, NOW + 60, nbf=NOW + 30))


def test_one_of_several_audiences_is_enough() -> None:
    assert check(token(KEY, NOW + 60, aud=["x", AUDIENCE]))
    assert check(token(KEY, NOW + 60, aud="b"), terms=TERMS._replace(audiences=("a", "b")))


def test_a_changed_token_is_refused() -> None:
    head, claims, signature = token(KEY, NOW + 60).split(".")
    forged = base64.urlsafe_b64encode(base64.urlsafe_b64decode(claims + "==").replace(b"ann", b"bob")).rstrip(b"=")
    assert refusal(f"{head}.{forged.decode()}.{signature}") == "has a wrong signature"
    assert refusal(f"{head}.{claims}.AAAA") == "has a wrong signature"


def test_the_key_of_another_kid_does_not_count() -> None:
    assert refusal(token(KEY, NOW + 60, header={"kid": "two"})) == "has a wrong signature"


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"ES384", "ES512"}))
@pytest.mark.parametrize("names_algorithm", [True, False])
def test_each_asymmetric_algorithm_is_accepted(algorithm: str, names_algorithm: bool) -> None:
    key = Key("k", algorithm, names_algorithm=names_algorithm)
    assert check(token(key, NOW + 60), SigningKeys(key_set(key)))


def test_a_key_serves_its_algorithm_alone() -> None:
    key = Key("k", "RS256")
    keys = SigningKeys(key_set(key))
    key.algorithm = "PS256"
    with pytest.raises(UnknownKeyError):
        check(token(key, NOW + 60), keys)


def plain(header: dict[str, Any], secret: bytes | None = None) -> str:
    """A token that is unsigned, or signed with a shared secret."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "eve", "exp": NOW + 60, "roles": ["all"]}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signed = b".".join(parts)
    signature = b"" if secret is None else hmac.new(secret, signed, hashlib.sha256).digest()
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "ES256K", "", None, ["ES256"]])
def test_no_other_algorithm_is_accepted(algorithm: Any) -> None:
    assert refusal(plain({"alg": algorithm, "kid": "one"})) in (
        "is malformed",
        "has an algorithm other than " + ", ".join(ALGORITHMS),
    )


def test_a_public_key_is_never_a_shared_secret() -> None:
    """The classic confusion: an HMAC whose secret is the text of the public key."""
    for secret in (key_set(KEY), json.dumps(KEY.public).encode()):
        assert "algorithm other than" in refusal(plain({"alg": "HS256", "kid": "one"}, secret))


def test_a_critical_header_is_refused() -> None:
    assert refusal(token(KEY, NOW + 60, header={"crit": ["b64"], "b64": True})) in (
        "has a critical header, which this server does not know",
        "is malformed",
    )


@pytest.mark.parametrize("text", ["eyJ..", "eyJhbGciOiJFUzI1NiJ9.e30.", "eyJ.!!.x", "eyJhbGciOiJFUzI1NiJ9.e30.AA"])
def test_malformed_tokens_are_refused(text: str) -> None:
    assert refusal(text)


def test_a_nested_token_is_refused() -> None:
    nested = base64.urlsafe_b64encode(b'{"a":' + b"[" * 12_000).decode().replace("=", "")
    assert refusal(f"{nested}.e30.AA") == "is malformed"


def test_a_long_token_is_refused_before_it_is_read() -> None:
    assert refusal("eyJ" + "a" * 20_000 + ".e30.AA") == "is longer than 16384 bytes"


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", [lambda part: part + "=", lambda part: part + "==", lambda part: part + "\n",
                                    lambda part: part[:4] + "~" + part[4:]])  # fmt: skip
def test_a_token_has_one_text(place: int, change: Callable[[str], str]) -> None:
    parts = token(KEY, NOW + 60).split(".")
    assert check(".".join(parts))
    parts[place] = change(parts[place])
    assert refusal(".".join(parts)) == "is malformed"


def test_stray_bits_behind_a_signature_are_refused() -> None:
    text = token(KEY, NOW + 60)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    assert len(text.rpartition(".")[2]) % 4, "some bits of the last character are unused"
    other = text[:-1] + alphabet[alphabet.index(text[-1]) ^ 1]
    assert refusal(other) == "is malformed"


# -- keys -----------------------------------------------------------------------------------------------------------


def test_an_unknown_kid_is_its_own_error() -> None:
    with pytest.raises(UnknownKeyError):
        check(token(Key("three"), NOW + 60))


def test_without_a_kid_there_must_be_one_key() -> None:
    bare = token(KEY, NOW + 60, header={"kid": None})
    assert check(bare, SigningKeys(key_set(KEY)))
    with pytest.raises(UnknownKeyError):
        check(bare)


def test_keys_for_encryption_and_shared_keys_do_not_count() -> None:
    encryption = KEY.public | {"use": "enc"}
    shared = {"kty": "oct", "k": "AAAA", "kid": "s", "alg": "HS256"}
    assert len(SigningKeys(json.dumps({"keys": [encryption, shared, OTHER.public]}))) == 1
    with pytest.raises(ValueError, match="no public key"):
        SigningKeys(json.dumps({"keys": [encryption, shared]}))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"keys": {}}', '{"keys": [1]}', '{"keys": []}', "[" * 100_000])
def test_other_documents_are_no_key_sets(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|expected a JSON Web Key Set|no public key"):
        SigningKeys(text)


def test_a_damaged_key_is_reported_when_it_is_used() -> None:
    keys = SigningKeys(json.dumps({"keys": [{"kty": "EC", "crv": "P-256", "kid": "one", "x": "!", "y": "!"}]}))
    assert refusal(token(KEY, NOW + 60), keys) == "is signed by a key that is not usable"


# -- roles and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "claim", "words", "roles"),
    [
        ({"roles": ["infer", "read"]}, "roles", (), ("infer", "read")),
        ({"roles": "infer admin"}, "roles", (), ("infer",)),
        ({"roles": None}, "roles", (), ()),
        ({"roles": {"infer": 1}}, "roles", (), ()),
        ({"roles": [1, None, "read"]}, "roles", (), ("read",)),
        ({"scope": "openid ml"}, "scope", ("ml=infer,read",), ("infer", "read")),
        ({"realm_access": {"roles": ["ops"]}}, "realm_access.roles", ("ops=all",), ("all",)),
        ({"https://a.b/roles": ["ops"]}, "https://a.b/roles", ("ops=control",), ("control",)),
        ({"roles": ["all"]}, "roles", ("ops=all",), ()),
        ({"roles": None}, "roles", ("*=infer",), ("infer",)),
        ({"roles": ["*"]}, "roles", ("ops=all",), ()),
        ({"roles": ["a=b"]}, "roles", ("a=b=infer",), ("infer",)),
    ],
)
def test_claims_grant_roles(claims: dict[str, Any], claim: str, words: tuple[str, ...], roles: tuple[str, ...]) -> None:
    terms = TERMS._replace(roles_claim=claim, roles_of=read_roles(words))
    caller = check(token(KEY, NOW + 60, **{"roles": None, **claims}), terms=terms).caller
    assert caller.roles == roles
    assert bool(caller.permissions) == bool(roles)


@pytest.mark.parametrize("word", ["x", "=infer", "x=", "x=infer,", "x=admin"])
def test_a_wrong_role_is_named(word: str) -> None:
    with pytest.raises(ValueError, match="--jwt-role"):
        read_roles((word,))


def test_limits_hold_for_each_subject() -> None:
    limits = read_limits(("requests-per-second=0.5", "burst=3", "concurrent=2"))
    assert limits == Limits(0.5, 3, 2)
    assert check(token(KEY, NOW + 60), terms=TERMS._replace(limits=limits)).caller.limits == limits


@pytest.mark.parametrize("word", ["x=1", "burst", "burst=1.5", "burst=-1", "requests-per-second=nan", "concurrent=x"])
def test_a_wrong_limit_is_named(word: str) -> None:
    with pytest.raises(ValueError, match="--jwt-limit"):
        read_limits((word,))


def test_a_subject_with_control_characters_stays_on_its_line() -> None:
    assert check(token(KEY, NOW + 60, sub="a\nb\x1b[1m key=c")).caller.name == "jwt:a?b?[1m?key=c"
    assert len(check(token(KEY, NOW + 60, sub="x" * 5000)).caller.name) == 132


def test_api_keys_do_not_look_like_tokens() -> None:
    assert not any(map(is_token, (b"rk_abc", b"eyJhbGciOiJub25l", b"a.b.c")))
