"""A headless Chromium that opens pages and measures where their texts are, for tests and for one's own look.

It talks to Chromium over its DevTools protocol, through a pipe: no port, no driver and no network. By hand:
``python -m tests.browser PAGE.html FOLDER`` prints what is wrong with a page and writes a picture of each
width and scheme.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (500, 900, 1400)
"""Widths of a phone held sideways, a small window and a large one, in CSS pixels."""

SCHEMES = ("light", "dark")

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no Chromium found: none of {', '.join(NAMES)} is on PATH, and CHROME is not set"
)

_MEASURE = (Path(__file__).parent / "text_faults.js").read_text(encoding="utf-8")
_READY = """new Promise((resolve) => {
  const look = () => {
    const root = document.documentElement;
    const drawn = !document.getElementById("figures-data") || root.dataset.drawn;
    if (document.readyState === "complete" && drawn) requestAnimationFrame(() => setTimeout(resolve, 30));
    else setTimeout(look, 10);
  };
  look();
})"""


@dataclass
class Browser:
    """A running Chromium with one tab, and pipes of messages that end with a zero byte.

    ``console`` has the warnings, errors and exceptions of the open page since it was opened.
    """

    process: subprocess.Popen[bytes]
    commands: int
    answers: int

    def __post_init__(self) -> None:
        self.console: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._unread = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        command = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                more = os.read(self.answers, 1 << 20)
                assert more, f"the browser ended with exit code {self.process.wait()}"
                self._unread += more
            message, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, event: str, found: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and found["type"] in ("warning", "error", "assert"):
            words = [str(one.get("value", one.get("description", ""))) for one in found["args"]]
            self.console.append(f"{found['type']}: {' '.join(words)}")
        elif event == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Log.entryAdded" and found["entry"]["level"] in ("warning", "error"):
            self.console.append(f"{found['entry']['level']}: {found['entry']['text']}")

    def open(self, page: Path | str, width: int = 1400, scheme: str = "light", height: int = 1000) -> Self:
        """Open a file, or an address that a test serves itself, and wait until it is drawn.

        ``width`` and ``height`` of the window are CSS pixels; ``scheme`` is ``light`` or ``dark``.
        """
        self.call("Page.navigate", url="about:blank")
        self.console.clear()
        self.resize(width, height)
        self.prefer(scheme)
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        self.evaluate(_READY)
        return self

    def resize(self, width: int, height: int = 1000) -> None:
        """Change the size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: str) -> None:
        """Change the reader's colour scheme."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def evaluate(self, script: str) -> Any:
        """Return the value of a script, or of the promise that it returns."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def faults(self) -> list[str]:
        """Return what is wrong with the open page: overlapping or cut texts, sideways scrolling, errors."""
        return [*self.evaluate(_MEASURE), *(f"console: {line}" for line in self.console)]

    def picture(self, path: Path) -> None:
        """Write a picture of the whole open page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Start a Chromium without a window, and end it with the block."""
    assert BROWSER is not None
    (to_read, commands), (answers, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--disable-quic", "--hide-scrollbars", "--force-color-profile=srgb"),
            *(f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"),
            "--remote-debugging-pipe",
        ]

        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        redirected = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *arguments]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(redirected, pass_fds=(to_read, to_write), **quiet)
        for descriptor in (to_read, to_write):
            os.close(descriptor)
        try:
            yield Browser(process, commands, answers)
        finally:
            with suppress(OSError):
                os.close(commands)  # the browser ends when its commands end
            os.close(answers)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(page: str, folder: str) -> None:
    """Print what is wrong with a page, and write its pictures into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with opened_browser() as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                browser.open(Path(page), width, scheme)
                for fault in browser.faults():
                    print(f"{width} {scheme}: {fault}")
                browser.picture(Path(folder) / f"{Path(page).stem}_{width}_{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
