"""A headless Chromium for tests of the page: opened, clicked and photographed over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._count = 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._loads = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns its result; requests and errors that are told meanwhile are noted."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]  # type: ignore[no-any-return]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, told = message.get("method"), message.get("params", {})
        self._loads += kind == "Page.loadEventFired"
        if kind == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif kind == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"])

    def open(self, file: Path, width: int = 1200, scheme: str = "light") -> None:
        """Loads a file at a window width and in a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        loads = self._loads
        self.call("Page.navigate", url=file.as_uri())
        until = time.monotonic() + 30
        # The page before this one is complete, too: only the event and the address say that this one is there.
        while self.evaluate("document.readyState") != "complete" or (
            self._loads == loads or self.evaluate("location.href") != file.as_uri()
        ):
            assert time.monotonic() < until, "the page does not load"

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key as a keyboard does."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def photograph(self, file: Path) -> None:
        """Writes the whole page as a picture."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing() -> Iterator[Page]:
    """A browser with one tab, ended and cleaned up in the end."""
    import websocket  # of the test extra

    program = found()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--no-first-run",
            "--remote-allow-origins=*",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            socket = websocket.create_connection(_address(Path(profile), process), timeout=60)
            yield Page(socket)
            socket.close()
        finally:
            process.terminate()
            process.wait(20)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """The tab's socket, once the browser has written down its port."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                tabs = json.load(answer)
            return next(str(tab["webSocketDebuggerUrl"]) for tab in tabs if tab["type"] == "page")
        except (OSError, IndexError, StopIteration):
            time.sleep(0.1)
    raise AssertionError("the browser did not start")
