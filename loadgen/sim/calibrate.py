"""Derives a machine from what a running Reprise server has measured, given as `/metrics` text or by its address."""

import re
from dataclasses import dataclass

import httpx

from reprise.loadgen.sim.machine import Costs, Machine

_LINE = re.compile(r"^(reprise_\w+?)(?:\{([^}]*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TERMS = ("fixed", "per_token", "per_kilo_pair", "per_row", "per_kilo_read")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The name and sizes of a served model, as `/v1/models` reports them."""

    name: str
    kv_bytes_per_token: int
    window: int
    hbm_tokens: int
    num_layers: int
    max_seqs: int


def parse(text: str) -> dict[str, dict[str, float]]:
    """Parse metrics into {metric: {label value: number}}, for metrics with at most one label; its value is "" if there
    is none."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            label = _LABEL.search(match[2] or "")
            found.setdefault(match[1].removesuffix("_total"), {})[label[2] if label else ""] = float(match[3])
    return found


def machine(text: str, model: ServedModel, *, links: dict[str, float] | None = None) -> Machine:
    """Derive the machine from the text of `/metrics`, taken after the server has done some work. links: bytes per
    second to assume for directions ("dram_to_hbm", "disk_to_dram") in which the server has moved nothing yet. Raises
    ValueError if something is missing."""
    metrics = parse(text)
    terms = metrics.get("reprise_step_cost_seconds", {})
    if not all(term in terms for term in _TERMS):
        raise ValueError("no reprise_step_cost_seconds: not a server of ours, or one that has not run yet")
    rates = dict(links or {})
    moved_s = metrics.get("reprise_moved_seconds", {})
    moved = metrics.get("reprise_moved_bytes", {})
    for direction, also in (("dram_to_hbm", ()), ("disk_to_dram", ("disk_to_hbm",))):
        size, seconds = (sum(found.get(name, 0.0) for name in (direction, *also)) for found in (moved, moved_s))
        if size > 0 and seconds > 0:
            rates[direction] = size / seconds
    capacity = metrics.get("reprise_tier_capacity_bytes", {})
    for direction, tier in (("dram_to_hbm", "dram"), ("disk_to_dram", "disk")):
        if direction not in rates:
            if capacity.get(tier):
                raise ValueError(f"nothing has moved {direction} yet: the server has to work until its tiers are used")
            rates[direction] = 1.0
    return Machine(
        name=model.name,
        gpus=1,
        costs=Costs(
            prefill_fixed_s=terms["fixed"],
            s_per_token=terms["per_token"],
            s_per_kilo_pair=terms["per_kilo_pair"],
            decode_fixed_s=terms["fixed"],
            s_per_row=terms["per_row"],
            s_per_kilo_read=terms["per_kilo_read"],
            overlapped=False,
        ),
        num_layers=model.num_layers,
        kv_bytes_per_token=model.kv_bytes_per_token,
        window=model.window,
        max_seqs=model.max_seqs,
        dram_to_hbm=rates["dram_to_hbm"],
        disk_to_dram=rates["disk_to_dram"],
        hbm_bytes=model.hbm_tokens * model.kv_bytes_per_token,
        hbm_shared=True,
        dram_bytes=capacity.get("dram", 0.0),
        disk_bytes=capacity.get("disk", 0.0),
    )


def from_server(url: str, *, api_key: str) -> Machine:
    """Derive the machine from a running server. Raises ValueError if it cannot be asked or has not measured enough
    yet."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=10, trust_env=False) as http:
            served = http.get("/v1/models").raise_for_status().json()["data"][0]
            text = http.get("/metrics").raise_for_status().text
        model = ServedModel(
            name=served["id"],
            kv_bytes_per_token=served["cache"]["kv_bytes_per_token"],
            window=served["max_model_len"],
            hbm_tokens=served["cache"]["hbm_tokens"],
            num_layers=served["num_layers"],
            max_seqs=served["max_seqs"],
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"no server that can be asked at {base}: {error}") from None
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"/v1/models does not say {error}: not a server of ours, or an older one") from None
    return machine(text, model)
