"""What is shipped for Prometheus and Grafana speaks of metrics that the service exports.

Once, the dashboard was also checked with Grafana's published types (@grafana/schema 13.2) and read
by its SDK for Python, and Prometheus 2.42 answered each expression from a running service.
"""

import contextlib
import json
import re
from itertools import combinations
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
_COLUMNS = 24  # of Grafana's grid


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


def test_every_variable_is_defined_and_lists_what_is_exported(exported):
    found = dashboard()
    variables = found["templating"]["list"]
    assert variables[0]["type"] == "datasource"
    assert variables[0]["query"] == "prometheus"
    names = {variable["name"] for variable in variables}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(found["panels"])))
    assert {name for name in used if not name.startswith("__")} <= names
    for variable in variables[1:]:
        metric, label = re.fullmatch(
            r"label_values\((\w+), (\w+)\)", variable["query"]["query"]
        ).groups()
        assert label in exported[metric] | _OF_PROMETHEUS


def test_dashboard_has_the_shape_that_grafana_loads():
    found = dashboard()
    assert found["schemaVersion"] >= 36
    assert found["id"] is None  # else an import would overwrite another dashboard
    assert found["uid"] == found["title"] == "shmload"
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries", "heatmap")
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        assert all(target["datasource"] == source for target in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= _COLUMNS
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below


def test_every_alert_is_on_the_page_and_says_what_it_means():
    page = (_DOCS / "operators.md").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert re.findall(r"^\| `(Shmload\w+)`", page, re.M) == names
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_alert_of_a_service_that_is_gone_looks_at_each_machine():
    (gone,) = (rule["expr"] for rule in alerts() if rule["alert"] == "ShmloadGone")
    assert gone.startswith("up == 0 and on (job, instance) ")


def test_page_lists_every_metric(families):
    page = (_DOCS / "service.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    assert set(_METRIC.findall(page)) == {family.name for family in families}
