"""Finds out which orders and forms of messages a chat template takes."""

from dataclasses import dataclass, fields, replace

from reprise.app.text.probe import Message, Outcome, Probe, Render, Tools, as_parts

_SEVERITY = tuple(Outcome)  # from the best to the worst
_WORDS = tuple(f"probe-{letter}-word" for letter in "abcde")  # no template holds them


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The results of probes: what a template does with messages that many templates do not expect. `MOVED` means that
    it puts a message at another place, such as the beginning, so that a new message changes the text before it."""

    system: Outcome = Outcome.KEPT  # a system message at the beginning
    systems: Outcome = Outcome.KEPT  # two of them
    later_system: Outcome = Outcome.KEPT  # another one after an answer
    user_after_user: Outcome = Outcome.KEPT
    answer_after_answer: Outcome = Outcome.KEPT
    user_after_result: Outcome = Outcome.KEPT  # a user's message after the result of a call, without an answer between
    thought_before_user: Outcome = Outcome.KEPT  # the thought of a call once a user's message follows the call's result
    text: Outcome = Outcome.KEPT  # content that is a text
    parts: Outcome = Outcome.KEPT  # content that is a list of parts

    @property
    def takes_parts_alone(self) -> bool:
        """Whether content has to be a list of parts."""
        return not self.text.is_shown and self.parts.is_shown

    @property
    def joined(self) -> frozenset[tuple[str, str]]:
        """The pairs of roles whose messages the template does not take one after the other, so that they have to be
        joined."""
        pairs = {
            ("system", "system"): self.systems,
            ("user", "user"): self.user_after_user,
            ("assistant", "assistant"): self.answer_after_answer,
            ("tool", "user"): self.user_after_result,
        }
        return frozenset(pair for pair, outcome in pairs.items() if outcome is not Outcome.KEPT)

    @property
    def reminds_in_results(self) -> bool:
        """Whether a reminder after a call's result has to be put into that result. As a user's message of its own, the
        reminder would make the template leave out the turn's thoughts, and the prompt from the first thought on would
        have to be computed again."""
        return self.thought_before_user is not Outcome.KEPT

    def described(self, with_tools: "TemplateTraits") -> dict[str, str]:
        """Return for each trait the worse of two outcomes, as a word for people: of this one and of `with_tools`, the
        traits for requests with tools."""
        pairs = {field.name: (getattr(self, field.name), getattr(with_tools, field.name)) for field in fields(self)}
        return {name: str(max(pair, key=_SEVERITY.index)) for name, pair in pairs.items()}


TAKES_ALL = TemplateTraits()


def content_traits(render: Render) -> TemplateTraits:
    """Return the traits that concern content: whether the template takes texts and lists of parts. `with_orders` adds
    the others."""
    probe, message = Probe(render), _said("user", 0)
    text, parts = probe.outcome([message], _WORDS[:1]), probe.outcome([as_parts(message)], _WORDS[:1])
    shown = probe.text([as_parts(message)], opens=True)
    if "'text'" in shown or '"text"' in shown:
        parts = Outcome.LOST  # it shows the list itself
    return TemplateTraits(text=text, parts=parts)


def with_orders(
    traits: TemplateTraits, probe: Probe, *, tools: Tools | None, called: list[Message] | None, thought: str
) -> TemplateTraits:
    """Return `traits` with the traits that concern the order of messages, for requests with tools or without. called: a
    conversation that ends with the result of a call, as the template takes it; None if it takes no results. thought:
    the thought that the call in `called` has. A template that does not show even one user's message cannot be examined,
    and counts as one that takes all."""
    if not (traits.text.is_shown or traits.parts.is_shown):
        return traits

    def outcome(*roles: str) -> Outcome:
        messages = [_said(role, place) for place, role in enumerate(roles)]
        return probe.outcome(messages, _WORDS[: len(roles)], tools)

    after_result = before_user = Outcome.KEPT
    if called is not None:
        after_result = probe.outcome([*called, _said("user", 0), _said("assistant", 1)], _WORDS[:2], tools)
        if probe.outcome(called, (thought,), tools).is_shown:  # else there is nothing that a user's message may end
            before_user = probe.outcome([*called, _said("user", 0)], (thought, _WORDS[0]), tools)
    return replace(
        traits,
        system=outcome("system", "user"),
        systems=outcome("system", "system", "user"),
        later_system=outcome("system", "user", "assistant", "system", "user"),
        user_after_user=outcome("user", "user", "assistant", "user", "user"),
        answer_after_answer=outcome("user", "assistant", "assistant", "user"),
        user_after_result=after_result,
        thought_before_user=before_user,
    )


def _said(role: str, place: int) -> Message:
    return {"role": role, "content": _WORDS[place]}
