"""Turns a request into what the engine gets, and decides what is recorded of its answer."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reprise.app.conversations.prepared_prompt import PreparedPrompt
from reprise.app.conversations.text_thread import TextThread
from reprise.app.errors import cannot_be_shortened, invalid
from reprise.app.schemas.chat import ChatCompletionRequest, Message
from reprise.app.schemas.completions import CompletionRequest
from reprise.app.schemas.fields import SESSION_ID, SESSION_ID_RULE, GenerationRequest
from reprise.app.schemas.tools import rendered_call
from reprise.app.settings.sections import CacheSettings
from reprise.app.text.answer_parser import AnswerParser
from reprise.app.text.answer_parts import AnswerWriter, Wanted
from reprise.app.text.grammars import grammar_of, param_of
from reprise.app.text.template import TemplateError
from reprise.app.text.tokenizer import ChatTokenizer, PromptTooLong
from reprise.app.turn.alone import LoneTurn
from reprise.app.turn.answer import Answer
from reprise.app.turn.domains import domain_of
from reprise.app.turn.ports import TurnHooks
from reprise.app.turn.token_limits import TokenLimits
from reprise.engine.messages import ModelInfo, SamplingParams, Shift, Submit

MAX_TOKEN_CHARS = 256  # no vocabulary in use has longer tokens, so text beyond that is too long without tokenizing it
_PREDICTED_CHARS = 8  # most characters of a prediction for each token of the window
TAIL_TOKENS = 8  # at the end of a prompt, in which a template may open a thought


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that sent the request, and what the request's headers say."""

    tenant: str
    arrived_s: float  # monotonic clock
    session_header: str | None = None
    timeout_header: str | None = None
    is_exact: bool = False  # its key wants `kv_quality` exact for all that it asks
    ttft_ms: float | None = None  # its key's target for the first token of requests that name none
    hooks: TurnHooks = field(default_factory=LoneTurn)


R = TypeVar("R", bound=GenerationRequest)


def narrowed(request: R, caller: Caller) -> R:
    """Return the request with `kv_quality` "exact" if its key demands that, otherwise the request itself."""
    return request.model_copy(update={"kv_quality": "exact"}) if caller.is_exact else request


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt and everything else that the engine's message is made of."""

    request: GenerationRequest
    prompt: PreparedPrompt
    token_ids: list[int]  # the prompt's, and those of an answer's beginning that the client gave
    parser: Callable[[], AnswerWriter]  # makes one for each choice
    record: Callable[[Answer], None]
    id_prefix: str
    param: str  # the field in which the prompt stands
    grammar: str = ""
    grammar_param: str = ""  # the field that asks for the grammar
    keep_first_tokens: int = 0
    message_starts: tuple[int, ...] = ()
    important: tuple[tuple[int, int], ...] = ()
    begun_tokens: int = 0
    shift: Shift | None = None
    prompt_logprobs: int | None = None
    prediction: Sequence[int] = ()

    def as_submit(self, *, tenant: str, sampling: SamplingParams, weight: float, target_s: float | None) -> Submit:
        """Return the message that submits the request to the engine. weight: the request's share of the engine,
        relative to requests of weight 1. target_s: seconds within which its first token is wanted."""
        request = self.request
        return Submit(
            request_id=f"{self.id_prefix}-{secrets.token_hex(12)}",
            session_id=self.prompt.session_id,
            tenant=tenant,
            cache_salt=request.salt,
            token_ids=self.token_ids,
            num_choices=request.n or 1,
            sampling=sampling,
            truncation="disabled" if self.prompt_logprobs is not None else request.truncation or "",
            keep_first_tokens=min(self.keep_first_tokens, len(self.token_ids)),
            message_starts=self.message_starts,
            important=self.important,
            begun_tokens=self.begun_tokens,
            shift=self.shift,
            weight=weight,
            target_s=target_s,
            grammar=self.grammar,
            prompt_logprobs=self.prompt_logprobs,
            prediction=list(self.prediction),
            progress=isinstance(request, ChatCompletionRequest) and bool(request.stream) and request.include_progress,
        )

    def answers(self, tokenizer: ChatTokenizer) -> list[Answer]:
        """Return one `Answer`, still empty, for each choice that the request asks for."""
        request = self.request
        return [
            Answer(
                index=index,
                tokenizer=tokenizer,
                min_tokens=request.min_tokens or 0,
                parser=self.parser(),
                skip_special_tokens=request.skip_special_tokens is not False,
            )
            for index in range(request.n or 1)
        ]


Prepare = Callable[[ModelInfo, str | None], Awaitable[Prepared]]
"""Maps (model, session id) to a prepared request. Raises ApiError."""


async def prepare_chat(
    request: ChatCompletionRequest,
    *,
    tokenizer: ChatTokenizer,
    transcripts: TextThread,
    model: ModelInfo,
    tenant: str,
    session_id: str | None,
    limits: TokenLimits,
    cache: CacheSettings,
) -> Prepared:
    """Render and tokenize a chat. Where the chat repeats recorded answers, their recorded token ids are used. Raises
    ApiError."""
    if sum(len(message.content) for message in request.messages) > limits.prompt * MAX_TOKEN_CHARS:
        raise limits.too_long(None)
    if not tokenizer.has_chat_template:
        raise invalid("This model has no chat template.", code="no_chat_template", param="model")
    form, grammar, grammar_param = tokenizer.form, "", ""
    if request.may_have_form:
        grammar, grammar_param = await grammar_of(request, form), param_of(request)
    kept = request.messages[:-1] if request.continue_final_message else request.messages
    domain = domain_of(tenant, request.salt)
    offered = None
    if request.tools:
        offered = await transcripts.first_seen([tool.as_rendered() for tool in request.tools], tenant=domain)
    tools = None if offered is None else offered.tools
    shown, shown_tools = form.prompt([message.as_rendered() for message in kept], tools)
    added = len(shown) - len(kept)  # a system message of ours, with the tools
    in_order = form.ordered(shown, shown_tools)
    messages, places = in_order.messages, in_order.places
    with _refusing(limits, model.max_context):
        prompt = await transcripts.prepare(
            tokenizer=tokenizer,
            tenant=domain,
            model=model.fingerprint,
            messages=messages,
            tools=shown_tools,
            template_args={
                **form.template_args(thinks=request.thinks, effort=request.reasoning_effort),
                **(request.chat_template_kwargs or {}),
            },
            session_id=session_id,
            now=time.time(),
            client_shift=cache.client_shift if request.client_shift is None else request.client_shift,
            max_tokens=limits.prompt - 1,
            max_newest_tokens=min(limits.prompt, model.max_context) - 1,
            offered=offered,
            numbers=_numbers(places[added:], len(messages)),
        )
    prefix = request.messages[-1].content if request.continue_final_message else ""
    wanted = _wanted(request, _callable_tools(request), parallel=request.parallel_tool_calls is not False)
    # The template may open a thought at the beginning of the answer. What has a given form, or is begun, is no thought.
    end_of_prompt = tokenizer.decode(prompt.token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    is_given = bool(prefix) or (bool(grammar) and not form.ends_thought(grammar))
    closing = form.closing(end_of_prompt) if is_given else ""
    closing_ids = tokenizer.encode_continuation(closing) if closing else []
    in_thought = not closing and form.in_thought(end_of_prompt)
    closed = _text_of(tokenizer, closing_ids)
    begun = closed + prefix
    prefix_ids = closing_ids
    if prefix:
        prefix_ids = await _prefix_ids(tokenizer, transcripts, prompt, closing_ids, closed, begun)

    def record(choice: Answer) -> None:
        transcripts.record(
            prompt,
            answer=form.answer(prefix + choice.content, choice.reasoning, choice.calls),
            token_ids=[*prefix_ids, *choice.token_ids],
            text=begun + choice.text,
            text_ends=_text_ends(tokenizer, prefix_ids, choice),
            now=time.time(),
            messages=_said(request, kept, prefix, choice),
        )

    expected = request.prediction.content if request.prediction is not None else ""
    # More than the window is no answer; nor is what is so long that tokenizing it would cost more than it could save.
    expected = expected[: model.max_context * _PREDICTED_CHARS]
    prediction = await asyncio.to_thread(tokenizer.encode_plain, expected, follows=True) if expected else []
    cut = prompt.shift
    return Prepared(
        request=request,
        prompt=prompt,
        token_ids=prompt.token_ids + prefix_ids,
        parser=lambda: form.parser(wanted, in_thought=in_thought),
        record=record,
        id_prefix="chatcmpl",
        param="messages",
        grammar=grammar,
        grammar_param=grammar_param,
        keep_first_tokens=_keep_first_tokens(request, prompt, _num_system(shown, places), cache.keep_first_tokens),
        message_starts=tuple(dict.fromkeys(prompt.starts[: len(messages)])),  # one may have no token
        important=_important_ranges(request, prompt.starts, places[added:]),
        begun_tokens=len(prefix_ids),
        shift=None if cut is None else Shift(stream=cut.stream + prefix_ids, keep=cut.keep, resume=cut.resume),
        prediction=prediction[: model.max_context],
    )


def _numbers(places: Sequence[int], count: int) -> list[int]:
    """Return, for each of `count` messages of a prompt, the index of the first request's message in it, or -1. places:
    for each message of the request, the one that holds it."""
    numbers = [-1] * count
    for number, place in reversed(list(enumerate(places))):
        numbers[place] = number
    return numbers


@contextmanager
def _refusing(limits: TokenLimits, max_context: int) -> Iterator[None]:
    """Turn the exceptions of rendering and tokenizing in the block into ApiError."""
    try:
        yield
    except PromptTooLong as error:
        if error.max_tokens < limits.prompt - 1:  # where history makes room, the newest message has to fit
            raise cannot_be_shortened(max_context, "your newest message alone is") from None
        raise limits.too_long(None) from None
    except TemplateError as error:
        raise invalid(str(error)[:500], "messages") from None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a text completion: its tokens, and its text if the client sent text."""

    token_ids: list[int]
    text: str | None


def prepare_text(request: CompletionRequest, prompt: Prompt, session_id: str | None) -> Prepared:
    """Prepare a text completion. Nothing is recorded of it; later requests find only its KV, by its tokens."""
    session_id = session_id or f"cmpl_{secrets.token_hex(13)}"
    return Prepared(
        request=request,
        prompt=PreparedPrompt.unrecorded(prompt.token_ids, session_id),
        token_ids=prompt.token_ids,
        parser=lambda: plain_parser(_wanted(request, {})),
        record=_nothing,
        id_prefix="cmpl",
        param="prompt",
        keep_first_tokens=request.keep_first_tokens or 0,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def _said(request: ChatCompletionRequest, kept: Sequence[Message], prefix: str, choice: Answer) -> list[dict[str, Any]]:
    """Return the conversation with an answer, as a client may want to show it again; empty if it is not to be kept:
    clients go on with the first of several answers, and a side call (a title, say) is no part of its conversation."""
    if choice.index or request.service_tier == "flex":
        return []
    answer: dict[str, Any] = {"role": "assistant", "content": prefix + choice.content}
    if choice.reasoning:
        answer["reasoning_content"] = choice.reasoning
    if choice.calls:
        answer["tool_calls"] = [rendered_call(call.id, call.name, call.arguments) for call in choice.calls]
    return [*(message.as_rendered() for message in kept), answer]


def _wanted(request: GenerationRequest, tools: dict[str, dict[str, Any]], *, parallel: bool = True) -> Wanted:
    stops, shows_stop = tuple(request.stop or ()), bool(request.include_stop_str_in_output)
    return Wanted(tools=tools, parallel=parallel, stops=stops, shows_stop=shows_stop)


def plain_parser(wanted: Wanted) -> AnswerParser:
    """Return a parser of answers in which nothing is a call or a thought: all text is content."""
    return AnswerParser(wanted, calls=None, thoughts=None, in_thought=False)


def _nothing(choice: Answer) -> None:
    """Record nothing: there is no conversation."""


def session_id_of(request: GenerationRequest, header: str | None) -> str | None:
    """Return the client's name for its conversation; None if it gave none. `session_id` of the body wins over the
    header X-Session-ID, and that over `prompt_cache_key`. Names count within a tenant, so this never names another
    tenant's session. Raises ApiError."""
    if request.session_id is not None:
        return request.session_id
    if header is not None:
        if not SESSION_ID.fullmatch(header):
            raise invalid(f"Invalid 'X-Session-ID': {SESSION_ID_RULE}.", "X-Session-ID")
        return header
    key = request.prompt_cache_key
    if key is None or SESSION_ID.fullmatch(key):
        return key
    return f"key_{hashlib.sha256(key.encode()).hexdigest()[:32]}"  # free text; the id goes into a header


def _important_ranges(
    request: ChatCompletionRequest, starts: tuple[int, ...], places: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of messages marked as important. starts: the index of the first token of each message of
    the prompt, and one more entry for the end. places: for each message of the request, the one of the prompt that
    holds it."""
    marked = dict.fromkeys(
        place
        for message, place in zip(request.messages, places, strict=False)  # the beginning of an answer has no place
        if message.x_cache is not None and message.x_cache.important
    )
    return tuple((starts[n], starts[n + 1]) for n in marked if n + 1 < len(starts) and starts[n] < starts[n + 1])


def _num_system(messages: list[dict[str, Any]], places: Sequence[int]) -> int:
    """Return how many messages of the prompt hold the leading system messages. messages, places: the request's, and for
    each the one of the prompt that holds it."""
    num_leading = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return places[num_leading - 1] + 1 if num_leading else 0


def _keep_first_tokens(request: ChatCompletionRequest, prompt: PreparedPrompt, num_system: int, default: int) -> int:
    """Return how many leading tokens a truncation keeps: the number that the request gives, otherwise `default`. A
    negative number means the system prompt, which is in the first `num_system` messages."""
    wanted = default if request.keep_first_tokens is None else request.keep_first_tokens
    if wanted < 0:
        wanted = prompt.starts[num_system] if 0 < num_system < len(prompt.starts) else 0
    return wanted


def _callable_tools(request: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    """Return the functions that the answer may call, with the schemas of their arguments: those of `tool_choice`,
    otherwise all of `tools`. What looks like a call to another function stays text."""
    if not request.tools or (request.tool_choice is not None and request.tool_choice.type == "none"):
        return {}
    chosen = request.tool_choice.names if request.tool_choice is not None else None
    functions = {tool.function.name: tool.function.parameters or {} for tool in request.tools}
    return {name: functions[name] for name in chosen or functions}


async def _prefix_ids(
    tokenizer: ChatTokenizer,
    transcripts: TextThread,
    prompt: PreparedPrompt,
    closing_ids: list[int],
    closed: str,
    begun: str,
) -> list[int]:
    """Return the token ids of an answer's beginning: as they were generated, for as far as an answer to the same prompt
    is recorded that begins so, because other tokens of the same text would have to be computed. closed: the text of
    `closing_ids`, with which `begun` begins."""
    ids, chars = await transcripts.begun(prompt, begun)
    if chars <= len(closed) or _text_of(tokenizer, ids) != begun[:chars]:
        ids, chars = closing_ids, len(closed)
    return ids + tokenizer.encode_plain(begun[chars:], follows=True) if begun[chars:] else ids


def _text_of(tokenizer: ChatTokenizer, token_ids: list[int]) -> str:
    """Return the text of tokens at the beginning of an answer, without special ones."""
    detokenizer = tokenizer.detokenizer()
    return "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()])


def _text_ends(tokenizer: ChatTokenizer, prefix_ids: list[int], choice: Answer) -> list[int]:
    if not prefix_ids:
        return choice.text_ends
    detokenizer = tokenizer.detokenizer()
    for token_id in (*prefix_ids, *choice.token_ids):
        detokenizer.push(token_id)
    return detokenizer.text_ends
