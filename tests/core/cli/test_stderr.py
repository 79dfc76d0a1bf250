"""Errors of the command line repeat no secret of a URL, whichever argument has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conftest import needs
from remora.cli import command_parsers, main, parse_arguments

URL = "https://user:hunter2@127.0.0.1:1/models?sig=hunter2"
TOOLS, DEPLOY = needs("remora_tools"), needs("remora_deploy")
TOKEN = "https://hunter2@127.0.0.1:1/models"


def wrong_words() -> Iterator[tuple[str, ...]]:
    """A URL as the value of each option of each command, as its unknown argument, and as the command."""
    yield (URL,)
    for words, parser in command_parsers():
        yield (*words.split(), URL, TOKEN)
        for action in parser._actions:
            if action.option_strings and action.nargs is None:
                yield (*words.split(), action.option_strings[-1], URL)
                yield (*words.split(), f"{action.option_strings[-1]}={TOKEN}")


def test_no_argument_that_cannot_be_parsed_is_repeated_with_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    refused = 0
    for words in wrong_words():
        try:
            parse_arguments(words)
        except SystemExit as end:
            refused += end.code == 2
        shown = capsys.readouterr()
        assert "hunter2" not in shown.out + shown.err, words
    assert refused > 100


@pytest.mark.parametrize("url", [URL, TOKEN])
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("explain",), marks=TOOLS),
        pytest.param(("models", "load"), marks=TOOLS),
        pytest.param(("pull",), marks=TOOLS),
        ("config", "check"),
        pytest.param(("score", "m"), marks=TOOLS),
        pytest.param(("deploy",), marks=DEPLOY),
        pytest.param(("deploy", "compose", "d", "--model", "m", "--image"), marks=DEPLOY),
        pytest.param(("manifests", "knative"), marks=DEPLOY),
        pytest.param(("build",), marks=DEPLOY),
        pytest.param(("image", "build", "cpu", "--tag"), marks=DEPLOY),
        pytest.param(("export", "no-such-folder"), marks=TOOLS),
        pytest.param(("export",), marks=TOOLS),
        pytest.param(("init",), marks=TOOLS),
        pytest.param(("keys", "new", "--name"), marks=TOOLS),
        pytest.param(("cost",), marks=TOOLS),
    ],
)
def test_no_failure_of_a_command_repeats_the_secrets_of_its_argument(
    words: tuple[str, ...], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([*words, url])
    except SystemExit as end:
        status = int(str(end.code))
    shown = capsys.readouterr()
    assert status in (1, 2), shown
    assert "hunter2" not in shown.out + shown.err
