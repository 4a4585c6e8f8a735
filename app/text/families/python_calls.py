"""Calls that look like calls in Python, with literals as keyword arguments. They are parsed as a syntax tree, and never
evaluated."""

import ast
import re
import warnings
from dataclasses import dataclass
from typing import Any

from reprise.app.text.families.lark import Lark, OfferedTool, Property, properties
from reprise.app.text.families.reading import MAX_NAME_CHARS, Progress, Reader, Steps
from reprise.app.text.families.typed_values import json_of_value
from reprise.app.text.plain_text import json_text

_HEAD = re.compile(r"([A-Za-z_][\w.\-]*)\s*\(\s*(?=[A-Za-z_]\w*\s*=[^=]|\))")
_MAY_BE_HEAD = re.compile(r"[A-Za-z_][\w.\-]*\s*(\(\s*([A-Za-z_]\w*\s*=?)?)?")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_WORDS = {"true": True, "false": False, "null": None}
_VALUES = r"""
pyvalue: PYSTRING | PYNUMBER | "True" | "False" | "None" | pylist | pydict
pylist: "[" (pyvalue (", " pyvalue)*)? "]"
pydict: "{" (PYSTRING ": " pyvalue (", " PYSTRING ": " pyvalue)*)? "}"
PYSTRING: /"([^"\\\n]|\\["\\nrt])*"|'([^'\\\n]|\\['\\nrt])*'/
PYNUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/
PYINTEGER: /-?(0|[1-9][0-9]*)/
"""
_BY_TYPE = {
    "string": "PYSTRING",
    "number": "PYNUMBER",
    "integer": "PYINTEGER",
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "pylist",
    "object": "pydict",
}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The shape of calls in Python: `open [f(a='x'), g(n=3)] close`. Without `open` they can only begin an answer, in
    brackets."""

    open: str = ""
    close: str = ""
    has_brackets: bool = True
    between: str = ", "

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.open,) if self.open else ()

    @property
    def at_start(self) -> bool:
        return not self.open

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.open, self.close) if text)

    def reader(self) -> Reader:
        return _PythonReader(self)

    def _frame(self) -> tuple[str, str]:
        if self.has_brackets:
            return f"{self.open}[", f"]{self.close}"
        return f"{self.open}\n", f"\n{self.close}"

    def written(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        before, after = self._frame()
        texts = [
            f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return before + self.between.join(texts) + after

    def grammar(self, tools: list[OfferedTool], many: bool, lark: Lark) -> str:
        before, after = self._frame()
        lark.add(_VALUES.strip())
        rules = []
        for tool in tools:
            listed = properties(tool.schema)
            if listed is None:
                any_argument = r'/[A-Za-z_][A-Za-z0-9_]*/ "=" pyvalue'
                inside = f'({any_argument} (", " {any_argument})*)?'
            else:
                required = [self._argument(item, lark) for item in listed if item.is_required]
                optional = [self._argument(item, lark) for item in listed if not item.is_required]
                inside = lark.members(required, optional, ", ")
            rules.append(lark.rule("call", lark.joined(lark.literal(f"{tool.name}("), inside, lark.literal(")"))))
        return lark.repeated(before, self.between, after, rules, many)

    def _argument(self, item: Property, lark: Lark) -> str:
        values, kind = item.schema.get("enum"), item.schema.get("type")
        if isinstance(values, list) and values:
            value = f"({' | '.join(lark.literal(_python(each)) for each in values)})"
        else:
            value = _BY_TYPE.get(kind, "pyvalue") if isinstance(kind, str) else "pyvalue"
        return lark.rule("argument", lark.joined(lark.literal(f"{item.name}="), value))


def _python(value: object) -> str:
    """Return a value of JSON as a literal of Python. Strings are written as JSON writes them."""
    if isinstance(value, str):
        return json_text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(str(key))}: {_python(item)}' for key, item in value.items())}}}"
    return repr(value)


class _PythonReader(Steps):
    def __init__(self, shape: PythonCalls) -> None:
        super().__init__()
        self._shape = shape
        self._scan = _Scan()
        self._num_arguments = 0

    def open(self) -> Progress | None:
        shape = self._shape
        if shape.open and not self.take(shape.open):
            return Progress.MORE if self.may_become(shape.open) else Progress.TEXT
        self.skip_space()
        if not self.take("[") and not shape.open:
            return Progress.MORE if self.may_become("[") else Progress.TEXT
        return self.then(self._head)

    def _head(self) -> Progress | None:
        self.skip_space()
        found = _HEAD.match(self.text, self.at)
        if found is not None:
            if not self.calls.knows(found[1]):
                return Progress.TEXT
            self.at, self._num_arguments, self._scan = found.end(), 0, _Scan()
            self.begin(found[1])
            return self.then(self._argument)
        if self.at == len(self.text) or _MAY_BE_HEAD.fullmatch(self.text, self.at):
            return self.wait(MAX_NAME_CHARS)
        return Progress.TEXT

    def _argument(self) -> Progress | None:
        end = self._scan.push(self.text, self.at)
        if end is None:
            return Progress.MORE
        source, closes = self.text[self.at : end], self.text[end] == ")"
        self.at, self._scan = end + 1, _Scan()
        if source.strip():
            key = _KEYWORD.match(source)
            name = key[1] if key is not None else f"argument{self._num_arguments}"
            value = json_of_source(source[key.end() :] if key is not None else source)
            self.calls.add(f"{', ' if self._num_arguments else '{'}{json_text(name)}: {value}")
            self._num_arguments += 1
        if not closes:
            return None
        self.calls.add("}" if self._num_arguments else "{}")
        return self.then(self._after)

    def _after(self) -> Progress | None:
        shape, place = self._shape, self.at
        self.skip_space()
        if self.take(shape.close):
            return Progress.OVER
        if self.at == len(self.text) or self.may_become(shape.close):
            if not self.final:
                self.at = place
                return Progress.MORE
            return Progress.OVER
        char = self.text[self.at]
        if char in ",;":
            self.at += 1
            return self.then(self._another)
        if char == "]":
            self.at += 1
            return None
        if "\n" in self.text[place : self.at] and (char.isalpha() or char == "_") and shape.open:
            return self.then(self._head)
        self.at = place
        return Progress.OVER

    def _another(self) -> Progress | None:
        """Read what follows a separator: another call, or the end of the list."""
        self.skip_space()
        if self.at == len(self.text):
            return Progress.MORE
        return self.then(self._after if self.text[self.at] == "]" else self._head)


class _Scan:
    """A finder of an argument's end, which goes on where it was when more text comes."""

    def __init__(self) -> None:
        self._place = 0  # relative to where the argument begins
        self._depth = 0
        self._quote = ""

    def push(self, text: str, start: int) -> int | None:
        """Return the place of the comma or bracket after the argument that begins at `start`; None while it goes on."""
        place = start + self._place
        while place < len(text):
            char = text[place]
            if self._quote:
                if char == "\\":
                    if place + 1 == len(text):
                        break
                    place += 1
                elif text.startswith(self._quote, place):
                    place += len(self._quote) - 1
                    self._quote = ""
                elif len(self._quote) > len(text) - place and self._quote.startswith(text[place:]):
                    break  # a part of the quotes
            elif char in "'\"":
                if len(text) - place < 3 and text[place:] == char * (len(text) - place):
                    break  # it may be the first of three
                self._quote = char * 3 if text.startswith(char * 3, place) else char
                place += len(self._quote) - 1
            elif char in "([{":
                self._depth += 1
            elif char in ")]}" and self._depth:
                self._depth -= 1
            elif char in ",)" and not self._depth:
                return place
            place += 1
        self._place = place - start
        return None


def json_of_source(source: str) -> str:
    """Return the JSON of a literal of Python, or else a JSON string of its source."""
    source = source.strip()
    for attempt in (source, source.replace("\n", "\\n")):  # models break lines inside quotes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" and its kind are fine
                tree = ast.parse(attempt, mode="eval")
            return json_of_value(_value(tree.body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return json_text(source)


def _value(node: ast.expr) -> object:
    """Return the value of a literal. Raises ValueError for all else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return number
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
    raise ValueError("no literal")


def _key(node: ast.expr) -> str | int | float | None:
    key = _value(node)
    if key is None or isinstance(key, str | int | float):
        return key
    raise ValueError("no key of JSON")
