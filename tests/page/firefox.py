"""Firefox for the page's tests, driven through WebDriver BiDi over a websocket: it needs no driver beside the browser.

What is here is what the tests ask for: tabs with a memory of their own, keys, clicks, and expressions that are waited
for. Calls block, and belong to one thread.
"""

import base64
import contextlib
import json
import os
import re
import selectors
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OLDEST = 128  # the first long-lived version whose WebDriver BiDi has contexts of users, keys and pointers
START_S, ANSWER_S, WAIT_S = 60.0, 60.0, 15.0
MAX_MESSAGE_BYTES = 64 << 20
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Delete": "\ue017", "F2": "\ue032", "Control": "\ue009"}
# Nothing is asked of other machines, and nothing opens beside the page.
PREFERENCES = {
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.proxy.no_proxies_on": "127.0.0.1",
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "remote.active-protocols": 1,  # WebDriver BiDi alone
    "services.settings.server": "data:,",
    "toolkit.telemetry.enabled": False,
}


def executable() -> str | None:
    """Return the path of a Firefox that is new enough, or None."""
    for name in ("firefox-esr", "firefox"):
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=START_S, check=False).stdout
        version = re.search(r"Firefox (\d+)\.", said)
        if version is not None and int(version[1]) >= OLDEST:
            return path
    return None


class Socket:
    """The client's end of a websocket that carries texts (RFC 6455)."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13",
        )  # fmt: skip
        self._socket.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        status = self._file.readline(1000)
        while self._file.readline(1000).strip():
            pass
        if b" 101 " not in status:
            raise ConnectionError(f"no websocket: {status!r}")

    def send(self, text: str) -> None:
        self._write(0x1, text.encode())

    def receive(self) -> str:
        """Wait for the next text. Raises TimeoutError or ConnectionError."""
        whole = b""
        while True:
            first, second = self._read(2)
            kind, size = first & 0xF, second & 0x7F
            if size >= 126:
                form = "!H" if size == 126 else "!Q"
                (size,) = struct.unpack(form, self._read(struct.calcsize(form)))
            if len(whole) + size > MAX_MESSAGE_BYTES:
                raise ConnectionError("too long a message")
            part = self._read(size)
            if kind == 0x9:  # a ping
                self._write(0xA, part)
            elif kind == 0x8:
                raise ConnectionError("the browser has closed the websocket")
            elif kind in (0x0, 0x1):
                whole += part
                if first & 0x80:
                    return whole.decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise ConnectionError("the browser is gone")
        return found

    def _write(self, kind: int, data: bytes) -> None:
        size = len(data)
        head = struct.pack("!BB", 0x80 | kind, 0x80 | min(size, 126 if size < 1 << 16 else 127))
        if size >= 126:
            head += struct.pack("!H" if size < 1 << 16 else "!Q", size)
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)


class Tab:
    """One page, in a context of its own: it shares no storage with other tabs."""

    def __init__(self, firefox: "Firefox") -> None:
        self._firefox = firefox
        self._user = firefox.ask("browser.createUserContext")["userContext"]
        self.context = firefox.ask("browsingContext.create", type="tab", userContext=self._user)["context"]

    def close(self) -> None:
        self._firefox.ask("browser.removeUserContext", userContext=self._user)

    def go(self, url: str) -> None:
        self._firefox.ask("browsingContext.navigate", context=self.context, url=url, wait="complete")

    def reload(self) -> None:
        self._firefox.ask("browsingContext.reload", context=self.context, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return what a JavaScript expression, or the promise that it is, gives as JSON."""
        result = self._evaluated(f"Promise.resolve({expression}).then((it) => JSON.stringify(it ?? null))")
        return json.loads(result["value"])

    def wait_until(self, expression: str) -> None:
        until = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise AssertionError(expression)
            time.sleep(0.05)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"
        )
        return found

    def click(self, selector: str) -> None:
        """Click in the middle of the first element, once it is there to be seen."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.wait_until(f"{one}?.checkVisibility()")
        element = {"type": "element", "element": {"sharedId": self._evaluated(one)["sharedId"]}}
        actions = [
            {"type": "pointerMove", "x": 0, "y": 0, "origin": element},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        self._act({"type": "pointer", "id": "mouse", "actions": actions})

    def press(self, *keys: str) -> None:
        """Press keys together: characters, or names from KEYS."""
        values = [KEYS.get(key, key) for key in keys]
        downs = [{"type": "keyDown", "value": value} for value in values]
        self._act(
            {"type": "key", "id": "keys", "actions": [*downs, *({**one, "type": "keyUp"} for one in reversed(downs))]}
        )

    def type(self, text: str) -> None:
        actions = [{"type": kind, "value": char} for char in text for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": actions})

    def _act(self, source: dict[str, Any]) -> None:
        self._firefox.ask("input.performActions", context=self.context, actions=[source])

    def _evaluated(self, expression: str) -> dict[str, Any]:
        answer = self._firefox.ask(
            "script.evaluate", expression=expression, target={"context": self.context}, awaitPromise=True
        )
        if answer["type"] != "success":
            raise AssertionError(answer["exceptionDetails"]["text"])
        result: dict[str, Any] = answer["result"]
        return result


class Firefox:
    """A session of WebDriver BiDi. `complaints`: what pages have written into their consoles as errors and warnings."""

    def __init__(self, port: int) -> None:
        self.complaints: list[str] = []
        self._socket = Socket(port, "/session")
        self._asked = 0
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result. Raises RuntimeError with the browser's words."""
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.receive())
            if said.get("method") == "log.entryAdded" and said["params"]["level"] in ("error", "warn"):
                self.complaints.append(str(said["params"]["text"]))
            if said.get("id") != self._asked:
                continue
            if said["type"] == "error":
                raise RuntimeError(f"{method}: {said['message']}")
            result: dict[str, Any] = said["result"]
            return result

    @contextlib.contextmanager
    def tab(self) -> Iterator[Tab]:
        tab = Tab(self)
        try:
            yield tab
        finally:
            tab.close()

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def firefox(directory: Path) -> Iterator[Firefox]:
    """Start a Firefox whose profile lies in an empty directory."""
    path = executable()
    assert path is not None
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items()]
    (directory / "user.js").write_text("".join(lines))
    command = [path, "--headless", "--no-remote", "--profile", str(directory), "--remote-debugging-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            browser = Firefox(_port(process))
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _port(process: "subprocess.Popen[bytes]") -> int:
    """Wait until the browser says at which port it listens."""
    assert process.stderr is not None
    said = b""
    until = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            more = os.read(process.stderr.fileno(), 65536)
            if not more:
                break
            said += more
            found = re.search(rb"BiDi listening on ws://[\w.:\[\]]+?:(\d+)\s", said)
            if found is not None:
                return int(found[1])
    raise AssertionError(f"Firefox does not listen: {said[-2000:].decode(errors='replace')}")
