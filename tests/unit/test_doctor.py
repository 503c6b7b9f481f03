"""Each check of the doctor says what it found, judges it, and names what helps."""

import json
import types

import click.testing
import pytest
from safetensors.torch import save_file
from warming import TENSORS

import shmload
from shmload import _doctor
from shmload._cli.main import main
from shmload._doctor import Finding, diagnose
from shmload._segments.eviction import Budget

GIB = 1 << 30
NAMES = [
    "shared memory",
    "control group",
    "memory",
    "budget",
    "leftovers",
    "kernel",
    "service",
    "libraries",
    "devices",
]


@pytest.fixture
def facts(monkeypatch):
    """Replace facts: `facts(machine_free_nbytes=1)`; then return the findings by name."""

    def replace(source=None, **values):
        for name, value in values.items():
            monkeypatch.setattr(_doctor, name, lambda *_, value=value: value)
        return {finding.name: finding for finding in diagnose(source)}

    return replace


def test_healthy_machine_has_nine_findings_and_no_remedy(facts):
    found = facts(
        shm_free_nbytes=60 * GIB,
        shm_total_nbytes=64 * GIB,
        cgroup_free_nbytes=None,
        machine_free_nbytes=60 * GIB,
        has_pidfds=True,
    )
    assert list(found) == NAMES
    assert found["shared memory"].detail == "60.00 GiB free of 64.00 GiB at /dev/shm"
    assert found["control group"].detail == "no memory limit"
    assert [found[name].state for name in NAMES[:7]] == ["ok"] * 7
    assert all((each.remedy is None) == (each.state == "ok") for each in found.values())


def test_room_is_judged_by_what_a_source_takes(facts, tmp_path):
    source = tmp_path / "a.safetensors"
    save_file(TENSORS, source)
    nbytes = shmload.plan(source, keep=True).decode_nbytes
    for free, state in ((nbytes, "ok"), (nbytes - 1, "bad")):
        found = facts(str(source), machine_free_nbytes=free)["memory"]
        assert found.state == state
        assert "; the source takes " in found.detail
    with pytest.raises(shmload.SourceNotFound):
        facts("/no/such/model")


def test_idle_models_count_as_room(facts):
    idle = types.SimpleNamespace(nbytes=2 * GIB)
    found = facts(machine_free_nbytes=GIB, evictable=[idle])["memory"]
    assert (found.state, found.detail) == (
        "ok",
        "1.00 GiB available, 2.00 GiB more of idle models",
    )
    budget = Budget(GIB, "SHMLOAD_BUDGET", "raise SHMLOAD_BUDGET")
    found = facts(chosen_budget=budget, evictable=[])["budget"]
    assert found.state == "warn"
    assert "SHMLOAD_BUDGET" in found.detail
    assert found.remedy.endswith("or raise SHMLOAD_BUDGET")


@pytest.mark.parametrize(
    ("values", "name", "said", "remedy"),
    [
        ({"file_system": "ext4"}, "shared memory", "not tmpfs", "mount -t tmpfs"),
        ({"has_pidfds": False}, "kernel", "a sandbox forbids pidfd_open", "libseccomp2"),
        ({"find_garbage": ["part"]}, "leftovers", "1 for `shmload gc` to remove", "shmload gc"),
        ({"TESTED": None}, "libraries", "tested up to diffusers 0.1", "'diffusers~=0.1.0'"),
    ],
)
def test_what_is_wrong_has_a_remedy(facts, monkeypatch, values, name, said, remedy):
    if "TESTED" in values:
        monkeypatch.setattr(_doctor, "TESTED", {"diffusers": ("0.1", "0.1")})
        values = {}
    found = facts(**values)[name]
    assert found.state in ("warn", "bad")
    assert said in found.detail
    assert remedy in found.remedy


def test_devices_are_named_with_their_free_memory(facts, monkeypatch):
    kinds = types.SimpleNamespace(
        accelerator_names=lambda: ("cuda:0", "cuda:1"),
        free_nbytes=lambda names: dict.fromkeys(names, GIB),
    )
    monkeypatch.setattr(_doctor, "kinds", kinds)
    detail = facts()["devices"].detail
    assert detail.startswith("torch ")
    assert detail.endswith(": cuda:0, 1.00 GiB free; cuda:1, 1.00 GiB free")


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    """Run the command on given findings; return its exit code and output."""

    def run_on(*findings, arguments=()):
        monkeypatch.setattr(_doctor, "diagnose", lambda *_: iter(findings))
        done = click.testing.CliRunner().invoke(main, ["doctor", *arguments])
        return done.exit_code, done.output

    return run_on


HEALTH = Finding("kernel", "ok", "Linux 6.8")
WARNING = Finding("leftovers", "warn", "1 for `shmload gc` to remove", "shmload gc")


def test_remedies_stand_below_the_findings(run):
    code, output = run(HEALTH, WARNING)
    assert code == 0
    assert output.splitlines() == [
        "STATE  CHECK      FINDING",
        "ok     kernel     Linux 6.8",
        "warn   leftovers  1 for `shmload gc` to remove",
        "",
        "What helps:",
        "leftovers: shmload gc",
    ]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_what_is_bad_is_the_exit_code(run, arguments):
    code, output = run(Finding("kernel", "bad", "old", "reboot"), HEALTH, arguments=arguments)
    assert code == 1
    if arguments:
        assert json.loads(output)["findings"][0] == {
            "name": "kernel",
            "state": "bad",
            "detail": "old",
            "remedy": "reboot",
        }
