"""A headless Chromium driven over its debugging pipe: no driver package, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Page:
    """One page in a fresh profile; ``console`` collects what it reports as errors, ``requests`` what it asks for."""

    def __init__(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert CHROMIUM is not None
        self.console: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._process, self._write, self._read = _start([CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}"])
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def run(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited."""
        answer = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS.get(key, 0))

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + across * box["width"], box["y"] + down * box["height"]
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def choose(self, label: str, value: str) -> None:
        self.run(
            f"""(() => {{
              const labels = [...document.querySelectorAll("label")];
              const label = labels.find((one) => one.firstChild.textContent === {json.dumps(label)});
              const select = label.querySelector("select");
              select.focus();
              select.value = {json.dumps(value)};
              select.dispatchEvent(new Event("change"));
            }})()"""
        )

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _wait_for(self, event: str) -> None:
        while not any(seen["method"] == event for seen in self._events):
            self._next()

    def _next(self, timeout_s: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium did not answer"
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "Chromium ended"
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])


_KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Escape": 27,
    "Tab": 9,
}


def _start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], int, int]:
    """The browser with its debugging pipe: it reads from descriptor 3 and writes to 4."""
    child_in, write = os.pipe()
    read, child_out = os.pipe()
    child_in, child_out = (_high(descriptor) for descriptor in (child_in, child_out))

    def place() -> None:
        os.dup2(child_in, 3)
        os.dup2(child_out, 4)

    process = subprocess.Popen(
        [*command, "--remote-debugging-pipe"],
        preexec_fn=place,
        pass_fds=(3, 4),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    return process, write, read


def _high(descriptor: int) -> int:
    """The same descriptor under a number that 3 and 4 do not collide with."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
