from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfsuite.cli import notify
from perfsuite.history.store import Place, StoredVerdict
from perfsuite.history.verdicts import Night
from tests.cli.commands import run
from tests.samples import BEFORE, make_result, now, write_session

VARIABLE = "PERFSUITE_NOTIFY_URL"
SECRET = "T0/B0/secret"


class Service(HTTPServer):
    """A webhook that keeps what is posted to it."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.server.status)
        self.send_header("Location", "/login")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.posted.append((self.path, "GET", None))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv(VARIABLE, server.url)
        monkeypatch.setenv("no_proxy", "*")
        yield server
        server.shutdown()
        thread.join()


def night(tmp_path: Path, day: int, speed: float, **changes: Any) -> Path:
    directory = tmp_path / str(day)
    directory.mkdir()
    result = make_result(*[now(tokens_per_s=speed)] * 3, **changes)
    return write_session(directory, result, started_at=f"2026-01-{day:02}T01:00:00+00:00")


def add(tmp_path: Path, file: Path, variable: str = VARIABLE) -> str:
    return run("history", "add", file, "--history", tmp_path / "history", "--notify", variable).output


def test_a_night_is_posted_when_a_case_changed_its_state_and_only_then(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_URL", "https://example.org/runs?a=1&b=2")
    assert "--notify: no case changed its state, nothing was posted" in add(
        tmp_path, night(tmp_path, 1, 98_765)
    )
    assert "--notify: posted, 1 changed" in add(tmp_path, slow := night(tmp_path, 2, 50_000, shadow=True))
    assert "nothing was posted" in add(tmp_path, slow)  # which is there already
    assert "nothing was posted" in add(tmp_path, night(tmp_path, 3, 50_000))
    assert "--notify: posted, 1 changed" in add(tmp_path, night(tmp_path, 4, 98_765))
    (path, kind, first), (_, _, last) = service.posted
    assert (path, kind) == (f"/{SECRET}", "application/json")
    place = f"`{BEFORE.case.id}` on `cpu-test-2c`"
    red = f"newly red: {place}: regressed (shadow): `tokens/s -49.4%`"
    begin, end = "perfsuite: cases changed since the night before", "https://example.org/runs?a=1&amp;b=2"
    assert first == {"text": f"{begin}\n{red}\n{end}"}
    assert last == {"text": f"{begin}\nnewly green: {place}: passed\n{end}"}


def test_text_of_others_can_neither_mention_anybody_nor_be_markup() -> None:
    place = Place(Path("x.json"), "cpu-x", "a" * 40, "20260101")
    bad = "`<!channel> @here <@U1> *b* & [x](https://evil)\n# all_gather 7 -> 14"
    text = notify.message(
        [Night(place, "a`@all", StoredVerdict(word="failed"))], {("cpu-x", "a`@all"): bad}, ""
    )
    *_, line = text.splitlines()
    assert line == (
        "newly red: `a'@\u200ball` on `cpu-x`: failed: "
        "`'&lt;!channel&gt; @\u200bhere &lt;@\u200bU1&gt; *b* &amp; [x](https://evil) # all_gather 7 → 14`"
    )


def test_a_long_night_is_cut() -> None:
    place = Place(Path("x.json"), "cpu-x", "a" * 40, "20260101")
    changed = [Night(place, f"case-{number}", StoredVerdict(word="failed")) for number in range(50)]
    lines = notify.message(changed, {}, "https://x").splitlines()
    assert lines[-2:] == ["and 10 more", "https://x"]
    assert len(lines) == 43


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_answer_that_is_no_success_is_said_in_a_line_and_fails_nothing(
    tmp_path: Path, service: Service, status: int
) -> None:
    service.status = status
    said = add(tmp_path, night(tmp_path, 1, 50_000))
    assert f"--notify: nothing was posted: the answer was {status}" in said
    assert "secret" not in said
    assert [kind for _, kind, _ in service.posted] == ["application/json"]  # no redirect was followed


def test_a_webhook_that_hangs_or_is_not_there_is_said_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}"
        monkeypatch.setenv(VARIABLE, url)
        said = add(tmp_path, night(tmp_path, 1, 50_000))
        assert "--notify: nothing was posted: TimeoutError" in said
    assert notify.post(VARIABLE, "x") == "Connection refused"
    assert "secret" not in said


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (None, f"{VARIABLE} is not set"),
        ("  ", f"{VARIABLE} is not set"),
        ("file:///etc/secret", f"{VARIABLE} holds no address that begins with https://"),
        ("http://[secret", "ValueError"),
        ("https://h:secret/x", "InvalidURL"),
        ("https://h/a secret", "InvalidURL"),
    ],
)
def test_a_bad_address_is_said_without_it(
    monkeypatch: pytest.MonkeyPatch, address: str | None, why: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if address is not None:
        monkeypatch.setenv(VARIABLE, address)
    assert notify.post(VARIABLE, "x") == why


def test_an_address_on_the_command_line_is_refused_and_not_shown(tmp_path: Path) -> None:
    said = run("history", "add", "x.json", "--notify", "https://h/secret", status=2).output
    assert "--notify: give the name of a variable that holds the address, not the address" in said
    assert "secret" not in said


def test_a_history_that_cannot_be_read_is_said_and_fails_nothing(tmp_path: Path, service: Service) -> None:
    add(tmp_path, night(tmp_path, 1, 98_765))
    (kept,) = (tmp_path / "history").glob("cpu-*/*/*.json")
    kept.write_text("{")
    said = add(tmp_path, night(tmp_path, 2, 50_000))
    assert "--notify: nothing was posted: " in said
    assert "not JSON" in said
    assert service.posted == []
