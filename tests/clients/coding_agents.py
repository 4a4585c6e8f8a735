"""Lists the agents that `test_coding_agents.py` runs: what installs them, and how they are asked without a screen.

`python coding_agents.py DIRECTORY` installs each of them into a folder of its own below DIRECTORY, and says which could
not be installed.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

INSTALL_S = 600.0
FIRST = "List the files here, then read hello.py and tell me what it does."
SECOND = "How many lines has hello.py?"


@dataclass(frozen=True)
class Agent:
    """An agent, by its name in `reprise client`. {prompt}, {model} and {url} stand for what a run puts there."""

    name: str
    packages: tuple[str, ...]  # npm's, or pip's where `is_python`
    first: tuple[str, ...]  # the command of the first turn
    second: tuple[str, ...]  # the command of the second turn, in the same conversation
    said: tuple[str, str]  # how both turns end, after two calls and after a third
    is_python: bool = False
    pythons: tuple[str, ...] = ()  # those that will do, where it does not take every one
    setup: tuple[str, ...] = ()  # a command before both, where `reprise client` writes no file
    environment: dict[str, str] = field(default_factory=dict)  # no telemetry, no updates
    answers: int = 5  # at least so many: calls and texts of both turns
    beginnings: int = 1  # requests that begin a prompt, of which nothing can be cached
    least: float = 0.95  # share of the others' tokens that has to be


AGENTS = (
    Agent(
        "codex",
        ("@openai/codex",),
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last",
         "{prompt}"),
        ("It defines greet and prints a greeting.", "It has five lines."),
    ),
    Agent(
        "opencode",
        ("opencode-ai",),
        ("opencode", "run", "{prompt}"),
        ("opencode", "run", "--continue", "{prompt}"),
        ("The program greets by name.", "hello.py is five lines long."),
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
                     "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        answers=6,
        beginnings=2,  # one is for the conversation's title
    ),
    Agent(
        "kilo",
        ("@kilocode/cli",),
        ("kilo", "run", "--auto", "{prompt}"),
        ("kilo", "run", "--auto", "--continue", "{prompt}"),
        ("The program greets by name.", "hello.py is five lines long."),
        environment={"KILO_TELEMETRY_LEVEL": "off", "KILO_DISABLE_AUTOUPDATE": "1", "KILO_DISABLE_MODELS_FETCH": "1"},
        answers=6,
        beginnings=2,
    ),
    Agent(
        "qwen",
        ("@qwen-code/qwen-code",),
        ("qwen", "-y", "-p", "{prompt}"),
        ("qwen", "-y", "--continue", "-p", "{prompt}"),
        ("One sees a greeting.", "There are five in Qwen's count."),
        environment={"QWEN_TELEMETRY_ENABLED": "0"},
    ),
    Agent(
        "pi",
        ("@mariozechner/pi-coding-agent",),
        ("pi", "--provider", "reprise", "--model", "{model}", "-p", "{prompt}"),
        ("pi", "--provider", "reprise", "--model", "{model}", "--continue", "-p", "{prompt}"),
        ("The program greets by name.", "hello.py is five lines long."),
        environment={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    ),
    Agent(
        "cline",
        ("cline",),
        ("cline", "--auto-approve", "true", "{prompt}"),
        (),  # going on with a conversation takes its id, which is not printed
        ("The file greets the world.", ""),
        setup=("cline", "auth", "-p", "openai-compatible", "-k", "none", "-m", "{model}", "-b", "{url}/v1"),
        environment={"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"},
        answers=3,
    ),
    Agent(
        "continue",
        ("@continuedev/cli",),
        ("cn", "--auto", "-p", "{prompt}"),
        ("cn", "--auto", "--resume", "-p", "{prompt}"),
        ("hello.py says hello.", "I count five lines."),
        environment={"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
    ),
    Agent(
        "vibe",
        ("mistral-vibe",),
        ("vibe", "--auto-approve", "-p", "{prompt}"),
        ("vibe", "--auto-approve", "--continue", "-p", "{prompt}"),
        ("Vibe sees a print.", "Vibe finds five lines."),
        is_python=True,
        pythons=("python3.14", "python3.13", "python3.12"),
        environment={"VIBE_ENABLE_TELEMETRY": "false", "VIBE_ENABLE_UPDATE_CHECKS": "false"},
        least=0.8,  # a process that goes on writes its tools in another order
    ),
    Agent(
        "aider",
        ("aider-chat",),
        ("aider", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-release-notes",
         "--message", "{prompt}", "hello.py"),
        ("aider", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-release-notes",
         "--restore-chat-history", "--message", "{prompt}", "hello.py"),
        ("Files of a small project.", "Files of a small project."),
        is_python=True,
        environment={"OPENAI_API_KEY": "none", "AIDER_ANALYTICS_DISABLE": "1"},
        answers=2,
        least=0.3,  # it puts the file after its history, and writes both anew in every turn
    ),
)  # fmt: skip


def folder_of(directory: Path, agent: Agent) -> Path:
    """Return the folder with an agent's programs."""
    return directory / agent.name / ("bin" if agent.is_python else "node_modules/.bin")


def install(directory: Path, agent: Agent) -> str:
    """Install an agent if it is not there. Returns what went wrong; empty if nothing did."""
    if (folder_of(directory, agent) / agent.first[0]).exists():
        return ""
    own = directory / agent.name
    own.mkdir(parents=True, exist_ok=True)
    if not agent.is_python:
        return _problem("npm", "--prefix", str(own), "install", "--silent", "--no-package-lock", *agent.packages)
    problem = ""
    for python in agent.pythons or (sys.executable,):
        problem = _problem(python, "-m", "venv", own) or _problem(own / "bin/pip", "install", "-q", *agent.packages)
        if not problem:
            break
    return problem


def _problem(*command: object) -> str:
    """Run a command. Returns what went wrong; empty if nothing did."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr or done.stdout).strip()[-300:] or f"{command[0]} ended with {done.returncode}"


def main() -> None:
    directory = Path(sys.argv[1])
    for agent in AGENTS:
        if problem := install(directory, agent):
            print(f"{agent.name} is left out: {problem}", flush=True)


if __name__ == "__main__":
    main()
