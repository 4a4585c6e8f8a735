"""Writes what a scripted model says to each client: two calls of the client's own tools, a text, a third call, a text.

The template knows a client by the name of a tool that no other offers, and puts the step token of its next answer at
the end of the prompt. `chain.py` beside it makes the model.
"""

import json
from dataclasses import dataclass
from typing import Any

LIST, READ, COUNT = "ls -la", "cat hello.py", "wc -l hello.py"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(tool: str, first: str, last: str, **others: Any) -> tuple[str, ...]:
    """Return the answers to a client whose tool runs a shell's command: list, read, say something, count, say
    something. others: further arguments of the tool."""
    lists, reads, counts = (call(tool, command=command, **others) for command in (LIST, READ, COUNT))
    return lists, reads, first, counts, last


@dataclass(frozen=True, slots=True)
class Script:
    family: str  # the beginning of its step tokens
    tool: str  # by which the client is known; "": all others
    answers: tuple[str, ...]  # the last one is said again and again


SCRIPTS = (
    Script(
        "codex", "exec_command",
        (
            "Let me look.\n\n" + call("exec_command", cmd=LIST),
            "Now the file.\n\n" + call("exec_command", cmd=READ),
            "It defines greet and prints a greeting.",
            call("exec_command", cmd=COUNT),
            "It has five lines.",
        ),
    ),
    Script(
        "qwen", "run_shell_command",
        (
            "Nothing.",  # its first request has an answer already, which it has made up
            *shell("run_shell_command", "One sees a greeting.", "There are five in Qwen's count.", is_background=False),
        ),
    ),
    Script(
        "cline", "run_commands",
        (
            call("run_commands", commands=[LIST]),
            call("read_files", files=[{"path": "hello.py"}]),
            "The file greets the world.",
            call("run_commands", commands=[COUNT]),
            "Five lines it is.",
        ),
    ),
    Script("continue", "Bash", shell("Bash", "hello.py says hello.", "I count five lines.")),
    Script("vibe", "read_file", shell("bash", "Vibe sees a print.", "Vibe finds five lines.")),
    Script(
        "opencode", "bash",
        (
            "I look.\n\n" + call("bash", command=LIST, description="Lists files"),
            call("bash", command=READ, description="Shows the file"),
            "The program greets by name.",
            call("bash", command=COUNT, description="Counts lines"),
            "hello.py is five lines long.",
        ),
    ),
    Script("gptme", "shell", shell("shell", "gptme sees a greeting.", "gptme counts five.")),
    Script(
        "weather", "weather",
        (
            "I ask.\n\n" + call("weather", city="Paris"),
            call("weather", city="Rome"),
            "In both the sky is clear, 21 degrees.",
            call("weather", city="Oslo"),
            "There as well, as it seems.",
        ),
    ),
    Script("trial", "report_weather", (call("report_weather", city="Paris"), "Clear, as reported.")),
    Script("plain", "", ("Files of a small project.",)),
)  # fmt: skip


def answers(*, thinks: bool) -> dict[str, str]:
    """Return what follows each step token. thinks: every answer begins with a thought."""
    said = {}
    for script in SCRIPTS:
        for step, text in enumerate(script.answers):
            thought = f"<think>\nStep {step} for {script.family} it is.\n</think>\n\n" if thinks else ""
            said[f"<|{script.family}_{step}|>"] = thought + text
    return said


_KNOWN = "{%- {how} '{tool}' in names -%}{%- set ns.family = '{family}' -%}\n"
_CHAT = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n\\nYou may call functions:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each call write\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' -}}
{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n<|' ~ ns.family ~ '_' ~ ([ns.step, last] | min) ~ '|>' -}}
{%- set ns.step = ns.step + 1 -%}
{%- if THINKS and loop.index0 > ns.asked and message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n\\n' if loop.first else '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<|' ~ ns.family ~ '_' ~ ([ns.step, last] | min) ~ '|>' -}}
{%- endif -%}
"""


def template(*, thinks: bool) -> str:
    """Return the chat template. thinks: it drops the thoughts of earlier turns, as Qwen's does."""
    known = [script for script in SCRIPTS if script.tool]
    lines = "{%- set ns = namespace(family='plain', step=0, asked=-1) -%}\n"
    lines += "{%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list -%}\n"
    for place, script in enumerate(known):
        how = "if" if place == 0 else "elif"
        lines += _KNOWN.replace("{how}", how).replace("{tool}", script.tool).replace("{family}", script.family)
    lasts = ", ".join(f"'{script.family}': {len(script.answers) - 1}" for script in SCRIPTS)
    lines += f"{{%- endif -%}}\n{{%- set last = {{{lasts}}}[ns.family] -%}}\n"
    return lines + _CHAT.replace("THINKS", "true" if thinks else "false")
