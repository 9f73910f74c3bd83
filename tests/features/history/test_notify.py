import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfsuite.features.history import notify
from perfsuite.features.history.store import Place, StoredVerdict
from perfsuite.features.history.verdicts import CaseNight
from perfsuite.results.outcome import Verdict
from tests.cli.commands import error_of, run
from tests.samples import BEFORE, make_result, now, write_session

VARIABLE = "PERFSUITE_NOTIFY_URL"
SECRET = "T0/B0/secret"


class Service(HTTPServer):
    """A webhook that records everything that is posted to it."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, str, str]] = []


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.server.posted.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.status)
        self.send_header("Location", "/login")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # called if a redirect is followed

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{server.server_port}/{SECRET}")
        monkeypatch.setenv("no_proxy", "*")
        yield server
        server.shutdown()
        thread.join()


def night(tmp_path: Path, day: int, speed: float = 98_765, **changes: Any) -> Path:
    result = make_result(*[now(tokens_per_s=speed)] * 3, **changes)
    return write_session(tmp_path / str(day), result, started_at=f"2026-01-{day:02}T01:00:00+00:00")


def add(tmp_path: Path, file: Path) -> str:
    said = run("history", "add", file, "--history", tmp_path / "history", "--notify", VARIABLE).output
    assert "secret" not in said
    return said[said.index("--notify: ") :]


NOTHING = "--notify: nothing was posted, because no case changed its state\n"


def test_posts_only_nights_with_changes(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_URL", "https://example.org/runs?a=1&b=2")
    slow = night(tmp_path, 2, 50_000, shadow=True)
    for file, said in (
        (night(tmp_path, 1), NOTHING),
        (slow, "--notify: posted, 1 changed\n"),
        (slow, NOTHING),  # this session was already added
        (night(tmp_path, 3, 50_000), NOTHING),
        (night(tmp_path, 4), "--notify: posted, 1 changed\n"),
    ):
        assert add(tmp_path, file) == said
    (path, kind, first), (_, _, last) = service.posted
    assert (path, kind) == (f"/{SECRET}", "application/json")
    place = f"`{BEFORE.case.id}` on `cpu-test-2c`"
    begin = "perfsuite: cases changed since the night before"
    end = "https://example.org/runs?a=1&amp;b=2"
    red = f"newly red: {place}: regressed (shadow): `tokens/s -49.4%`"
    assert json.loads(first) == {"text": f"{begin}\n{red}\n{end}"}
    assert json.loads(last) == {"text": f"{begin}\nnewly green: {place}: passed\n{end}"}


def failed(case: str) -> CaseNight:
    place = Place(Path("x.json"), "cpu-x", "a" * 40, "20260101")
    return CaseNight(place, case, StoredVerdict(word="failed"))


def test_posted_text_mentions_nobody() -> None:
    bad = "`<!channel> @here <@U1> *b* & [x](https://evil)\n# all_gather 7 -> 14"
    *_, line = notify.message([failed("a`@all")], {("cpu-x", "a`@all"): bad}, "").splitlines()
    assert line == (
        "newly red: `a'@\u200ball` on `cpu-x`: failed: "
        "`'&lt;!channel&gt; @\u200bhere &lt;@\u200bU1&gt; *b* &amp; [x](https://evil) # all_gather 7 → 14`"
    )


def test_a_long_posted_text_is_cut() -> None:
    changed = [failed(f"case-{number}") for number in range(50)]
    lines = notify.message(changed, {}, "https://x").splitlines()
    assert lines[-2:] == ["and 10 more", "https://x"]
    assert len(lines) == 43


@pytest.mark.parametrize("status", [302, 404, 500])
def test_follows_no_redirect_and_reports_bad_answers(tmp_path: Path, service: Service, status: int) -> None:
    service.status = status
    printed = add(tmp_path, night(tmp_path, 1, 50_000))
    assert printed == f"--notify: nothing was posted: the answer was {status}\n"
    assert [path for path, _, _ in service.posted] == [f"/{SECRET}"]


def test_names_a_webhook_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}")
        assert notify.post(VARIABLE, "x", timeout_s=0.2) == "TimeoutError"


def test_names_a_webhook_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{closed.getsockname()[1]}/{SECRET}")
    assert notify.post(VARIABLE, "x") == "Connection refused"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", f"{VARIABLE} is not set"),
        ("  ", f"{VARIABLE} is not set"),
        ("file:///etc/secret", f"{VARIABLE} is not an address that begins with https://"),
        ("http://[secret", "ValueError"),
        ("https://h:secret/x", "InvalidURL"),
        ("https://h/a secret", "InvalidURL"),
    ],
)
def test_names_a_bad_address_only_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    assert notify.post(VARIABLE, "x") == why
    monkeypatch.delenv(VARIABLE)
    assert notify.post(VARIABLE, "x") == f"{VARIABLE} is not set"


def test_refuses_an_address_without_showing_it() -> None:
    said = error_of("history", "add", "x.json", "--notify", "https://h/secret")
    assert "--notify: give the name of the variable that holds the address, not the address" in said
    assert "secret" not in said


def test_unreadable_history_is_reported_only(tmp_path: Path, service: Service) -> None:
    add(tmp_path, night(tmp_path, 1))
    (kept,) = (tmp_path / "history").glob("cpu-*/*/*.json")
    kept.write_text("{")
    said = add(tmp_path, night(tmp_path, 2, 50_000))
    assert said.startswith("--notify: nothing was posted: ")
    assert "not JSON" in said
    assert service.posted == []


def test_posts_although_one_file_is_unreadable(tmp_path: Path, service: Service) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    slow = night(tmp_path, 1, 50_000)
    words = ("history", "add", broken, slow, "--history", tmp_path / "history", "--notify", VARIABLE)
    assert "--notify: posted, 1 changed" in run(*words, status=2).output
    ((_, _, body),) = service.posted
    first, *others = json.loads(body)["text"].splitlines()
    assert first.startswith(f"perfsuite: `a session could not be read: {broken}: not JSON")
    assert f"newly red: `{BEFORE.case.id}` on `cpu-test-2c`: regressed" in others[-1]


def test_failure_before_a_launch_has_its_reason(tmp_path: Path, service: Service) -> None:
    verdict = Verdict(outcome="failed", launches=0, failure="error", reasons=("no such model",))
    result = make_result(BEFORE, verdict=verdict).replace(runs=())
    file = write_session(tmp_path / "x", result)
    run("history", "add", file, "--history", tmp_path / "history", "--notify", VARIABLE, status=1)
    ((_, _, body),) = service.posted
    assert json.loads(body)["text"].endswith(": failed: `error`")


def test_unfinished_night_posts_no_changes(tmp_path: Path, service: Service) -> None:
    file = write_session(tmp_path / "x", make_result(now(tokens_per_s=98_765)), status="interrupted")
    assert add(tmp_path, file) == "--notify: posted, 0 changed\n"
    ((_, _, body),) = service.posted
    line = "`The session was interrupted. Later cases were not measured.`"
    assert json.loads(body) == {"text": f"perfsuite: {line}"}
