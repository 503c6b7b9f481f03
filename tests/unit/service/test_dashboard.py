"""What is shipped for Prometheus and Grafana speaks of metrics that the service exports.

Once, the dashboard was also checked with Grafana's published types (@grafana/schema 13.2) and read
by its SDK for Python, and Prometheus 2.42 answered each expression from a running service.
"""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import shmload
from shmload._service.gauges import Gauges
from shmload._service.keeper import Keeper

_DOCS = Path(__file__).parents[3] / "docs"
_METRIC = re.compile(r"\bshmload_\w+")
_LABEL = re.compile(r"[{,]\s*(\w+)\s*=~?|by \(([^)]*)\)")
# What Prometheus itself adds to each series.
_OF_PROMETHEUS = {"instance", "job"}


@pytest.fixture
def families(tmp_path, evicts):
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    shmload.warm(tmp_path / "model.safetensors")
    with contextlib.closing(Keeper(1 << 30)) as keeper:
        return list(Gauges(keeper).collect())


@pytest.fixture
def exported(families):
    """The names of all samples, with those of their labels."""
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def dashboard():
    return json.loads((_DOCS / "grafana.json").read_text())


def alerts():
    (group,) = yaml.safe_load((_DOCS / "prometheus-alerts.yml").read_text())["groups"]
    return group["rules"]


def expressions():
    panels = dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in alerts()
    ]


def test_every_expression_names_metrics_and_labels_that_are_exported(exported):
    for expression in expressions():
        names = _METRIC.findall(expression)
        assert names
        assert set(names) <= exported.keys(), expression
        labels = {
            label.strip()
            for pair in _LABEL.findall(expression)
            for label in ",".join(pair).split(",")
        } - {""}
        known = set.union(*(exported[name] for name in names)) | _OF_PROMETHEUS
        assert labels <= known, expression


def test_every_alert_is_on_the_page_and_says_what_it_means():
    page = (_DOCS / "service.md").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert re.findall(r"^\| `(Shmload\w+)`", page, re.M) == names
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_page_lists_every_metric(families):
    page = (_DOCS / "service.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    assert set(_METRIC.findall(page)) == {family.name for family in families}
