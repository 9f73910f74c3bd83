"""A headless Chromium for tests. It opens pages, and records their requests and complaints.

Debian: `apt-get install chromium chromium-driver`, or `make browser`.
"""

import base64
import functools
import http.server
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
OFF = ("gpu", "quic", "background-networking", "component-update", "sync")
FLAGS = ("--headless", "--no-first-run", "--no-sandbox", *(f"--disable-{feature}" for feature in OFF))
"""Options of Chromium. Without a sandbox, it also starts as root. It opens only our own pages."""
TIMEOUT_S = 120
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
LOADS = 5
"""The largest number of times that a page is loaded if the network of this machine changes meanwhile."""


class Browser:
    """One tab of the browser."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self._url = ""
        self._complaints: list[dict[str, Any]] = []

    def open(self, url: str) -> None:
        """Load a page and wait for it. Forgets the requests and complaints of earlier pages.

        When a network interface comes or goes, Chromium drops its requests, and the page is loaded again.
        This happens when other tests start or stop a Slurm cluster.
        """
        self._url = url
        for _ in range(LOADS):
            try:
                self.driver.get("about:blank")  # if only the part after # changed, nothing would be loaded
                self._log("performance")
                self._log("browser")
                self._complaints = []
                self.driver.get(url)
            except WebDriverException as error:
                if NETWORK_CHANGED not in str(error):
                    raise
            else:
                if not self._network_changed():
                    return
        raise RuntimeError(f"the network of this machine changed in each of {LOADS} loads of {url}")

    def evaluate(self, script: str, *arguments: Any) -> Any:
        """Return the value of a JavaScript expression. It can use `arguments[0]` and so on."""
        return self.driver.execute_script(f"return ({script})", *arguments)

    def console(self) -> list[str]:
        """Return warnings and errors, including scripts' uncaught errors and blocked requests."""
        self._complaints += self._log("browser")
        entries = self._complaints
        self._complaints = []
        return [entry["message"] for entry in entries if entry["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Return the addresses requested since `open`, including that of the page itself.

        Data URLs and the browser's own requests are left out.
        """
        events = (json.loads(entry["message"])["message"] for entry in self._log("performance"))
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "chrome:"))]

    def screen(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the viewport in CSS pixels, and the preferred colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, file: Path, *, without_last: int = 0) -> None:
        """Write the viewport as a PNG, without the given number of CSS pixels at the bottom."""
        width, height = self.evaluate("[innerWidth, innerHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height - without_last, "scale": 1}
        taken = self._command("Page.captureScreenshot", {"clip": clip})
        file.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self, file: Path) -> None:
        """Write the page as it is printed on A4."""
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": False}
        file.write_bytes(base64.b64decode(self._command("Page.printToPDF", paper)["data"]))

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Requests of a page that is already loaded can be dropped as well: see `open`.
        """

        def holds(_: object) -> Any:
            if self._network_changed():
                self.open(self._url)
            return self.evaluate(expression)

        WebDriverWait(self.driver, TIMEOUT_S).until(holds, expression)

    def wait_for_frame(self) -> None:
        """Wait until the last change is painted."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def _network_changed(self) -> bool:
        """Whether the page has complained that the network changed."""
        self._complaints += self._log("browser")
        return any(NETWORK_CHANGED in complaint["message"] for complaint in self._complaints)

    def _log(self, kind: str) -> Any:
        return self.driver.get_log(kind)  # type: ignore[no-untyped-call]

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)


def missing() -> str | None:
    """Return why there is no browser here, or None."""
    if not any(map(shutil.which, CHROMIUM)):
        return f"none of {', '.join(CHROMIUM)} is installed: run `make browser`"
    return None if shutil.which("chromedriver") else "chromedriver is not installed: run `make browser`"


def skip_or_fail(reason: str) -> None:
    """Skip the test because something is not installed. If CI is set, fail instead."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a fresh browser with an empty profile."""
    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, CHROMIUM)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="perfsuite-chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for all tests of a file. Without a browser the tests are skipped, or fail if CI is set."""
    reason = missing()
    if reason is not None:
        skip_or_fail(reason)
    with chromium() as opened:
        yield opened


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log: tests look at the browser's own list of requests."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory on this machine, and yield the server's address."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
