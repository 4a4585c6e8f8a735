"""Every PromQL expression of the dashboards and the alert rules, and what stands in it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
SERVER, FLEET = (DOCKER / "grafana" / name for name in ("reprise.json", "fleet.json"))
ALERTS = DOCKER / "prometheus" / "alerts.yaml"
ALERTS_TEST = Path(__file__).with_name("alerts_test.yaml")  # their unit tests, for promtool
FUNCTIONS = {
    *("histogram_quantile", "rate", "increase", "delta", "sum", "max", "count"),
    *("by", "on", "ignoring", "and", "or", "unless", "le"),
}
METRIC = re.compile(r"\b(?:reprise|redis|haproxy)_\w+|\bup\b")


def panels(dashboard: Path) -> list[dict[str, Any]]:
    def walk(found: list[dict[str, Any]]) -> Any:
        for panel in found:
            yield panel
            yield from walk(panel.get("panels", []))

    return list(walk(json.loads(dashboard.read_text(encoding="utf-8"))["panels"]))


def shown(dashboard: Path) -> list[tuple[str, str]]:
    """Return (title, expression) of everything that a dashboard draws."""
    return [(panel["title"], target["expr"]) for panel in panels(dashboard) for target in panel.get("targets", ())]


def alerts() -> list[tuple[str, str]]:
    """Return (name, expression) of every alert."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    return set(METRIC.findall(_bare(expression)))


def labels_in(expression: str) -> set[str]:
    """Return the labels that it names."""
    words = set(re.findall(r"\b[a-z_]+\b", _bare(expression)))
    return words - names_in(expression) - FUNCTIONS


def _bare(expression: str) -> str:
    return re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
