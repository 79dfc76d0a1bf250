"""Options of gRPC: address, TLS, compression, keepalive and access."""

from __future__ import annotations

from remora.options.fields import fragment, option


@fragment
class GrpcOptions:
    """Port and limits of V2 over gRPC."""

    __slots__ = ()

    allow_grpc: bool = option("Serve V2 over gRPC.", default=True)
    grpc_address: str = option("Address for gRPC; empty: the HTTP address.", default="", metavar="ADDR")
    grpc_port: int = option("Port for gRPC.", default=8001, metavar="PORT", basic=True)
    grpc_on_http_port: bool = option(
        "Serve gRPC on the HTTP port too, with its TLS. --http-max-input-size then replaces --grpc-max-message-size, "
        "and --http-restricted-api applies to gRPC unless --grpc-restricted-protocol is given.",
        default=False,
    )
    grpc_transport: str = option(
        "gRPC implementation of --grpc-port. own: built-in HTTP/2 (faster). grpcio: the reference library. The HTTP "
        "port always has the built-in one.",
        default="own",
        choices=("own", "grpcio"),
    )
    grpc_max_message_size: int = option(
        "Longest gRPC message of a client, in bytes, before and after decompression; Triton's is 2147483647.",
        default=64 << 20,
        metavar="BYTES",
    )
    grpc_header_forward_pattern: str = option(
        "Regular expression of the metadata keys to pass on as request parameters. A client's key or token is not "
        "passed on while the server checks them.",
        default="",
        metavar="REGEX",
    )
    grpc_restricted_protocol: tuple[str, ...] = option(
        "As --http-restricted-api, for gRPC; the metadata key is triton-grpc-protocol-HEADER. Repeatable.",
        metavar="GROUP,...:HEADER=VALUE",
        many=True,
    )
    grpc_infer_thread_count: int = option(
        "Concurrent gRPC requests; with --grpc-transport=own only those that need a thread, such as loads.",
        default=64,
        metavar="N",
    )
    reuse_grpc_port: bool = option("Let several processes listen on the gRPC port.", default=False)


@fragment
class GrpcTlsOptions:
    """TLS of the gRPC port."""

    __slots__ = ()

    grpc_use_ssl: bool = option("Serve gRPC over TLS, with --grpc-server-cert and --grpc-server-key.", default=False)
    grpc_use_ssl_mutual: bool = option(
        "Serve gRPC over TLS and require a client certificate signed by --grpc-root-cert.", default=False
    )
    grpc_server_cert: str = option("Certificate chain of the gRPC server, a PEM file.", default="", metavar="FILE")
    grpc_server_key: str = option("Private key of the gRPC server, a PEM file.", default="", metavar="FILE")
    grpc_root_cert: str = option("Certificate authorities of gRPC clients, a PEM file.", default="", metavar="FILE")


@fragment
class GrpcConnectionOptions:
    """Compression, keepalive and age of gRPC connections."""

    __slots__ = ()

    grpc_infer_response_compression_level: str = option(
        "Compression of gRPC inference responses for clients that accept it. low: gzip, as in Triton. medium, high: "
        "deflate if the client accepts both.",
        default="none",
        choices=("none", "low", "medium", "high"),
    )
    grpc_keepalive_time: int = option("Idle time before a keepalive ping, in ms.", default=7_200_000, metavar="MS")
    grpc_keepalive_timeout: int = option("Time for the answer to a ping, in ms.", default=20_000, metavar="MS")
    grpc_keepalive_permit_without_calls: bool = option("Ping gRPC connections without active calls too.", default=False)
    grpc_http2_max_pings_without_data: int = option(
        "Pings before the server must send data; 0: unlimited.", default=2, metavar="N"
    )
    grpc_http2_min_recv_ping_interval_without_data: int = option(
        "Shortest interval between a client's pings, in ms; else a strike.",
        default=300_000,
        metavar="MS",
    )
    grpc_http2_max_ping_strikes: int = option(
        "Strikes before a gRPC connection is closed; 0: unlimited.", default=2, metavar="N"
    )
    grpc_max_connection_age: int = option(
        "Age at which a gRPC connection is closed, in ms; 0: never.", default=0, metavar="MS"
    )
    grpc_max_connection_age_grace: int = option(
        "Time for its active calls, in ms; 0: unlimited.", default=0, metavar="MS"
    )
