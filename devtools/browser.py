"""A headless Chromium that opens pages and measures where their texts are, for tests and for one's own look.

It talks to Chromium over its DevTools protocol, through a pipe: no port, no driver and no network. By hand:
``python -m devtools.browser PAGE.html FOLDER`` prints what is wrong with a page and writes a picture of each
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
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (500, 900, 1400)
"""Widths of a phone held sideways, a small window and a large one, in CSS pixels."""

_OPTIONS = """
    --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
    --disable-background-networking --disable-component-update --disable-sync --disable-quic
    --hide-scrollbars --force-color-profile=srgb --remote-debugging-pipe
"""
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


class Browser:
    """A running Chromium with one tab, and pipes of messages that end with a zero byte.

    ``console`` has the warnings, errors and exceptions of the open page since it was opened.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.console: list[str] = []
        self._commands, self._answers = commands, answers
        self._number, self._unread = 0, b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                more = os.read(self._answers, 1 << 20)
                assert more, "the browser ended"
                self._unread += more
            message, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
            words = [str(arg.get("value", arg.get("description", ""))) for arg in params["args"]]
            self.console.append(f"{params['type']}: {' '.join(words)}")
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")

    def open(self, page: Path, width: int = 1400, scheme: str = "light") -> Self:
        """Open a file in a window of this width in CSS pixels, and wait until it is drawn."""
        self.call("Page.navigate", url="about:blank")
        self.console.clear()
        window = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **window)
        self.prefer(scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.evaluate(_READY)
        return self

    def prefer(self, scheme: str) -> None:
        """Change the reader's colour scheme to ``light`` or ``dark``."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def evaluate(self, script: str) -> Any:
        """Return the value of a script, or of the promise that it returns."""
        response = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    def faults(self) -> list[str]:
        """Return what is wrong with the open page: overlapping or cut texts, sideways scrolling, errors."""
        return [*self.evaluate(_MEASURE), *(f"console: {line}" for line in self.console)]

    def picture(self, path: Path) -> None:
        """Write a picture of the whole open page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(png))


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Start a Chromium without a window, and end it with the block."""
    assert BROWSER is not None, f"none of {', '.join(NAMES)} is on PATH, and CHROME is not set"
    (to_read, commands), (answers, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        own = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        redirected = [
            "bash",
            "-c",
            f'exec "$@" 3<&{to_read} 4>&{to_write}',
            "bash",
            BROWSER,
            *_OPTIONS.split(),
            *own,
        ]
        quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(redirected, pass_fds=(to_read, to_write), **quiet)
        for descriptor in (to_read, to_write):
            os.close(descriptor)
        try:
            yield Browser(commands, answers)
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
            for scheme in ("light", "dark"):
                for fault in browser.open(Path(page), width, scheme).faults():
                    print(f"{width} {scheme}: {fault}")
                browser.picture(Path(folder) / f"{Path(page).stem}_{width}_{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
