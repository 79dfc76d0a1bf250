"""gRPC on our own HTTP/2 in a real server: grpcio's clients, and peers of other kinds, with what operators may set."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import pytest

from remora.engine import Engine
from remora.errors import ConfigError, RemoraError, UnavailableError
from remora.options import ServerOptions
from remora.protocols.grpc.infer import MAX_MESSAGE_BYTES
from remora.protocols.http2.frames import PREFACE, frame
from remora.server.grpc.stream import EVICTED_TEXT
from remora.server.main import Server, run_loop
from support.models.python_models import write_echo

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
pytest.importorskip("hpack", reason="hpack is not installed: pip install '.[grpc]'")
pb = pytest.importorskip("remora.proto.inference_pb2")

WAIT_S = 60.0
SERVICE = "/inference.GRPCInferenceService"
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


class Running(NamedTuple):
    """A server that answers."""

    port: int
    stop: Callable[[], None]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def serving(repository: Path, transport: str = "own", **chosen: Any) -> Iterator[Running]:
    """A server on a loop as `main` makes it, in a thread. Raises what its start raises."""
    options = ServerOptions(
        **{"allow_http": False, "allow_metrics": False, "grpc_port": 0, "grpc_transport": transport, **chosen}
    )
    engine = Engine(repository, backend_config=("python,isolation=thread",), exit_timeout_secs=30)
    started, told = threading.Event(), asyncio.Event()
    came: dict[str, Any] = {}

    async def serve() -> int:
        server = Server(engine, options)
        came["loop"] = asyncio.get_running_loop()
        try:
            await server.start()
            came["port"] = server.ports.grpc
            started.set()
            await told.wait()
        except RemoraError as error:
            came["error"] = error
        finally:
            await server.stop()
            started.set()
        return 0

    thread = threading.Thread(target=lambda: run_loop(serve()))

    def stop() -> None:
        came["loop"].call_soon_threadsafe(told.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()

    thread.start()
    assert started.wait(WAIT_S)
    if "error" in came:
        thread.join(WAIT_S)
        raise came["error"]
    try:
        yield Running(came["port"], stop)
    finally:
        if thread.is_alive():
            stop()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_echo(folder, "INT32")
    return folder


class Certificate(NamedTuple):
    """PEM files."""

    key: Path
    cert: Path

    @property
    def pair(self) -> tuple[bytes, bytes]:
        return self.key.read_bytes(), self.cert.read_bytes()


def certificate(folder: Path, name: str) -> Certificate:
    made = Certificate(folder / f"{name}.key", folder / f"{name}.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("ours"), "server")


def tls(made: Certificate) -> dict[str, Any]:
    return {"grpc_use_ssl": True, "grpc_server_key": str(made.key), "grpc_server_cert": str(made.cert)}


def mutual(made: Certificate) -> dict[str, Any]:
    return {**tls(made), "grpc_use_ssl_mutual": True, "grpc_root_cert": str(made.cert)}


def is_ready(channel: Any) -> bool:
    return bool(channel.unary_unary(f"{SERVICE}/ServerReady")(b"", timeout=WAIT_S) == b"\x08\x01")


@contextmanager
def told_of(channel: Any, told: Callable[[Any], None]) -> Iterator[None]:
    """Tells of the channel's states. grpcio's thread for that raises if it still looks when the channel is closed."""
    before = threading.enumerate()
    channel.subscribe(told)
    looking = [each for each in threading.enumerate() if each not in before and each.name.endswith("(_run)")]
    try:
        yield
    finally:
        channel.unsubscribe(told)
        for thread in looking:
            thread.join(WAIT_S)


def infer_bytes(*values: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT32", shape=[len(values)])
    raw = np.array(values, "<i4").tobytes()
    return bytes(pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[raw]).SerializeToString())


def status_of(call: Callable[[], Any]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code()


def all_of(client: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while piece := client.recv(65_536):
            found += piece
    except (ConnectionResetError, ssl.SSLError):
        pass
    return found


# -- TLS ------------------------------------------------------------------------------------------------------------


@NEEDS_OPENSSL
@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_mutual_tls_serves_only_clients_whose_certificate_is_vouched_for(
    repository: Path, ours: Certificate, tmp_path: Path, transport: str
) -> None:
    stranger, root = certificate(tmp_path, "stranger"), ours.cert.read_bytes()
    with serving(repository, transport, **mutual(ours)) as server:
        with grpc.secure_channel(server.target, grpc.ssl_channel_credentials(root, *ours.pair)) as channel:
            assert is_ready(channel)
        for refused in (
            grpc.ssl_channel_credentials(root),
            grpc.ssl_channel_credentials(root, *stranger.pair),
            grpc.ssl_channel_credentials(stranger.cert.read_bytes(), *ours.pair),
        ):
            with grpc.secure_channel(server.target, refused) as channel:
                assert status_of(lambda channel=channel: is_ready(channel)) is grpc.StatusCode.UNAVAILABLE


@NEEDS_OPENSSL
def test_over_tls_long_messages_and_streams_pass_and_peers_of_other_kinds_are_closed(
    repository: Path, ours: Certificate
) -> None:
    values = range(1_000_000)
    with serving(repository, **tls(ours)) as server:
        root = grpc.ssl_channel_credentials(ours.cert.read_bytes())
        with grpc.secure_channel(server.target, root, options=[("grpc.max_receive_message_length", -1)]) as channel:
            answer = channel.unary_unary(f"{SERVICE}/ModelInfer")(infer_bytes(*values), timeout=WAIT_S)
            assert pb.ModelInferResponse.FromString(answer).raw_output_contents[0] == np.array(values, "<i4").tobytes()
            stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
            assert len(list(stream(iter([infer_bytes(1), infer_bytes(2)]), timeout=WAIT_S))) == 2
        for junk in (PREFACE + frame(4, 0, 0, b""), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(100)):
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client:
                client.sendall(junk)
                client.shutdown(socket.SHUT_WR)
                assert b"\0\0\0\x04" not in all_of(client)  # no settings: HTTP/2 is not spoken without TLS
        for protocols in ([], ["http/1.1"], ["h2"]):
            context = ssl.create_default_context(cafile=str(ours.cert))
            if protocols:
                context.set_alpn_protocols(protocols)
            try:
                with (
                    socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as plain,
                    context.wrap_socket(plain, server_hostname="localhost") as client,
                ):
                    client.sendall(PREFACE + frame(4, 0, 0, b"") + frame(7, 0, 0, bytes(7)))
                    answered = client.recv(9) if protocols == ["h2"] else all_of(client)
            except (ConnectionError, ssl.SSLError):
                answered = b""
            assert bool(answered) == (protocols == ["h2"]), protocols


@NEEDS_OPENSSL
@pytest.mark.parametrize("missing", ["grpc_server_key", "grpc_server_cert", "grpc_root_cert"])
def test_files_of_tls_that_cannot_be_read_are_reported_by_their_flags(
    repository: Path, ours: Certificate, missing: str
) -> None:
    flag = missing.replace("_", "-")
    with (
        pytest.raises(ConfigError, match=f"--{flag}: '/no/such' cannot be read .*; TLS needs it"),
        serving(repository, **{**mutual(ours), missing: "/no/such"}),
    ):
        pass


@NEEDS_OPENSSL
def test_files_that_are_not_certificates_are_reported_by_their_flags(
    repository: Path, ours: Certificate, tmp_path: Path
) -> None:
    junk, locked = tmp_path / "junk", tmp_path / "locked"
    junk.write_text("junk")
    lock = f"openssl ec -in {ours.key} -out {locked} -aes256 -passout pass:secret"
    subprocess.run(lock.split(), check=True, capture_output=True)
    other = certificate(tmp_path, "other").key
    for changed, told in (
        ({"grpc_server_cert": str(junk)}, "--grpc-server-cert and --grpc-server-key: "),
        ({"grpc_server_key": str(junk)}, "--grpc-server-cert and --grpc-server-key: "),
        ({"grpc_server_key": str(other)}, "--grpc-server-cert and --grpc-server-key: "),
        ({"grpc_server_key": str(locked)}, "without a password"),
        ({"grpc_root_cert": str(junk)}, "--grpc-root-cert: "),
    ):
        with pytest.raises(ConfigError, match=told), serving(repository, **{**mutual(ours), **changed}):
            pass


# -- Where it listens -----------------------------------------------------------------------------------------------


FAMILIES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@pytest.mark.parametrize(("address", "families"), [("0.0.0.0", {socket.AF_INET}), ("::", {*FAMILIES})])
def test_on_all_interfaces_clients_of_the_addresss_families_are_answered(
    repository: Path, address: str, families: set[socket.AddressFamily]
) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(repository, grpc_address=address) as server:
        for family, host in FAMILIES.items():
            with socket.socket(family) as client:
                assert (client.connect_ex((host, server.port)) == 0) == (family in families)
            target = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
            with grpc.insecure_channel(target) as channel:
                assert family not in families or is_ready(channel)


@pytest.mark.parametrize(("transport", "address"), [("own", "127.0.0.1"), ("own", "0.0.0.0"), ("grpcio", "127.0.0.1")])
def test_a_port_in_use_is_reported_and_can_be_shared(repository: Path, transport: str, address: str) -> None:
    with serving(repository, transport, grpc_address=address) as server:
        taken = f"gRPC cannot listen on {address}:{server.port}: .*; is another server there. Choose another --grpc-po"
        with (
            pytest.raises(UnavailableError, match=taken),
            serving(repository, transport, grpc_address=address, grpc_port=server.port),
        ):
            pass
    shared = {"grpc_address": address, "reuse_grpc_port": True}
    with (
        serving(repository, transport, **shared) as server,
        serving(repository, transport, **shared, grpc_port=server.port) as other,
    ):
        assert other.port == server.port


def test_a_foreign_address_is_refused_with_the_reason(repository: Path) -> None:
    with (
        pytest.raises(UnavailableError, match=r"gRPC cannot listen on \[2001:db8::1\]:0: "),
        serving(repository, grpc_address="2001:db8::1"),
    ):
        pass


# -- How long connections live --------------------------------------------------------------------------------------


def test_only_a_client_that_does_not_answer_pings_is_closed(repository: Path) -> None:
    often = {
        "grpc_keepalive_time": 100,
        "grpc_keepalive_timeout": 8000,  # in which the client that answers must have its turn
        "grpc_keepalive_permit_without_calls": True,
        "grpc_http2_max_pings_without_data": 0,
    }
    with (
        serving(repository, **often) as server,
        grpc.insecure_channel(server.target) as channel,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client,
    ):
        assert is_ready(channel)
        states: list[Any] = []
        with told_of(channel, states.append):
            client.sendall(PREFACE + frame(4, 0, 0, b""))
            assert frame(6, 0, 0, b"is there") in all_of(client)
            assert is_ready(channel)
        assert grpc.ChannelConnectivity.IDLE not in states[1:]


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_a_client_that_pings_too_often_is_sent_away_with_grpcs_word(repository: Path, transport: str) -> None:
    with (
        serving(repository, transport) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client,
    ):
        client.sendall(PREFACE + frame(4, 0, 0, b"") + frame(6, 0, 0, bytes(8)) * 5)
        assert all_of(client).endswith(b"\0\0\0\x0btoo_many_pings")


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_connections_of_some_age_are_given_up_and_no_call_is_lost(repository: Path, transport: str) -> None:
    young = {"grpc_max_connection_age": 30, "grpc_max_connection_age_grace": 60_000}
    with serving(repository, transport, **young) as server, grpc.insecure_channel(server.target) as channel:
        ask, asked, ended = channel.unary_unary(f"{SERVICE}/ModelInfer"), 0, threading.Semaphore(0)

        def noticed(state: Any) -> None:
            if state is grpc.ChannelConnectivity.IDLE:
                ended.release()

        assert is_ready(channel)
        with told_of(channel, noticed):
            for _ in range(5):
                while not ended.acquire(blocking=False):
                    assert pb.ModelInferResponse.FromString(ask(infer_bytes(asked), timeout=WAIT_S)).raw_output_contents
                    asked += 1
    assert asked > 3, "a connection for each at least, but the first"


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_messages_beyond_the_operators_limit_are_refused_and_others_are_answered(
    repository: Path, transport: str
) -> None:
    with (
        serving(repository, transport, grpc_max_message_size=1_000) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        ask = channel.unary_unary(f"{SERVICE}/ModelInfer")
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                ask(bytes(1_001), timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "Received message larger than max (1001 vs. 1000)" in refused.value.details()
            assert ask(infer_bytes(1), timeout=WAIT_S)


def test_the_limit_of_messages_is_that_of_bodies_unless_it_is_raised_to_tritons() -> None:
    assert ServerOptions().message_bytes == ServerOptions().http_max_input_size
    assert ServerOptions(grpc_max_message_size=MAX_MESSAGE_BYTES).message_bytes == 2**31 - 1
    assert ServerOptions(grpc_on_http_port=True, http_max_input_size=5).message_bytes == 5


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_a_server_ends_while_clients_are_connected_that_say_nothing(repository: Path, transport: str) -> None:
    with (
        serving(repository, transport) as server,
        grpc.insecure_channel(server.target) as channel,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as mute,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as deaf,
    ):
        deaf.sendall(PREFACE + frame(4, 0, 0, b""))
        assert is_ready(channel)
        server.stop()
        assert status_of(lambda: channel.unary_unary(f"{SERVICE}/ServerReady")(b"", timeout=5)) in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        assert all_of(deaf)
        all_of(mute)


def stream_of(channel: grpc.Channel, first: bytes | None, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    """A ModelStreamInfer call that sends one message, or none, and then nothing."""
    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    if first is not None:
        outgoing.put(first)
    call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(
        iter(outgoing.get, None), timeout=WAIT_S, metadata=metadata
    )
    call.add_callback(lambda: outgoing.put(None))
    return call


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_a_silent_stream_hears_that_the_server_ends(repository: Path, transport: str) -> None:
    with serving(repository, transport) as server, grpc.insecure_channel(server.target) as channel:
        silent, other = stream_of(channel, None), stream_of(channel, infer_bytes(1))
        next(other)  # the server has both by now
        server.stop()
        for call in (silent, other):
            assert status_of(lambda call=call: list(call)) == grpc.StatusCode.UNAVAILABLE


def test_a_silent_stream_without_the_secret_is_refused_at_once(repository: Path) -> None:
    with (
        serving(repository, grpc_restricted_protocol=("inference:key=right",)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        assert status_of(lambda: list(stream_of(channel, None))) == grpc.StatusCode.UNAVAILABLE
        call = stream_of(channel, infer_bytes(1), (("triton-grpc-protocol-key", "right"),))
        next(call)
        call.cancel()


def test_one_connection_has_half_of_the_streams_and_silent_ones_do_not_count(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.grpc.listener.MAX_STREAMS", 4)
    with (
        serving(repository) as server,
        grpc.insecure_channel(server.target) as channel,
        grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        silent = [stream_of(channel, None) for _ in range(6)]
        busy = [stream_of(channel, infer_bytes(1)) for _ in range(2)]
        for call in busy:
            next(call)
        refused = stream_of(channel, infer_bytes(1))
        assert status_of(lambda: list(refused)) == grpc.StatusCode.UNAVAILABLE
        next(stream_of(other, infer_bytes(1)))
        busy[0].cancel()
        for call in silent:
            call.cancel()


def test_a_refused_stream_of_a_long_message_leaves_the_others_of_its_connection(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.grpc.listener.MAX_STREAMS", 2)
    with serving(repository) as server, grpc.insecure_channel(server.target) as channel:
        outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        outgoing.put(infer_bytes(1))
        open_stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(outgoing.get, None), timeout=WAIT_S)
        next(open_stream)
        refused = stream_of(channel, infer_bytes(*range(5_000)))
        assert status_of(lambda: list(refused)) == grpc.StatusCode.UNAVAILABLE
        outgoing.put(infer_bytes(2))
        next(open_stream)
        outgoing.put(None)
        assert list(open_stream) == []


def test_the_stream_that_is_idle_longest_gives_its_slot_to_a_new_one(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.grpc.listener.MAX_STREAMS", 2)
    monkeypatch.setattr("remora.server.grpc.rpcs.IDLE_NS", 0)
    with serving(repository) as server, ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(3)
        ]
        idle = []
        for channel in channels:
            idle.append(stream_of(channel, infer_bytes(1)))
            next(idle[-1])
        assert status_of(lambda: list(idle[0])) == grpc.StatusCode.UNAVAILABLE
        assert idle[0].details() == EVICTED_TEXT
        for call in idle[1:]:
            assert call.is_active()
            call.cancel()


def test_streams_that_were_idle_for_a_moment_keep_their_slots(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.server.grpc.listener.MAX_STREAMS", 2)
    monkeypatch.setattr("remora.server.grpc.rpcs.IDLE_NS", 3600 * 10**9)  # a moment may be long on a busy machine
    with serving(repository) as server, ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(3)
        ]
        open_streams = [stream_of(channel, infer_bytes(1)) for channel in channels[:2]]
        for call in open_streams:
            next(call)
        assert status_of(lambda: list(stream_of(channels[2], infer_bytes(1)))) == grpc.StatusCode.UNAVAILABLE
        for call in open_streams:
            assert call.is_active()
            call.cancel()


# -- Compression ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "level"),
    [("own", "none"), ("own", "low"), ("own", "medium"), ("own", "high"), ("grpcio", "low")],
)
def test_answers_are_compressed_as_much_as_they_are_to_be_and_clients_read_them(
    repository: Path, transport: str, level: str
) -> None:
    values = [7] * 100_000
    message, raw = infer_bytes(*values), np.array(values, "<i4").tobytes()
    with serving(repository, transport, grpc_infer_response_compression_level=level) as server:
        coding, body = wire_of(server.port, message)
        assert coding == {"low": b"gzip", "medium": b"deflate", "high": b"deflate"}.get(level)
        assert (len(body) < len(message) // 20) == (level != "none")
        with grpc.insecure_channel(server.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
            for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
                options = {"timeout": WAIT_S, "compression": compression}
                answer = channel.unary_unary(f"{SERVICE}/ModelInfer")(message, **options)
                assert pb.ModelInferResponse.FromString(answer).raw_output_contents == [raw]
                stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([message, message]), **options)
                read = [pb.ModelStreamInferResponse.FromString(each).infer_response for each in stream]
                assert [each.raw_output_contents for each in read] == [[raw], [raw]]


def wire_of(port: int, message: bytes) -> tuple[bytes | None, bytes]:
    """How an answer comes to a client that accepts every coding: its coding, and its body."""
    h2 = pytest.importorskip("h2.connection", reason="h2 is not installed: pip install '.[dev]'")
    events = pytest.importorskip("h2.events")
    client = h2.H2Connection()
    client.initiate_connection()
    client.increment_flow_control_window(1 << 24)
    client.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"{SERVICE}/ModelInfer"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("grpc-accept-encoding", "identity, deflate, gzip"),
        ],
    )
    left = b"\0" + len(message).to_bytes(4, "big") + message
    coding: bytes | None = None
    body, ended = b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        while not ended:
            while left and (
                room := min(client.local_flow_control_window(1), client.max_outbound_frame_size, len(left))
            ):
                client.send_data(1, left[:room], end_stream=room == len(left))
                left = left[room:]
            connection.sendall(client.data_to_send())
            for event in client.receive_data(connection.recv(65_536)):
                if isinstance(event, events.ResponseReceived):
                    coding = dict(event.headers).get(b"grpc-encoding")
                elif isinstance(event, events.DataReceived):
                    body += event.data
                    client.acknowledge_received_data(event.flow_controlled_length, 1)
                ended = ended or isinstance(event, events.StreamEnded)
    return coding, body
