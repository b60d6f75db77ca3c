"""API keys of a server: where they come from, and when a server may have none."""

from __future__ import annotations

import pytest

from anydecode.cli import main
from anydecode.errors import InvalidRequestError
from anydecode.server.settings import api_keys


@pytest.mark.parametrize(
    ("given", "environment", "host", "no_auth", "keys"),
    [
        (None, None, "127.0.0.1", False, ()),
        (None, None, "::1", False, ()),
        (None, None, "localhost", False, ()),
        (None, None, "0.0.0.0", True, ()),
        (None, "k1,k2", "0.0.0.0", False, ("k1", "k2")),
        (None, " k1 , k2 ", "127.0.0.1", False, ("k1", "k2")),
        (["k1", "k2,k3"], None, "192.168.1.5", False, ("k1", "k2", "k3")),
        (["k1"], "other", "127.0.0.1", False, ("k1",)),
    ],
)
def test_keys_are_separated_by_commas(
    given: list[str] | None, environment: str | None, host: str, no_auth: bool, keys: object
) -> None:
    assert api_keys(given, environment, host, no_auth) == keys


@pytest.mark.parametrize(
    ("given", "environment", "host", "no_auth", "message"),
    [
        (None, "", "127.0.0.1", False, "ANYDECODE_API_KEYS has an empty key"),
        (None, "k1,", "127.0.0.1", False, "ANYDECODE_API_KEYS has an empty key"),
        ([""], None, "127.0.0.1", False, "--api-key has an empty key"),
        (None, None, "0.0.0.0", False, "--host 0.0.0.0 lets other machines connect"),
        (None, None, "::", False, "--host :: lets other machines connect"),
        (None, None, "example.com", False, "lets other machines connect"),
        (["k1"], None, "127.0.0.1", True, "--no-auth is given together with keys"),
    ],
)
def test_a_server_is_not_open_by_mistake(
    given: list[str] | None, environment: str | None, host: str, no_auth: bool, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        api_keys(given, environment, host, no_auth)
    assert "\n" not in str(caught.value)


def test_the_command_refuses_an_open_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ANYDECODE_API_KEYS", raising=False)
    with pytest.raises(SystemExit) as ended:
        main.run(["serve", "tiny-autoregressive", "--host", "0.0.0.0"])
    assert ended.value.code == 2
    assert "--no-auth" in capsys.readouterr().err
