"""Settings are read and validated."""

from datetime import timedelta
from pathlib import Path

import pytest

from shmload._settings import (
    _LOCAL_SIZES,
    local_world_size,
    parse_keep_for,
    settings,
    unknown_variables,
    worker_count,
)
from shmload.errors import ArgumentError


@pytest.fixture(autouse=True)
def fresh_settings():
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_environment_is_read(monkeypatch):
    monkeypatch.setenv("SHMLOAD_STALL_TIMEOUT_S", "2.5")
    monkeypatch.setenv("SHMLOAD_CACHE_DIR", "~/there")
    assert settings().stall_timeout_s == 2.5
    assert settings().cache_dir == Path.home() / "there"


def test_variable_that_is_no_setting_is_named_but_for_those_of_run():
    of_run = {"SHMLOAD_RUN_IMPORTS", "SHMLOAD_REDIRECT"}
    (said,) = unknown_variables({"SHMLOAD_WORKER", "SHMLOAD_WORKERS", "HOME", *of_run})
    assert said.startswith("SHMLOAD_WORKER is no setting")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SHMLOAD_WORKERS", "2.5", "Expected `int | null`"),
        ("SHMLOAD_WORKERS", "0", "Expected `int` >= 1"),
        ("SHMLOAD_WORKERS", "\udcff", "surrogates not allowed"),  # bytes that are no text
        ("HF_PARALLEL_LOADING_WORKERS", "many", "Expected `int | null`, got `str`"),
        ("SHMLOAD_STALL_TIMEOUT_S", "2s", "Expected `float`, got `str`"),
        ("SHMLOAD_START_TIMEOUT_S", "-1", "Expected `float` >= 0.0"),
        ("SHMLOAD_WAIT_TIMEOUT_S", "inf", "Expected `float`"),
    ],
)
def test_wrong_value_is_named_with_its_variable_and_what_it_must_be(
    monkeypatch, variable, value, expected
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentError) as caught:
        settings()
    assert str(caught.value).startswith(f"the environment variable {variable} is {value!r}")
    assert expected in str(caught.value)


def test_workers_of_huggingface_count_unless_ours_are_given(monkeypatch):
    monkeypatch.setenv("HF_PARALLEL_LOADING_WORKERS", "3")
    assert worker_count(parent_is_busy=True) == 3
    settings.cache_clear()
    monkeypatch.setenv("SHMLOAD_WORKERS", "5")
    assert worker_count(parent_is_busy=True) == 5


@pytest.mark.parametrize(("cores", "busy", "idle"), [(1, 1, 1), (2, 1, 2), (8, 7, 8), (64, 16, 16)])
def test_a_core_is_left_to_a_busy_parent(monkeypatch, cores, busy, idle):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert worker_count(parent_is_busy=True) == busy
    assert worker_count(parent_is_busy=False) == idle


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "-4"}, 1),
        ({"WORLD_SIZE": "8"}, 1),
    ],
)
def test_ranks_on_this_host_are_what_the_launcher_says(monkeypatch, variables, size):
    for name in _LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_world_size() == size


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("2h", 7200),
        ("90min", 5400),
        ("1d 12h", 129600),
        ("1.5 hours", 5400),
        ("30s", 30),
        (0.2, 1),
        (timedelta(days=1), 86400),
        ("forever", 0),
    ],
)
def test_time_to_keep_something_is_read(given, seconds):
    assert parse_keep_for(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "2", "h", "2 weeks", "1..5h", "-1h", "2hx", "0s", 0, -1, float("inf"), "nan h"]
)
def test_what_is_no_time_is_refused(given):
    with pytest.raises(ArgumentError, match="write it like 2h"):
        parse_keep_for(given)


def test_budget_is_a_size(monkeypatch):
    monkeypatch.setenv("SHMLOAD_BUDGET", "20GiB")
    assert settings().budget == 20 << 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "'much' is not a size"),
        ("20", "is a unit missing, as in 20GiB"),
        ("800KiB", "800KiB is below 1 MiB, the least; write it like 40GiB"),
    ],
)
def test_budget_that_is_no_size_is_refused(monkeypatch, text, said):
    monkeypatch.setenv("SHMLOAD_BUDGET", text)
    with pytest.raises(ArgumentError, match="SHMLOAD_BUDGET: ") as caught:
        settings()
    assert said in str(caught.value)
