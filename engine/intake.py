"""Takes requests in: checks them, has their grammars compiled, and queues each as one choice or several."""

from collections.abc import Collection

import msgspec

from reprise.cache.blocks.truncate import CutRules, DoesNotFit, reserved
from reprise.cache.manager import CacheManager
from reprise.cache.requests.opening import ClientCut
from reprise.engine.messages import ModelInfo, Output, Shift, Submit, error_output, is_exact
from reprise.engine.step.choices import RunningChoice, RunningChoices
from reprise.engine.step.grammar import BadGrammar, Constraint, GrammarCompiler
from reprise.engine.step.sampler import PenaltyState, choice_seed
from reprise.scheduler.scheduler import QueueFull, Scheduler
from reprise.scheduler.sequence import Sequence


class Intake:
    """A maker of choices: turns each request into choices, one for each answer that it asks for, and queues them.
    Called by `KnownRequests`, in the engine's loop."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        cache: CacheManager,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        choices: RunningChoices,
        truncation: str,
    ) -> None:
        """Set up. choices: the table to which queued choices are added. truncation: `auto` or `disabled`, for requests
        that do not say."""
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._grammars = grammars
        self._truncation = truncation
        self._choices = choices
        self.held: Collection[str] = grammars.held
        """The ids of the requests that wait for their grammars."""

    def open_request(self, request: Submit, now: float) -> list[Output]:
        """Queue every choice of a request, as soon as its grammar is compiled if it has one. Returns an error output
        for each choice that cannot be taken."""
        problem = self._problem(request)
        if problem is not None:
            return _refused(request, *problem)
        if request.grammar:
            self._grammars.start(request)
            return []
        return self._queue(request, None, now)

    def queue_compiled(self, now: float) -> list[Output]:
        """Queue the requests whose grammars are compiled by now. Returns error outputs for choices that were not
        taken."""
        outputs = []
        for request, constraints in self._grammars.take():
            if isinstance(constraints, BadGrammar):
                outputs += _refused(request, "invalid_grammar", str(constraints))
            else:
                outputs += self._queue(request, constraints, now)
        return outputs

    def queue_uncompiled(self, now: float) -> list[Output]:
        """Queue requests that still wait for their grammars, without their grammars. Call it only when all requests are
        about to be ended: no token may be sampled for these."""
        return [output for request in self._grammars.take_all() for output in self._queue(request, None, now)]

    def fail_uncompiled(self, message: str) -> list[Output]:
        return [
            output for request in self._grammars.take_all() for output in _refused(request, "internal_error", message)
        ]

    def cancel(self, request_id: str) -> None:
        """Forget a request if it still waits for its grammar."""
        self._grammars.cancel(request_id)

    def close(self) -> None:
        self._grammars.close()

    def _queue(self, request: Submit, constraints: list[Constraint] | None, now: float) -> list[Output]:
        """Queue the choices of a request. constraints: one for each choice, if the request has a grammar."""
        refused = []
        for index in range(request.num_choices):
            is_over = bool(request.resume) and request.resume[index] is None
            if is_over and (index or request.over is None):
                continue
            constraint = None if constraints is None or is_over else constraints[index]
            try:
                self._choices.add(self._choice(request, index, constraint, now))
            except QueueFull as error:
                refused.append(error_output(request.request_id, index, "overloaded", f"the queue is full: {error}"))
            except DoesNotFit:
                code, message = _too_long(len(request.token_ids), self._model.max_context)
                refused.append(error_output(request.request_id, index, code, message))
        return refused

    def _problem(self, request: Submit) -> tuple[str, str] | None:
        """Return (error code, message) for a request that can never run; None if it can. The app validates requests
        first, so this catches only what it missed."""
        length = len(request.token_ids)
        if length == 0:
            return "invalid_prompt", "the prompt has no tokens"
        if length >= self._model.max_context and not self._may_truncate(request):
            return _too_long(length, self._model.max_context)
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._model.vocab_size:
            return "invalid_prompt", f"token ids must be between 0 and {self._model.vocab_size - 1}"
        if len(request.prediction) > self._model.max_context or not all(
            0 <= token_id < self._model.vocab_size for token_id in request.prediction
        ):
            return "invalid_prompt", "the prediction is no answer that this model could give"
        if self._choices.of_request(request.request_id) or request.request_id in self.held:
            return "invalid_prompt", "this request id is in use"
        return self._problem_of_resume(request) if request.resume else None

    def _problem_of_resume(self, request: Submit) -> tuple[str, str] | None:
        unfinished = [ids for ids in request.resume if ids is not None]
        over = request.over
        if len(request.resume) != request.num_choices or (not unfinished and over is None):
            return "invalid_prompt", "an answer is resumed with the tokens of each of its choices"
        if any(len(ids) >= request.sampling.max_tokens for ids in unfinished):
            return "invalid_prompt", "a choice that has all of its tokens is over"
        if over is not None and (request.resume[0] is not None or len(over) > request.sampling.max_tokens):
            return "invalid_prompt", "a choice that is over is not resumed"
        if not all(0 <= token_id < self._model.vocab_size for ids in [*unfinished, over or ()] for token_id in ids):
            return "invalid_prompt", f"token ids must be between 0 and {self._model.vocab_size - 1}"
        return None

    def _may_truncate(self, request: Submit) -> bool:
        return (request.truncation or self._truncation) == "auto"

    def _is_exact(self, sequence_id: str) -> bool:
        """Return whether a sequence must not use KV that a codec changed: its request asks for that, or the codec was
        condemned."""
        return is_exact(self._cache.requests.context(sequence_id).session[1])

    def _choice(self, request: Submit, index: int, constraint: Constraint | None, now: float) -> RunningChoice:
        """Make a choice, with a context in the cache and a place in the queue. Raises QueueFull, DoesNotFit."""
        sampling = request.sampling
        resumed = request.resume[index] if request.resume else []
        is_over = resumed is None
        if resumed is None:
            over = request.over or []
            resumed = over[:-1]  # the token that it sampled last was never run
            sampling = msgspec.structs.replace(sampling, max_tokens=max(1, len(over)))
        sequence_id = f"{request.request_id}/{index}"
        rules = CutRules(
            allowed=self._may_truncate(request),
            keep_first=request.keep_first_tokens,
            message_starts=request.message_starts,
            important=request.important,
            begun_tokens=request.begun_tokens,
        )
        tokens = self._cache.requests.open(
            sequence_id,
            request.tenant,
            request.cache_salt,
            request.session_id,
            request.token_ids,
            rules,
            reserved(sampling.max_tokens, self._model.max_context),
            _client_cut(request.shift),
            now,
        )
        prompt_tokens, dropped = len(tokens), 0
        if resumed:
            try:
                dropped = self._cache.requests.resume(sequence_id, resumed)
            except DoesNotFit:
                self._cache.requests.close(sequence_id, 0, now)
                raise
        sequence = Sequence(
            request_id=sequence_id,
            tenant=request.tenant,
            session_id=request.session_id,
            sampling=sampling,
            arrived_s=now,
            token_ids=tokens,
            prompt_tokens=prompt_tokens,
            weight=request.weight,
            target_s=None if resumed or is_over else request.target_s,  # what is resumed has its first token
            dropped_tokens=dropped,
        )
        try:
            self._scheduler.add(sequence)
        except QueueFull:
            self._cache.requests.close(sequence.request_id, 0, now)
            raise
        ends = () if sampling.ignore_eos else self._model.eos_token_ids
        choice = RunningChoice(
            sequence=sequence,
            request_id=request.request_id,
            index=index,
            seed=choice_seed(sampling.seed, index),
            penalties=PenaltyState.of(sampling, request.token_ids),
            end_ids=(*ends, *sampling.stop_token_ids),
            may_truncate=rules.allowed,
            is_first=index == 0,
            is_over=is_over,
            constraint=constraint,
            reads_in_part=self._model.selector != "none" and not self._is_exact(sequence_id),
            prompt_logprobs=request.prompt_logprobs if index == 0 and not is_over else None,
            prediction=request.prediction,
            # What is resumed has had its first token, or another server has told of it.
            wants_progress=request.progress and index == 0 and not request.resume,
        )
        if choice.penalties is not None:
            for token_id in resumed:
                choice.penalties.append(token_id)
        if choice.prompt_logprobs is not None:
            self._cache.requests.compute_all(sequence.request_id)
        return choice


def _refused(request: Submit, code: str, message: str) -> list[Output]:
    return [error_output(request.request_id, index, code, message) for index in range(request.num_choices)]


def _client_cut(shift: Shift | None) -> ClientCut | None:
    return None if shift is None else ClientCut(shift.stream, shift.keep, shift.resume)


def _too_long(length: int, window: int) -> tuple[str, str]:
    message = f"the prompt has {length} tokens; the context window of {window} holds the answer too"
    return "context_length_exceeded", message
