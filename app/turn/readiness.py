"""Tracks whether requests are taken, and holds what the app needs of the loaded model."""

import asyncio
import logging
import time
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import msgspec

from reprise.app.errors import model_not_found, unavailable
from reprise.app.settings.sections import ANY_NAME
from reprise.app.text.answer_form import AnswerForm
from reprise.app.text.tokenizer import ChatTokenizer, TokenizerError
from reprise.app.turn.ports import EnginePort
from reprise.app.turn.sampling import OPENAI, SamplingDefaults, read_defaults
from reprise.engine.messages import ModelInfo
from reprise.engine.process.client import EngineFailed

RETRY_S = {"loading": 5.0, "restarting": 5.0, "draining": 30.0}

log = logging.getLogger(__name__)


class Status(StrEnum):
    """The answers of /ready. Requests are taken in `ready` only."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Readiness:
    """The state of the server and its model. One per app, on its event loop."""

    def __init__(self, *, engine: EnginePort, aliases: Collection[str], calls: str, thoughts: str) -> None:
        """Set up. aliases: further names of the model; with ANY_NAME among them, any name is one. calls, thoughts: the
        families in whose form the model writes them."""
        self.model: ModelInfo | None = None  # stays once it is loaded, also while the engine restarts
        self.sampling_defaults: SamplingDefaults = OPENAI  # the model's own, once it is loaded
        self.loaded_s: int = 0  # unix time
        self.failure: str | None = None
        self.draining = False
        self.joining = False  # a fleet, and not ready before it knows which sessions were deleted meanwhile
        self._engine = engine
        self._aliases = aliases
        self._calls, self._thoughts = calls, thoughts
        self._tokenizer: ChatTokenizer | None = None
        self._loaded = asyncio.Event()

    async def load(self) -> None:
        """Wait for the engine to load the model, then read what the app needs of it. Failures are stored, not
        raised."""
        try:
            await self._engine.wait_ready()
            model = self._engine.model
            assert model is not None
            directory = Path(model.path)
            self._tokenizer = await asyncio.to_thread(
                ChatTokenizer.load,
                directory,
                calls=self._calls,
                thoughts=self._thoughts,
                media_ids=model.media_token_ids,
            )
            self.sampling_defaults, problems = await asyncio.to_thread(read_defaults, directory)
            for problem in problems:
                log.warning("%s", problem)
            self.model = msgspec.structs.replace(model, warnings=(*model.warnings, *problems))
            self.loaded_s = int(time.time())
        except (EngineFailed, TokenizerError) as error:
            self.failure = self.failure or str(error)  # `wait_loaded` raises it
        except Exception:
            self.failure = self.failure or "the model could not be set up; the log has the reason"
            log.exception("setting up the model failed")
        finally:
            self._loaded.set()

    def fail(self, problem: str) -> None:
        """Take no more requests, for a reason that only an operator can remove. The server then ends. problem: that
        reason."""
        self.failure = problem
        self._loaded.set()

    async def wait_loaded(self) -> ModelInfo:
        """Wait for the model. Raises EngineFailed if it cannot be served."""
        await self._loaded.wait()
        if self.model is None or self.failure is not None:
            raise EngineFailed(self.failure or "the engine failed")
        return self.model

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return Status.FAILED
        if self.draining:
            return Status.DRAINING
        if self._engine.state == "ready" and (self._tokenizer is None or self.joining):
            return Status.LOADING
        return Status(str(self._engine.state))

    def require(self) -> tuple[ModelInfo, ChatTokenizer]:
        """Return the model and its tokenizer. Raises ApiError 503 with Retry-After unless requests are taken."""
        status = self.status
        if status is not Status.READY or self.model is None or self._tokenizer is None:
            message = f"The server takes no requests right now: it is {status}."
            raise unavailable(message, code=str(status), retry_after_s=RETRY_S.get(status, 60.0))
        return self.model, self._tokenizer

    @property
    def form(self) -> AnswerForm:
        """The form in which the model writes calls and thoughts. To be asked only once the model is loaded."""
        assert self._tokenizer is not None
        return self._tokenizer.form

    @property
    def template_outcomes(self) -> dict[str, str]:
        """The treatment by the chat template of each kind of message that many templates do not expect; empty for a
        model without a template. To be asked only once the model is loaded."""
        assert self._tokenizer is not None
        return self._tokenizer.form.found.described if self._tokenizer.has_chat_template else {}

    @property
    def takes_chats(self) -> bool:
        """Whether the model has a chat template. To be asked only once the model is loaded."""
        assert self._tokenizer is not None
        return self._tokenizer.has_chat_template

    def require_engine(self) -> None:
        """Raise ApiError unless the engine can be asked about sessions. Unlike `require` it also passes while the
        server joins its fleet and does not take turns yet."""
        if not (self.joining and self._engine.state == "ready" and self._tokenizer is not None):
            self.require()

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint; empty until it has been loaded once."""
        return "" if self.model is None else self.model.fingerprint

    def require_loaded(self) -> ModelInfo:
        """Return the model, even while no requests are taken. Raises ApiError 503 until it has been loaded once."""
        return self.model if self.model is not None else self.require()[0]

    @property
    def names(self) -> list[str]:
        """The model's name and its aliases. To be asked only once the model is loaded."""
        aliases = (alias for alias in self._aliases if alias != ANY_NAME)
        return list(dict.fromkeys((self.require_loaded().name, *aliases)))

    def find_model(self, name: str | None) -> ModelInfo:
        """Return the served model if `name` is None, its name or an alias (any name is, with ANY_NAME among the
        aliases). Raises ApiError 404 for another name, or 503 until the model has been loaded once."""
        model = self.require_loaded()
        if name is None or name in self.names or ANY_NAME in self._aliases:
            return model
        raise model_not_found(name, self.names)
