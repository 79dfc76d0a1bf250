"""Options of HTTP: address, limits and access."""

from __future__ import annotations

from remora.options.fields import fragment, option
from remora.options.roles import ROLES


@fragment
class HttpTlsOptions:
    """TLS of the HTTP port."""

    __slots__ = ()

    http_server_cert: str = option(
        "Serve the HTTP port over TLS with this certificate chain, a PEM file. Read again when it changes.",
        default="",
        metavar="FILE",
        basic=True,
    )
    http_server_key: str = option("Private key of the HTTP server, a PEM file.", default="", metavar="FILE", basic=True)
    http_root_cert: str = option(
        "Require a client certificate signed by these certificate authorities, a PEM file.", default="", metavar="FILE"
    )
    http_self_signed: bool = option(
        "For development: serve the HTTP port over TLS with a self-signed certificate for localhost.", default=False
    )


@fragment
class TokenOptions:
    """JSON Web Tokens in place of API keys."""

    __slots__ = ()

    jwt_jwks: str = option(
        "Accept JSON Web Tokens that are signed by these public keys: a JSON Web Key Set as a file, which is read "
        "again when it changes, or an https:// URL, which is fetched every five minutes and for unknown keys.",
        default="",
        metavar="FILE|URL",
    )
    jwt_issuer: str = option("Issuer of the tokens (claim iss).", default="", metavar="ISSUER")
    jwt_audience: tuple[str, ...] = option(
        "Audience of the tokens (claim aud): a name of this server at the issuer. Repeatable.",
        metavar="AUDIENCE",
        many=True,
    )
    jwt_leeway_secs: int = option(
        "Difference of the issuer's clock that expiry (exp) and start (nbf) of tokens allow for, in seconds.",
        default=30,
        metavar="S",
    )
    jwt_roles_claim: str = option(
        "Claim that decides about the roles, a list or words with spaces between them; dots lead into objects.",
        default="roles",
        metavar="CLAIM",
    )
    jwt_role: tuple[str, ...] = option(
        f"Value of that claim and the roles that it grants ({', '.join(ROLES)}), such as ml-users=infer; "
        "*=infer for every token. Without it, values are names of roles. Repeatable.",
        metavar="VALUE=ROLE,...",
        many=True,
    )
    jwt_limit: tuple[str, ...] = option(
        "Limit of each token's subject: requests-per-second=N, burst=N (requests at once beyond that rate) or "
        "concurrent=N. Repeatable.",
        metavar="NAME=N",
        many=True,
    )


@fragment
class HttpOptions:
    """Port and limits of V2 over HTTP."""

    __slots__ = ()

    allow_http: bool = option("Serve V2 over HTTP.", default=True)
    http_address: str = option(
        "Address for HTTP; 0.0.0.0: all interfaces with IPv4, ::: with IPv4 and IPv6.",
        default="127.0.0.1",
        metavar="ADDR",
        basic=True,
    )
    http_port: int = option("Port for HTTP.", default=8000, metavar="PORT", basic=True)
    reuse_http_port: bool = option(
        "Let several processes listen on the HTTP port. Each needs another --metrics-port, or --allow-metrics=false.",
        default=False,
    )
    http_header_forward_pattern: str = option(
        "Regular expression of the request headers to pass on as request parameters. A client's key or token is not "
        "passed on while the server checks them.",
        default="",
        metavar="REGEX",
    )
    http_restricted_api: tuple[str, ...] = option(
        "Endpoint groups that require a header, such as model-repository,statistics:admin-key=@FILE. @FILE reads "
        "the value from a file, @env:NAME from an environment variable. Repeatable.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    api_keys_file: str = option(
        "File of API keys, made by 'remora keys new': requests need a key, and its roles decide what they may do. "
        "Read again when it changes.",
        default="",
        metavar="FILE",
        basic=True,
    )
    api_key: tuple[str, ...] = option(
        f"API key with a name and roles ({', '.join(ROLES)}), such as ci:infer=@FILE. @FILE reads the key from "
        "a file, @env:NAME from an environment variable; sha256:DIGEST is its hash. Repeatable.",
        metavar="NAME:ROLE,...=@FILE",
        many=True,
    )
    allowed_host: tuple[str, ...] = option(
        "Host name that requests to loopback may carry; its pages may load models and change settings. Repeatable.",
        metavar="NAME",
        many=True,
    )
    cors_origin: tuple[str, ...] = option(
        "Origin whose web pages may read the answers, such as https://app.example; * for all. Repeatable.",
        metavar="ORIGIN",
        many=True,
    )
    trusted_proxy: tuple[str, ...] = option(
        "Address or network of proxies whose X-Forwarded-For, X-Forwarded-Proto and Forwarded headers are believed, "
        "such as 10.0.0.0/8. Repeatable.",
        metavar="CIDR,...",
        many=True,
    )
    http_max_input_size: int = option(
        "Longest request body, in bytes, before and after decompression.", default=64 << 20, metavar="BYTES"
    )
    client_errors: str = option(
        "HTTP status for malformed requests: invalid JSON, data that contradicts its shape, no inputs. 500 is "
        "Triton's; 400 keeps client mistakes out of alerts on server errors.",
        default="500",
        choices=("500", "400"),
    )
    http_max_json_depth: int = option(
        "Nesting depth at which arrays in JSON data are refused; at most 1024.",
        default=100,
        metavar="N",
    )
    http_max_chunks: int = option(
        "Non-empty chunks that a chunked request body may have; 0: unlimited.", default=65_536, metavar="N"
    )
    openai: bool = option(
        "Serve OpenAI's routes (/v1, /openai/v1) for models of all kinds. Without it they are served where a language "
        "model is.",
        default=False,
        basic=True,
    )
    openai_unknown: str = option(
        "What OpenAI's routes do with an unknown field of a request: refuse it, or ignore it and name it in the header "
        "X-Ignored-Parameters.",
        default="refuse",
        choices=("refuse", "ignore"),
    )
