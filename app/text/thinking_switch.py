"""Tells a chat template how much the model is to think, by the arguments that the template reads."""

from dataclasses import dataclass
from typing import Any

from reprise.app.schemas.fields import EFFORTS
from reprise.app.text.probe import Message, Probe, Tools

EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
_USER: Message = {"role": "user", "content": "Probe?"}
_CONVERSATIONS: tuple[list[Message], ...] = (
    [_USER],
    [{"role": "system", "content": "Probe."}, _USER],
    [_USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, _USER],
)


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """The arguments of a template that say whether the model thinks, and how much.

    name: the argument that turns thinking on and off; none if empty. is_on: whether the model thinks without it.
    efforts: the values of `reasoning_effort` that the template takes, from the least to the most; none if it does not
    read them.
    """

    name: str = ""
    is_on: bool = True
    efforts: tuple[str, ...] = ()

    def args(self, *, thinks: bool | None, effort: str | None) -> dict[str, Any]:
        """Return the template's arguments for what a request wants. thinks: whether the model is to think. effort: how
        much, one of EFFORTS. None: the request does not say. Arguments that change nothing are left out, because
        requests with other arguments are other conversations."""
        if thinks is None and effort is not None:
            # What a template with a mere switch can do for "few or no thoughts" is to have none.
            thinks = not (effort == "none" or (effort == "minimal" and not self.efforts))
        args: dict[str, Any] = {}
        if self.name and thinks is not None and thinks != self.is_on:
            args[self.name] = thinks
        if effort is None and thinks is False and not self.name:
            effort = "none"
        if self.efforts and effort is not None:
            wanted = EFFORTS.index(effort)
            args[EFFORT] = min(self.efforts, key=lambda taken: abs(EFFORTS.index(taken) - wanted))
        return args


NO_SWITCH = ThinkingSwitch()
"""The switch of a template that reads no such argument."""


def switch_of(probe: Probe, tools: Tools | None) -> ThinkingSwitch:
    """Find out by which arguments a template turns thinking on and off. tools: a tool that it renders; None if it
    renders none."""

    def shown(**args: Any) -> tuple[str, ...]:
        return tuple(
            probe.text(messages, each, opens=True, **args)
            for messages in _CONVERSATIONS
            for each in ((None, tools) if tools else (None,))
        )

    default = shown()
    switch = NO_SWITCH
    for name in _SWITCHES:
        on, off = shown(**{name: True}), shown(**{name: False})
        if on != off and any(on) and any(off):
            switch = ThinkingSwitch(name=name, is_on=off != default)
            break
    by_effort = {effort: said for effort in EFFORTS if any(said := shown(**{EFFORT: effort}))}
    is_read = len(by_effort) < len(EFFORTS) or len(set(by_effort.values())) > 1
    return ThinkingSwitch(name=switch.name, is_on=switch.is_on, efforts=tuple(by_effort) if is_read else ())
