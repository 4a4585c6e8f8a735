"""The marks that models put around their thoughts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks that a model writes before and after a thought (its reasoning), with which an answer may begin. trim:
    the characters of white space next to the marks that are not part of the thought."""

    open: str
    close: str
    trim: str = "\n"

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close

    def opens(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark that opens a thought."""
        return prompt.rstrip().endswith(self.open)


THINK = Thoughts("<think>", "</think>")
HARMONY = Thoughts("<|channel|>analysis<|message|>", "<|end|>")
THOUGHTS: dict[str, Thoughts] = {
    "command": Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": Thoughts("<|channel>thought", "<channel|>"),
    "granite": Thoughts("Here is my thought process:", "Here is my response:", trim=" \n"),
    "harmony": HARMONY,
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "seed": Thoughts("<seed:think>", "</seed:think>"),
    "think": THINK,
}
"""The marks by their names in `model.thoughts`. The first ones that a template shows are taken."""
