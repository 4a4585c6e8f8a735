"""Asks a running server which model it serves, as a client would."""

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

TIMEOUT_S = 10.0
DELETE_TRIES, DELETE_PAUSE_S = 3, 0.3  # a session is deleted when its request has ended, a moment after the answer
ANSWER_TIMEOUT_S = 600.0  # a small machine may take minutes for a first prompt
NO_KEY = "none"  # what clients that insist on a key are given where the server wants none


class Unanswered(Exception):
    """The server has not answered as it should. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Served:
    """The facts about a running server that a client's configuration needs."""

    url: str  # without a slash at its end
    model: str  # the name that requests give
    window: int  # tokens
    output_tokens: int  # how much of the window a client keeps free for an answer
    thinks: bool
    key_variable: str  # environment variable that holds the key; "": the server wants none
    own_window: int = 0  # the longest window that the model supports; 0: the server does not say

    @property
    def way_to_longer(self) -> str:
        """Advice on how to get a longer context window, for the case that the present one is too short."""
        advice = "serve a model with a longer window"
        if self.window < self.own_window:
            advice += ", or raise model.max_context, or cache.hbm_tokens where that ends it"
        return advice

    @property
    def base(self) -> str:
        """The URL below which OpenAI's endpoints are."""
        return f"{self.url}/v1"

    @property
    def shell_key(self) -> str:
        """The key as a shell command needs it: the variable that holds it, never the key itself. NO_KEY if the server
        wants none."""
        return f'"${self.key_variable}"' if self.key_variable else NO_KEY


class Server:
    """A running server. Its methods raise Unanswered."""

    def __init__(self, url: str, key_variable: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(key_variable, "")
        self._key_variable, self._is_given = key_variable, bool(key)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._sessions: dict[str, None] = {}  # sessions that `post` has made, in order

    def served(self, name: str | None) -> Served:
        """Return the facts about the server. name: the model, if several are served; None: the first one."""
        listed = self._ask("GET", "/v1/models", None, TIMEOUT_S).get("data") or []
        models = [model for model in listed if name is None or model["id"] == name]
        if not models and name is not None and listed:
            models = [self._ask("GET", f"/v1/models/{name}", None, TIMEOUT_S)]
        if not models:
            raise Unanswered(f"{self._url} serves no model")
        model = models[0]
        window = model.get("context_length") or model.get("max_model_len")
        if not window:
            raise Unanswered(f"{self._url} does not say how long the window of {model['id']} is")
        return Served(
            url=self._url,
            model=model["id"],
            window=window,
            own_window=(model.get("meta") or {}).get("n_ctx_train") or 0,
            output_tokens=model.get("max_output_tokens") or window // 4,
            thinks=bool(model.get("capabilities", {}).get("reasoning")),
            key_variable=self._key_variable if self._is_given else "",
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. The session that it belongs to is remembered for `delete_sessions`."""
        return self._ask("POST", path, body, ANSWER_TIMEOUT_S)

    def delete_sessions(self) -> list[str]:
        """Delete the sessions of all requests that `post` has sent. Returns those that could not be deleted."""
        left = []
        for session_id in self._sessions:
            for _ in range(DELETE_TRIES):
                with contextlib.suppress(httpx.HTTPError):
                    url = f"{self._url}/v1/sessions/{quote(session_id, safe='')}"
                    if httpx.delete(url, headers=self._headers, timeout=TIMEOUT_S).status_code in (204, 404):
                        break
                time.sleep(DELETE_PAUSE_S)
            else:
                left.append(session_id)
        self._sessions.clear()
        return left

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        try:
            answer = httpx.request(method, self._url + path, json=body, headers=self._headers, timeout=timeout_s)
            if method == "POST" and (session_id := answer.headers.get("x-session-id")):
                self._sessions[session_id] = None
            told = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unanswered(f"no server answers at {self._url}: {error}; start one with `reprise serve`") from None
        if answer.status_code == 401:
            raise Unanswered(f"the server wants a key: set {self._key_variable}, or name another variable with --key")
        if answer.status_code != 200 or not isinstance(told, dict):
            refusal = told.get("error") if isinstance(told, dict) else None
            message = refusal.get("message") if isinstance(refusal, dict) else None
            raise Unanswered(message or f"{self._url}{path} answered {answer.status_code}")
        return told
