"""Keeps the requests that an engine knows, from their arrival to their end by the client."""

from collections.abc import Collection

from reprise.cache.manager import CacheManager
from reprise.engine.endings import Endings
from reprise.engine.intake import Intake
from reprise.engine.messages import Output
from reprise.engine.step.choices import RunningChoices


class KnownRequests:
    """A table of the engine's requests: takes requests in, and ends them when clients or the server say so. A request
    first waits for its grammar; then it is one or several choices that wait or run. Called by the Engine, on its
    thread."""

    def __init__(self, *, intake: Intake, choices: RunningChoices, endings: Endings, cache: CacheManager) -> None:
        """Set up. intake: the part that adds new choices to `choices`."""
        self._intake, self._endings, self._cache = intake, endings, cache
        self.choices = choices
        """The choices that wait and those that run. Read only."""
        self.held: Collection[str] = intake.held
        """The ids of the requests that wait for their grammars."""
        self.aborted = 0
        """Number of choices, since the start, whose clients have gone."""
        self.accept = intake.open_request
        """Opens a request; see `Intake.open_request`."""

    def before_step(self, now: float) -> list[Output]:
        """Queue requests whose grammars are compiled by now, and end those that can never run. Returns error
        outputs."""
        refused = self._intake.queue_compiled(now) if self.held else []
        return refused + (self._endings.end_hopeless() if self._cache.parking.hopeless else [])

    def abort(self, request_id: str) -> None:
        """End every choice of a request whose client is gone. What it has computed stays cached. Unknown ids are
        ignored."""
        self._intake.cancel(request_id)
        for choice in self.choices.of_request(request_id):
            self._endings.close(choice, choice.sequence.computed_tokens)
            self.aborted += 1

    def finish(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """End a choice in which a stop string was found after `keep_tokens` generated tokens. Unknown ids are ignored:
        the choice may have ended by itself while the message was under way."""
        found = self.choices.get(f"{request_id}/{choice}")
        if found is not None:
            self._endings.cut(found, keep_tokens)

    def finish_all(self, now: float) -> list[Output]:
        """End every request with finish_reason `length`."""
        # Requests that wait for their grammars are queued without them, since no token is drawn for them any more.
        refused = self._intake.queue_uncompiled(now)
        return refused + [self._endings.end(choice, "length", now) for choice in self.choices]

    def fail_all(self, message: str) -> list[Output]:
        """End every request with an error. What these requests have computed is dropped; KV of earlier turns stays
        cached."""
        outputs = self._intake.fail_uncompiled(message)
        for choice in self.choices:
            outputs.append(choice.failed(message))
            self._endings.close(choice, 0)
        return outputs

    def close(self) -> None:
        """End every request without an output; what was computed stays cached."""
        for choice in self.choices:
            self._endings.close(choice, choice.sequence.computed_tokens)
        self._intake.close()
