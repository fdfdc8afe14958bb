"""A page in headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
START_SECONDS = 60.0
WAIT_SECONDS = 20.0
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37}


class Page:
    """One page. `requested` has the URL of each request that it sent."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async for message in self._socket:
            found = json.loads(message.data)
            if found.get("method") == "Network.requestWillBeSent":
                self.requested.append(found["params"]["request"]["url"])
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]
        raise AssertionError("the browser ended")

    async def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression, after its promise."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def open(self, url: str, *, until: str) -> None:
        """Open a URL, and wait until a JavaScript expression is true."""
        await self.call("Page.navigate", url=url)
        await self.wait(f"location.href !== 'about:blank' && Boolean({until})")

    async def wait(self, until: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not await self.evaluate(until):
            assert time.monotonic() < deadline, f"{until} did not become true"
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def set_scheme(self, scheme: str) -> None:
        """Prefer the colour scheme `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)


@asynccontextmanager
async def open_browser() -> AsyncIterator[Page]:
    """Start Chromium with an empty profile, and end it afterwards."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={profile}", stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                port = await _debugging_port(process)
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as response:
                    target = await response.json()
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Network", "Runtime"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.kill()
            await process.wait()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    """Return the port that Chromium prints."""
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on" in line:
            return int(line.split(b":")[-1].partition(b"/")[0])
    raise AssertionError("Chromium ended before it listened")
