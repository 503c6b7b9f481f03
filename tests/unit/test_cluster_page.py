"""The documentation's examples for clusters and containers name things that exist."""

import yaml
from pages import blocks

from shmload._cli.main import main


def manifests():
    for page in ("service.md", "cluster.md"):
        for block in blocks(page, "yaml"):
            yield from yaml.safe_load_all(block)


def pods():
    """Return the manifests for Kubernetes, each with its pod's specification."""
    found = [manifest for manifest in manifests() if "kind" in manifest]
    assert [m["kind"] for m in found] == ["DaemonSet", "Deployment"]
    for manifest in found:
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert labels == manifest["spec"]["selector"]["matchLabels"]
    return [manifest["spec"]["template"]["spec"] for manifest in found]


def containers(pod):
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_commands_of_containers_are_right():
    seen = []
    for pod in pods():
        for container in containers(pod):
            probe = container.get("readinessProbe", {"exec": {"command": []}})
            for program, *words in (container["command"], probe["exec"]["command"] or [""]):
                if program == "shmload":
                    seen.append(words[0])
                    command = main.commands[words[0]]
                    command.make_context(words[0], words[1:], resilient_parsing=False).close()
    assert seen == ["serve", "status", "warm"]


def test_limit_holds_the_budget():
    service, _ = pods()
    (weights,) = service["containers"]
    budget = weights["command"][weights["command"].index("--budget") + 1]
    limit = weights["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) > int(budget.removesuffix("GiB"))
    assert weights["resources"]["requests"]["memory"] == limit
