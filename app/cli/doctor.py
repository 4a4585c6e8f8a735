"""`reprise doctor`: checks this machine against the settings, and says what to do about problems.

Changes nothing: the files with which it tests the state directory are deleted afterwards. Tensor libraries are examined
in a separate process.
"""

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from reprise.app.cli.clients.table import word_on_agents
from reprise.app.cli.expected_sizes import ITEMSIZE, Expected, expected_sizes, model_shape, weights_by_place
from reprise.app.cli.finding import Finding, Level
from reprise.app.cli.model_findings import DescribedModel, look_at_described
from reprise.app.cli.redis_findings import look_at_redis
from reprise.app.cli.state_findings import look_at_state
from reprise.app.http.bounded_server import own_host
from reprise.app.settings.settings import GIB, MIB, Settings
from reprise.app.text.tokenizer import ChatTokenizer, TokenizerError
from reprise.engine.build.resources import Memory, memory
from reprise.engine.build.sizes import dram_warnings
from reprise.model.directories import BUNDLED, SMOLLM2, is_there, source_of

HOW_TO_GET_A_MODEL = f"`make model` brings {SMOLLM2.name}, which knows something of the world"
# For a checkout. pip skips packages of the right version, and `make setup` skips what it has set up before.
_REINSTALL = "pip install --force-reinstall -c constraints.txt"
_OTEL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
ADDRESS_TIMEOUT_S = 2.0  # for what listens on the address
PROBE_TIMEOUT_S = 120.0  # the first import of torch from a cold disk takes long

# What a chat template may not take, by its name in /v1/models.
_MESSAGES = {
    "system": "a system message",
    "systems": "a second system message",
    "later_system": "a system message after others",
    "user_after_user": "a user's message after another",
    "answer_after_answer": "an answer after another",
    "user_after_result": "a user's message after a result",
    "calls": "calls in a history",
    "results": "results of calls",
    "text": "content that is no list of parts",
}
# Runs in a separate Python that prints JSON, so that neither a crash of a library nor its memory affects this process.
PROBE = """
import importlib, json, platform
found = {}
for name in ("torch", "transformers", "numba", "triton", "flash_attn", "opentelemetry.sdk"):
    try:
        module = importlib.import_module(name)
        found[name] = getattr(module, "__version__", "present")
    except ModuleNotFoundError as error:
        found[name] = None if error.name and name.startswith(error.name) else "!" + str(error)
    except Exception as error:
        found[name] = "!" + (str(error).splitlines() or [type(error).__name__])[-1]
if found["torch"] and not found["torch"].startswith("!"):
    import torch
    found["cuda_build"] = torch.version.cuda
    found["devices"] = [
        {"name": p.name, "gib": p.total_memory / 2**30, "capability": [p.major, p.minor]}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ] if torch.cuda.is_available() else []
print(json.dumps(found))
"""


def examine(
    settings: Settings,
    probe: Callable[[], dict[str, Any]] | None = None,
    *,
    used_by: Callable[[Path], str | None] = lambda directory: None,
    describe: Callable[[str], DescribedModel] | None = None,
) -> list[Finding]:
    """Return all findings, in the order in which to fix them. probe: examines the tensor libraries. used_by: returns
    the name of the server that uses a state directory. describe: returns what is known of a model before it is loaded;
    None: no model is described."""
    libraries, has = (probe or probe_libraries)(), memory()
    model = None if describe is None else describe(source_of(settings.model.source))
    expected = _expected(settings, has, libraries, model)
    return [
        *_python(),
        *_torch(libraries, settings),
        *_accelerator(libraries, settings),
        *_extras(libraries, settings),
        *_processor(settings),
        *_memory(settings, has, expected),
        *look_at_model(settings),
        *_described(settings, has, libraries, model, expected),
        *_window(settings, expected),
        *look_at_state(settings, expected, used_by),
        *look_at_redis(settings),
        *_port(settings),
    ]


def report(findings: list[Finding]) -> Table:
    marks = {
        Level.OK: "[green]✓[/green]",
        Level.NOTE: "[blue]i[/blue]",
        Level.WARN: "[yellow]![/yellow]",
        Level.FAIL: "[bold red]✗[/bold red]",
    }
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        text = finding.found.replace("[", r"\[")
        if finding.advice:
            text += f"\n[bold]→[/bold] {finding.advice.replace('[', chr(92) + '[')}"
        table.add_row(marks[finding.level], finding.subject, text)
    return table


def probe_libraries() -> dict[str, Any]:
    """Return {"torch": version | None | "!error", ..., "devices": [...]}, or {"error": text} if the probe itself
    failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"error": f"importing the libraries took longer than {PROBE_TIMEOUT_S:g} s"}
    except (IndexError, ValueError, OSError):
        return {"error": "importing the libraries ended the process that tried it"}


def _python() -> Iterator[Finding]:
    level = Level.OK if sys.version_info >= (3, 11) else Level.FAIL
    advice = "" if level is Level.OK else "Reprise needs Python 3.11 or newer"
    yield Finding("Python", level, f"{platform.python_version()}, {platform.system()} {platform.machine()}", advice)


def _torch(libraries: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    if "error" in libraries:
        yield Finding("torch", Level.FAIL, libraries["error"], f"{_REINSTALL} torch transformers")
        return
    for name in ("torch", "transformers"):
        version = libraries.get(name)
        if version is None:
            yield Finding(name, Level.FAIL, "not installed", "pip install -c constraints.txt -e .")
        elif version.startswith("!"):
            yield Finding(name, Level.FAIL, f"cannot be imported: {version[1:]}", f"{_REINSTALL} {name}")
        else:
            yield Finding(name, Level.OK, version)
    numba = libraries.get("numba")
    if settings.engine.device != "cuda" and (numba is None or numba.startswith("!")):
        advice = "pip install numba: compiled kernels make decoding on CPU faster"
        yield Finding("numba", Level.WARN, "not usable", advice)
    elif numba:
        yield Finding("numba", Level.OK, numba)


def _accelerator(libraries: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    devices = libraries.get("devices", [])
    for device in devices:
        yield Finding("CUDA", Level.OK, f"{device['name']}, {device['gib']:.0f} GiB")
    if not devices:
        has_gpu = shutil.which("nvidia-smi") is not None
        if settings.engine.device == "cuda":
            advice = "install the driver and a CUDA build of torch, or set engine.device=cpu"
            yield Finding("CUDA", Level.FAIL, "no device, and engine.device is cuda", advice)
        elif has_gpu and not libraries.get("cuda_build"):
            advice = f"{_REINSTALL} torch (for Linux, PyPI has the CUDA build)"
            yield Finding("CUDA", Level.WARN, "there is an NVIDIA driver, but torch is a CPU build", advice)
        else:
            yield Finding("CUDA", Level.NOTE, "no device: the model runs on the CPU")
        return
    for name, library in (("Triton", "triton"), ("flash-attn", "flash_attn")):
        version = libraries.get(library)
        if version and not version.startswith("!"):
            yield Finding("attention", Level.OK, f"{name} {version}")
            return
    yield Finding("attention", Level.FAIL, "neither Triton nor flash-attn", f"{_REINSTALL} triton")


def _extras(libraries: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    if settings.server.traces_endpoint and not libraries.get("opentelemetry.sdk"):
        found = "server.traces_endpoint is set and OpenTelemetry is not installed"
        yield Finding("traces", Level.FAIL, found, _OTEL)


def _processor(settings: Settings) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    yield Finding("processor", Level.OK, f"{usable} cores usable{', ' + ', '.join(has) if has else ''}")
    if settings.engine.threads > usable:
        found = f"engine.threads is {settings.engine.threads}, more than there are cores"
        yield Finding("threads", Level.WARN, found, "threads that wait for a core hold up every product")
    if platform.machine() in ("x86_64", "AMD64") and flags and "avx512_bf16" not in flags:
        advice = "--model.weights q8, or --model.dtype float32, may be faster here"
        yield Finding("bfloat16", Level.NOTE, "this processor computes it in software", advice)
    yield _exact(settings, "avx512_bf16" in flags)


def _exact(settings: Settings, has_kernels: bool) -> Finding:
    """Report what model.exact can achieve here. What it does achieve is proven on the loaded model when the server
    starts."""
    if settings.model.exact == "on":
        if has_kernels or settings.model.dtype == "float32":
            return Finding("exact", Level.OK, "model.exact is on: proven at start, or the model is refused")
        advice = "--model.exact auto, or a processor with AVX512_BF16"
        return Finding("exact", Level.FAIL, "model.exact is on, and no kernels for it run on this processor", advice)
    if not has_kernels:
        return Finding("exact", Level.NOTE, "a greedy text may depend on what is computed beside it")
    found = "in bf16 a greedy text may depend on what is computed beside it"
    return Finding("exact", Level.NOTE, found, "--model.exact on: the same bits always, but slower")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def _memory(settings: Settings, has: Memory, expected: Expected | None) -> Iterator[Finding]:
    found = f"{has.total / GIB:.1f} GiB, {has.available / GIB:.1f} available"
    if expected is None:
        wanted = _bytes(settings.cache.dram_gib) + settings.experiment.staging_mib * MIB
        warnings = []
    else:
        sizes = expected.sizes
        parts = {"KV in DRAM": sizes.dram, "staging": sizes.staging}
        in_hbm, in_dram = weights_by_place(settings, expected.shape)
        parts = {"weights in DRAM": in_dram, **parts}
        if expected.on_cpu:
            parts = {"weights": in_hbm, "KV in HBM": sizes.hbm, **parts}
        wanted = sum(parts.values())
        found += f"; taken as needed: {', '.join(f'{name} {size / GIB:.1f}' for name, size in parts.items() if size)}"
        hbm_tokens, dram_tokens = expected.hbm_tokens, expected.dram_tokens
        window = min(hbm_tokens, expected.shape.window_tokens)
        warnings = dram_warnings(dram_tokens, hbm_tokens, window) if sizes.dram else []
        if window < expected.shape.window_tokens:
            warnings.append(f"the window shrinks to {window:,} of {expected.shape.window_tokens:,} tokens")
    if wanted > has.total:
        advice = "lower cache.dram_gib or cache.hbm_tokens, or serve a smaller model"
        yield Finding("memory", Level.FAIL, f"{found}; that is more than there is", advice)
    elif wanted > has.available * 0.9:
        advice = "lower cache.dram_gib or cache.hbm_tokens, or end what else runs here"
        yield Finding("memory", Level.WARN, f"{found}; that is nearly all", advice)
    elif warnings:
        yield Finding("memory", Level.WARN, found, "; ".join(warnings))
    else:
        yield Finding("memory", Level.OK, found)


def _bytes(gib: float | str) -> float:
    """Convert to bytes; 0 for "auto", which always fits."""
    return gib * GIB if isinstance(gib, float) else 0.0


def _devices(settings: Settings, libraries: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if settings.engine.device == "cpu" else libraries.get("devices", [])


def _described(
    settings: Settings, has: Memory, libraries: dict[str, Any], model: DescribedModel | None, expected: Expected | None
) -> Iterator[Finding]:
    if model is not None:
        devices = _devices(settings, libraries)
        room = int(devices[0]["gib"] * GIB) if devices and settings.weights.offload == "none" else has.total
        yield from look_at_described(model, expected, settings.model.weights, room)


def _stays_packed(settings: Settings, described: DescribedModel | None) -> bool:
    """Return whether a server on this processor keeps the weights packed, which it multiplies in bfloat16."""
    form, is_gguf = settings.model.weights, settings.model.source.endswith(".gguf")
    is_quantised = described is not None and bool(described.quantised or described.packing)
    return "avx2" in _cpu_flags() and (form in ("q4", "q8") or (form == "auto" and (is_gguf or is_quantised)))


def _expected(
    settings: Settings, has: Memory, libraries: dict[str, Any], described: DescribedModel | None
) -> Expected | None:
    """Return what a server would need; None if the model is not on this machine or its configuration is unusual, and it
    was not described."""
    devices = _devices(settings, libraries)
    in_bf16 = devices or "avx512_bf16" in _cpu_flags() or _stays_packed(settings, described)
    automatic = "bfloat16" if in_bf16 else "float32"
    itemsize = ITEMSIZE[automatic if settings.model.dtype == "auto" else settings.model.dtype]
    directory = Path(source_of(settings.model.source)).expanduser()
    model, hbm_dtype = settings.model, settings.cache.hbm_dtype
    shape = None if described is None else described.shape(itemsize, model.max_context, model.weights, hbm_dtype)
    in_files = model_shape(directory, itemsize, model.max_context, model.weights, hbm_dtype)
    if shape is not None and in_files is not None:  # towers are in files only, and files may be packed
        shape = replace(shape, weights=min(shape.weights, in_files.weights))
    shape = shape or in_files
    if shape is None:
        return None
    return expected_sizes(settings, shape, has, int(devices[0]["gib"] * GIB) if devices else None)


def look_at_model(settings: Settings) -> Iterator[Finding]:
    source = source_of(settings.model.source)
    directory = Path(source).expanduser()
    if not directory.is_dir():
        if directory.is_file() and directory.suffix == ".gguf":
            yield _gguf(directory)
        elif directory.exists():
            yield Finding("model", Level.FAIL, f"{source} is a file", "give --model the directory it is in")
        elif source.startswith((".", "/", "~")):
            yield Finding("model", Level.FAIL, f"there is no directory {source}", "give --model an existing one")
        else:
            yield Finding("model", Level.NOTE, f"{source} comes from the hub, or from its cache on this machine")
        return
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        advice = "a model is a directory with these; other weight formats are refused"
        yield Finding("model", Level.FAIL, f"{directory} lacks {', '.join(missing)}", advice)
    else:
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        name = "the bundled demonstration" if directory == BUNDLED else directory.name
        advice = "" if settings.model.source or is_there(SMOLLM2) else HOW_TO_GET_A_MODEL
        yield Finding("model", Level.OK, f"{name}, {size / GIB:.2f} GiB", advice)
        yield from _template(settings, directory)


def _template(settings: Settings, directory: Path) -> Iterator[Finding]:
    """Report what the model's chat template shows: how the model writes calls and thoughts, and which messages it
    takes."""
    try:
        tokenizer = ChatTokenizer.load(directory, calls=settings.model.calls, thoughts=settings.model.thoughts)
    except TokenizerError as error:
        yield Finding("calls", Level.FAIL, str(error), "repair the model's directory")
        return
    if not tokenizer.has_chat_template:
        yield Finding("calls", Level.NOTE, "the model has no chat template", "it completes text, and takes no chats")
        return
    yield _calls(tokenizer)
    problems = list(_problems(tokenizer.form.found.described))
    if problems:
        yield Finding("template", Level.NOTE, f"{'; '.join(problems)}: the server joins or rewrites these")
    else:
        yield Finding("template", Level.OK, "takes messages in any order")


def _problems(outcomes: dict[str, str]) -> Iterator[str]:
    """Yield what a template does with the messages that it does not take as they come."""
    for outcome, verb in (("refused", "refuses"), ("lost", "leaves out"), ("moved", "moves")):
        if what := [said for name, said in _MESSAGES.items() if outcomes[name] == outcome]:
            yield f"{verb} {', '.join(what)}"


def _calls(tokenizer: ChatTokenizer) -> Finding:
    """Report how the model writes calls and thoughts."""
    described = tokenizer.form.described
    found = f"as {described['calls']}, thoughts as {described['thoughts']}"
    if described["tools_in"] == "server":
        return Finding(
            "calls", Level.NOTE, f"{found}; its template takes no tools, so the system prompt describes them"
        )
    return Finding("calls", Level.OK, found)


def _window(settings: Settings, expected: Expected | None) -> Iterator[Finding]:
    if expected is None:
        return
    most = expected.shape.window_tokens
    window = min(expected.hbm_tokens, most)
    if window and (word := word_on_agents(window)):
        advice = "a model with a longer window"
        if window < most:
            advice += ", or more memory for KV (cache.hbm_tokens)"
        elif most == settings.model.max_context:
            advice += ", or raise model.max_context"
        yield Finding("agents", Level.NOTE, word, advice)


def _gguf(file: Path) -> Finding:
    try:
        with file.open("rb") as opened:
            begins = opened.read(4)
        if begins != b"GGUF":
            return Finding("model", Level.FAIL, f"{file} is no GGUF file", "download or copy it again")
        return Finding("model", Level.OK, f"{file.name}, {file.stat().st_size / GIB:.2f} GiB, is converted once")
    except OSError as error:
        return Finding("model", Level.FAIL, f"{file} cannot be read: {error.strerror}", "chmod +r, or another file")


def _port(settings: Settings) -> Iterator[Finding]:
    host, port = settings.server.host, settings.server.port
    try:
        if not port:
            yield Finding("address", Level.OK, f"{host}, any free port")
            return
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
        with socket.create_server(address[:2], family=family, dualstack_ipv6=is_dual):
            pass
        yield Finding("address", Level.OK, f"{host}:{port} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_reprise(host, port):
            yield Finding(
                "address", Level.NOTE, f"Reprise runs there: {host}:{port}", "another server needs another --port"
            )
            return
        advice = "is a server running there already? else choose another --port or --host"
        yield Finding("address", Level.WARN, f"cannot listen on {problem_of_address(settings, error)}", advice)


def _is_reprise(host: str, port: int) -> bool:
    """Return whether a server or gateway of Reprise answers at an address."""
    try:
        url = f"http://{own_host(host)}:{port}/health"
        answer = httpx.get(url, timeout=ADDRESS_TIMEOUT_S, trust_env=False)  # no proxy: it is this machine
        health = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return isinstance(health, dict) and health.get("status") == "ok" and bool({"engine", "replicas"} & health.keys())


def problem_of_address(settings: Settings, error: OSError) -> str:
    """Return a sentence about why a server cannot listen, which names the settings of its address."""
    address = f"{settings.server.host}:{settings.server.port} (server.host, server.port)"
    # Python repeats the address in the error's text.
    known = error.errno is not None and error.errno in errno.errorcode
    reason = os.strerror(error.errno or 0) if known else error.strerror or str(error)
    return f"{address}: {reason}"
