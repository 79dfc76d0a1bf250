"""Verification of JSON Web Tokens (RFC 7519) and the roles that their claims grant. Pure.

Time is an argument. Signatures are verified by PyJWT, with the asymmetric algorithms of `ALGORITHMS` alone, because a
server holds only public keys.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remora.options.roles import ROLES
from remora.protocols.api_keys import Caller, Limits, caller_of_token

ALGORITHMS: Mapping[str, str] = {
    "RS256": "RSA",
    "RS384": "RSA",
    "RS512": "RSA",
    "PS256": "RSA",
    "PS384": "RSA",
    "PS512": "RSA",
    "ES256": "EC",
    "ES384": "EC",
    "ES512": "EC",
    "EdDSA": "OKP",
}
"""Accepted algorithms and the types of their keys (RFC 7518, RFC 8037)."""
ANY = "*"
"""Value of a claim that stands for every token."""
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521", "EdDSA": "Ed25519"}
_MOST_BYTES = 16_384
_MOST_KEYS = 256
_NAME_SIZE = 128
_PREFIX = "jwt:"


class TokenTerms(NamedTuple):
    """What a token must say, and what it then permits.

    ``roles_claim`` is the path of a claim, with dots between the members. ``roles_of`` maps its values to roles; empty,
    a value is the name of a role.
    """

    issuer: str
    audiences: tuple[str, ...]
    leeway_s: float = 0.0
    roles_claim: str = "roles"
    roles_of: Mapping[str, tuple[str, ...]] = {}
    limits: Limits = Limits()


class Verified(NamedTuple):
    """Holder of a valid token, and its expiry in seconds since the epoch."""

    caller: Caller
    until_s: float


class TokenError(Exception):
    """Token that is not valid; the text completes "the token"."""


class UnknownKeyError(TokenError):
    """Token that names a key which is not among the signing keys, perhaps not yet."""


class IssuerError(TokenError):
    """Token that cannot be verified while the issuer's keys are unknown."""

    def __init__(self) -> None:
        super().__init__("cannot be verified now, because the keys of its issuer are being fetched: try again later")


class SigningKeys:
    """Public keys of a JSON Web Key Set (RFC 7517). Immutable but for a memo.

    Raises ValueError for text that is not such a set, or has no key that can sign.
    """

    def __init__(self, text: bytes | str) -> None:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("not JSON") from None
        rows = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError('expected a JSON Web Key Set: {"keys": [...]}')
        if len(rows) > _MOST_KEYS:
            raise ValueError(f"expected at most {_MOST_KEYS} keys, got {len(rows)}")
        self._rows = [row for row in rows if row.get("use", "sig") == "sig" and row.get("kty") in _TYPES]
        if not self._rows:
            raise ValueError("the JSON Web Key Set has no public key for signatures (RSA, EC or OKP)")
        self._made: dict[tuple[int, str], Any] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, kid: str | None, algorithm: str) -> Any:
        """Return PyJWT's key for a token.

        ``kid`` may be None if there is one key for the algorithm. Raises UnknownKeyError.
        """
        fitting = [
            number
            for number, row in enumerate(self._rows)
            if _fits(row, algorithm) and (kid is None or row.get("kid") == kid)
        ]
        if not fitting or (kid is None and len(fitting) > 1):
            raise UnknownKeyError("is not signed by a key of this server's issuer")
        place = (fitting[0], algorithm)
        if place not in self._made:
            import jwt  # imported here, because few servers accept tokens

            try:
                self._made[place] = jwt.PyJWK(self._rows[fitting[0]], algorithm)
            except jwt.PyJWTError as error:
                raise TokenError("is signed by a key that is not usable") from error
        return self._made[place]


_TYPES = frozenset(ALGORITHMS.values())


def _fits(row: Mapping[str, Any], algorithm: str) -> bool:
    """Return True if a key may verify signatures of an algorithm."""
    return (
        row["kty"] == ALGORITHMS[algorithm]
        and row.get("alg", algorithm) == algorithm
        and row.get("crv") == _CURVES.get(algorithm, row.get("crv"))
    )


def is_token(credential: bytes) -> bool:
    """Return True for text with the form of a signed token."""
    return credential.count(b".") == 2 and credential.startswith(b"eyJ")


def _is_base64url(part: bytes) -> bool:
    """Return True for the one text of some bytes in base64url without padding (RFC 7515 2).

    Decoders also accept padding, other characters and stray bits, so that one token would have many texts.
    """
    try:
        decoded = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except ValueError:
        return False
    return base64.urlsafe_b64encode(decoded).rstrip(b"=") == part


def verify(token: bytes, keys: SigningKeys, terms: TokenTerms, now_s: float) -> Verified:
    """Return the holder of a token at ``now_s`` seconds since the epoch. Raises TokenError."""
    import jwt

    if len(token) > _MOST_BYTES:
        raise TokenError(f"is longer than {_MOST_BYTES} bytes")
    if not all(map(_is_base64url, token.split(b"."))):
        raise TokenError("is malformed")
    try:
        header = jwt.get_unverified_header(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise TokenError("has an algorithm other than " + ", ".join(ALGORITHMS))
        if "crit" in header:
            raise TokenError("has a critical header, which this server does not know")
        claims = jwt.decode(
            token,
            keys.find(kid, algorithm),
            algorithms=[algorithm],
            audience=terms.audiences,
            issuer=terms.issuer,
            options={
                "require": ["exp", "iss", "aud", "sub"],
                "verify_exp": False,  # below, with `now_s`
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
    except jwt.MissingRequiredClaimError as error:
        raise TokenError(f"has no claim '{error.claim}'") from error
    except jwt.InvalidAudienceError as error:
        raise TokenError("is for another audience") from error
    except jwt.InvalidIssuerError as error:
        raise TokenError("is of another issuer") from error
    except jwt.InvalidSignatureError as error:
        raise TokenError("has a wrong signature") from error
    except (jwt.PyJWTError, RecursionError) as error:
        raise TokenError("is malformed") from error
    until_s = _time(claims, "exp") + terms.leeway_s
    if now_s >= until_s:
        raise TokenError("has expired")
    if "nbf" in claims and now_s + terms.leeway_s < _time(claims, "nbf"):
        raise TokenError("is not valid yet")
    subject = claims["sub"]
    if not isinstance(subject, str) or not subject:
        raise TokenError("has a claim 'sub' that is not a text")
    name = _PREFIX + "".join(char if char.isprintable() and char != " " else "?" for char in subject)[:_NAME_SIZE]
    return Verified(caller_of_token(name, roles_in(claims, terms), terms.limits), until_s)


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TokenError(f"has a claim '{name}' that is not a time")
    return float(value)


def roles_in(claims: Mapping[str, Any], terms: TokenTerms) -> tuple[str, ...]:
    """Return the roles that a token's claims grant, perhaps none.

    The claim is a list of texts, or a text with spaces between the values, as in ``scope``.
    """
    value: Any = claims
    if terms.roles_claim in claims:  # names of claims may contain dots, as in https://app.example/roles
        value = claims[terms.roles_claim]
    else:
        for member in terms.roles_claim.split("."):
            value = value.get(member) if isinstance(value, Mapping) else None
    values = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    texts = [ANY, *(each for each in values if isinstance(each, str) and each != ANY)]
    if terms.roles_of:
        found = [role for text in texts for role in terms.roles_of.get(text, ())]
    else:
        found = [text for text in texts if text in ROLES]
    return tuple(dict.fromkeys(found))


def read_roles(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse ``VALUE=ROLE,...`` words, which map values of a claim to roles. Raises ValueError."""
    roles: dict[str, tuple[str, ...]] = {}
    for word in words:
        value, equals, text = word.rpartition("=")
        named = tuple(text.split(","))
        if not equals or not value or not all(name in ROLES for name in named):
            raise ValueError(f"--jwt-role={word}: expected VALUE=ROLE,... with roles of {', '.join(ROLES)}")
        roles[value] = (*roles.get(value, ()), *named)
    return roles


def read_limits(words: Sequence[str]) -> Limits:
    """Parse ``NAME=NUMBER`` words to the limits of each subject. Raises ValueError."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        member = name.replace("-", "_")
        whole = member != "requests_per_second"
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = -1
        if member not in Limits._fields or not 0 <= value < 1e9:
            names = ", ".join(field.replace("_", "-") for field in Limits._fields)
            raise ValueError(f"--jwt-limit={word}: expected NAME=NUMBER, with one of the names {names}")
        found[member] = value
    return Limits(**found)
