"""Builds the panel shown when a server is ready: where it listens, what it serves, and how much memory that takes."""

import msgspec
from rich.console import Group
from rich.panel import Panel
from rich.table import Table

from reprise.app.cli.clients.table import word_on_agents
from reprise.app.settings.settings import GIB, MIB, Settings
from reprise.app.turn.sampling import OPENAI, SamplingDefaults
from reprise.engine.build.resources import memory
from reprise.engine.messages import ModelInfo

ON_DEVICE = (
    "weights",
    "hbm",
    "graphs",
)  # parts of the plan that use this machine's memory only if the model runs on it
IN_MEMORY = (*ON_DEVICE, "weights_dram", "dram", "staging", "coding")
NAMES = {
    "weights": "weights",
    "weights_dram": "weights in DRAM",
    "hbm": "KV in HBM",
    "graphs": "CUDA graphs",
    "dram": "KV in DRAM",
    "staging": "staging",
    "disk": "KV on disk",
    "coding": "KV being coded",
}

EVERY_ADDRESS = ("0.0.0.0", "::")


def panel(
    settings: Settings,
    model: ModelInfo,
    url: str,
    *,
    keys: int,
    sampling: SamplingDefaults,
    state_problem: str | None = None,
) -> Panel:
    """Build the panel with the address, the model and the memory plan of a server that is ready. The plan is shown so
    that an operator sees it before memory runs out. state_problem: why the state directory is not used, for people."""
    kept = _duration(settings.cache.ttl_s)
    rows = {
        "page": url + (", and every other address of this machine" if settings.server.host in EVERY_ADDRESS else ""),
        "API": f"{url}/v1",
        "model": f"{model.name} ({model.architecture}, {model.parameters / 1e6:,.1f} M parameters)",
        "runs on": f"{model.device}, {_numbers(model)}, attention {model.attention_backend}",
        "exact": f"{'proven' if model.exact else 'no'}: {model.exactness}",
        "window": f"{model.max_context:,} tokens",
        "sampling": f"{_differing(sampling)} where a request says nothing",
        "cache": f"{settings.cache.mode}, policy {settings.cache.policy}, sessions kept {kept}",
        "at once": f"{settings.scheduler.max_seqs} running, {settings.scheduler.max_queued} waiting",
        "state": str(settings.state_dir),
        "keys": f"{keys} accepted" if keys else "none needed",
    }
    if not model.decouplable:
        rows["positions"] = "not decoupled: truncation means recompute"
    about = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        about.add_row(f"[bold]{name}[/bold]", _escaped(value))
    if word := word_on_agents(model.max_context):
        about.add_row("[bold]agents[/bold]", _escaped(word))
    for warning in (*model.warnings, *([state_problem] if state_problem else [])):
        about.add_row("[bold yellow]warning[/bold yellow]", _escaped(warning))
    return Panel(Group(about, "", _plan(model)), title="Reprise is ready", expand=False)


def _numbers(model: ModelInfo) -> str:
    return f"{model.dtype}, weights in {model.weights}" if model.weights else model.dtype


def _differing(sampling: SamplingDefaults) -> str:
    """Return the parameters that differ from OpenAI's defaults."""
    usual, said = (msgspec.structs.asdict(defaults) for defaults in (OPENAI, sampling))
    differing = [f"{name} {value:g}" for name, value in said.items() if value != usual[name]]
    return ", ".join(differing) or "temperature 1"


def _packed(model: ModelInfo) -> str:
    """Return a note on how much storing KV in HBM as int8 changes answers, in nats a token. Empty if KV is not stored
    so."""
    return "" if model.hbm_divergence is None else f" (int8: {model.hbm_divergence:.2g} nats a token)"


def _plan(model: ModelInfo) -> Table:
    plan = model.memory_plan or {"hbm": model.hbm_tokens * model.hbm_bytes_per_token}
    table = Table(title="memory plan", box=None, padding=(0, 2, 0, 0), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, size in plan.items():
        tokens = _tokens(model, name, size)
        what = f"{tokens:,} tokens" if tokens else ""
        if name in ("dram", "disk") and tokens and model.lossy_codec:
            what += ", coded" if name == "disk" else ", most of them coded"
        if name == "hbm":
            what += f" of {model.hbm_bytes_per_token:,} bytes{_packed(model)}, pages of {model.page_size}"
        table.add_row(NAMES.get(name, name), _size(size), what)
    elsewhere = () if model.device == "cpu" else ON_DEVICE
    used = sum(plan.get(name, 0) for name in IN_MEMORY if name not in elsewhere)
    table.add_row("memory in all", _size(used), f"of {memory().total / GIB:.1f} GiB that this machine has")
    return table


def _tokens(model: ModelInfo, name: str, size: int) -> int:
    """Return how many tokens a part of the memory plan has room for; 0 if it has none. name: the part. size: its
    bytes."""
    if name == "dram" and model.dram_tokens:
        return model.dram_tokens
    if name == "hbm":
        return size // model.hbm_bytes_per_token if model.hbm_bytes_per_token else 0
    shares = {"dram": 1.0 if model.lossy_codec else model.coded_bytes, "disk": model.coded_bytes}
    token_bytes = model.kv_bytes_per_token * shares.get(name, 0.0)
    return int(size / token_bytes) if token_bytes else 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.1f} MiB"


def _duration(seconds: float) -> str:
    """Format a duration in the largest unit of which there are two or more."""
    units = (("days", 86_400), ("h", 3600), ("min", 60))
    name, unit = next(((name, unit) for name, unit in units if seconds >= 2 * unit), ("s", 1))
    return f"{seconds / unit:.3g} {name}"


def _escaped(text: str) -> str:
    """Escape square brackets, which are rich's markup; a host may be [::1]."""
    return text.replace("[", r"\[")
