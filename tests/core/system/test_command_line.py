"""Secrets in the command line: which bytes they are, and that a real process shows none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remora.system.command_line import secrets_in
from support.servers.live_server import PATIENCE_S

SECRET = b"s3cr3t"
LINE = b"\0"


def shown(*words: bytes) -> bytes:
    """Return the command line with its secrets concealed."""
    line = bytearray(LINE.join((*words, b"")))
    for span in secrets_in(words):
        line[span.begin : span.end] = b"*" * (span.end - span.begin)
    return bytes(line)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((b"--http-restricted-api=health,metadata:key=s3cr3t",), b"--http-restricted-api=health,metadata:key=******"),
        ((b"--grpc-restricted-protocol", b"inference:key=s3cr3t"), b"--grpc-restricted-protocol\0inference:key=******"),
        ((b"--api-key=ci:infer=s3cr3t",), b"--api-key=ci:infer=******"),
        ((b"--header", b"Authorization=s3cr3t"), b"--header\0Authorization=******"),
        ((b"--env", b"AWS_SECRET_ACCESS_KEY=s3cr3t"), b"--env\0AWS_SECRET_ACCESS_KEY=******"),
        ((b"--env=KEY=@s3cr3t",), b"--env=KEY=*******"),
        ((b"--header", b"a=s3cr3t", b"m=3"), b"--header\0a=******\0m=3"),
        ((b"--header=a=s3cr3t", b"m=3"), b"--header=a=******\0m=3"),
        ((b"--cache-config=redis,password=s3cr3t",), b"--cache-config=redis,password=******"),
        ((b"--cache-config", b"redis,password=s3cr3t"), b"--cache-config\0redis,password=******"),
        ((b"https://user:s3cr3t@host/m.onnx",), b"https://***********@host/m.onnx"),
        ((b"https://u:p/s3cr3t@host/m.onnx",), b"https://**********@host/m.onnx"),
        ((b"https://u:p?#s3cr3t@q@host:8000/m",), b"https://*************@host:8000/m"),
        ((b"https://host/m.onnx?sig=s3cr3t",), b"https://host/m.onnx?**********"),
        ((b"--model-repository=https://host/m?s3cr3t#x",), b"--model-repository=https://host/m?******#x"),
        (
            (b"--shadow-url=a=http://u:s3cr3t@b:1", b"--http-port=1"),
            b"--shadow-url=a=http://********@b:1\0--http-port=1",
        ),
    ],
)
def test_secrets_are_found_in_flags_and_urls(words: tuple[bytes, ...], expected: bytes) -> None:
    assert shown(b"remora", b"serve", *words) == LINE.join((b"remora", b"serve", expected, b""))
    assert SECRET not in expected


@pytest.mark.parametrize(
    "words",
    [
        (),
        (b"",),
        (b"--http-restricted-api=health:key=@/run/key",),
        (b"--http-restricted-api=health:key=@env:KEY",),
        (b"--http-restricted-api=health:key=",),
        (b"--api-key=ci:infer=sha256:00",),
        (b"--cache-config=redis,host=cache",),
        (b"https://host/models/v@1", b"--url=http://host:8000/m"),
        (b"--http-port=8000", b"models", b"s3://bucket/models", b"--backend-config=onnxruntime,a=b"),
        (b"--header", b"--url=http://host:8000/x"),
    ],
)
def test_other_words_stay(words: tuple[bytes, ...]) -> None:
    assert secrets_in((b"remora", *words)) == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's process list")
def test_a_process_shows_no_secret_and_reads_all_of_its_arguments() -> None:
    code = (
        "import sys; from remora.system.command_line import conceal; conceal(); "
        "print(repr(sys.argv[1:])); print(repr(open('/proc/self/cmdline', 'rb').read().split(b'\\0')[3:-1]))"
    )
    words = ("serve", "--http-restricted-api", "health:key=s3cr3t", "--header=a=s3cr3t", "last")
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    arguments, listed = done.stdout.splitlines()
    assert arguments == repr(list(words))
    assert listed == repr([word.replace("s3cr3t", "******").encode() for word in words])
