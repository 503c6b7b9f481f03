"""`scripts/bench gpu` calculates its figures correctly, shown on easy numbers."""

import pytest
from benchmarks.bench import Bench
from benchmarks.gpu_measures import (
    describe_gpu,
    measure_call,
    measure_convert,
    measure_peers,
    measure_tensors,
    measure_upload,
)
from benchmarks.processes import ProbeFailed
from benchmarks.report import format_line
from benchmarks.sources import Sources
from benchmarks.suites import suite_of

from shmload._devices.ways import WAYS

GB = 10**9
MB = 10**6
UPLOADS = dict.fromkeys(WAYS, 40 * GB) | {
    "pinned": 54 * GB,
    "pageable": 10 * GB,
    "auto": 49 * GB,
    "ring": 44 * GB,
    "register": 49 * GB,
    "off": 8 * GB,
    "to_device": 40 * GB,
}


class FakeProcesses:
    """Answers by the probe's name and, for a load or a peer, by the way."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls = []

    def of(self, program):
        return self

    def ask(self, name, *arguments, **variables):
        self.calls.append((name, arguments, variables))
        found = self.answers[name]
        return found(*arguments, **variables) if callable(found) else found

    probe = ask


class FakeBench(Bench):
    """Reports given answers of `resident`, one per call."""

    def resident(self):
        return {"segment"} if self.processes.answers.get("warm", True) else set()

    def evict(self):
        pass


@pytest.fixture
def bench(tmp_path):
    sources = Sources(tmp_path)
    for directory, nbytes in ((sources.flux_bf16, 1000), (sources.flux_fp32, 2000)):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes(nbytes))
    sources.flux_small.mkdir()
    (sources.flux_small / "model.safetensors").write_bytes(b"")

    def make(**answers):
        said = []
        bench = FakeBench(sources, FakeProcesses(**answers), 3, said.append)
        return bench, said

    return make


def values(figures):
    return {figure.name: figure.sample.median for figure in figures}


@pytest.mark.parametrize(("gpu", "has_rate"), [("NVIDIA H200, 139.8 GiB", True), ("T4", False)])
def test_upload_is_a_share_of_the_pinned_rate(bench, gpu, has_rate):
    made, _ = bench(uploads=UPLOADS, describe={"GPU": gpu}, peers={})
    figures = measure_upload(made)
    assert values(figures) == {"upload": pytest.approx(90.74, abs=0.01)} | (
        {"upload-rate": pytest.approx(49)} if has_rate else {}
    )
    assert all(figure.target.is_reached(figure.sample.median) for figure in figures)
    assert figures[0].line("the same, pin=off").sample.median == pytest.approx(8)


def test_call_is_compared_with_the_better_way_of_diffusers(bench):
    def load(way, *arguments, HF_ENABLE_PARALLEL_LOADING=""):
        if way == "accelerate":
            return {"call_s": 1}
        return {"call_s": 0.25 if way == "shmload" else 2 if HF_ENABLE_PARALLEL_LOADING else 3}

    made, _ = bench(load=load)
    (figure,) = measure_call(made)
    assert figure.sample.values == (8, 8, 8)
    assert figure.line("accelerate").sample.median == 1
    assert figure.line("shmload, of the files").sample.median == pytest.approx(1000 / 0.25 / GB)


def test_conversion_and_the_memory_beside_the_ring(bench):
    def load(way, small, source, limit=None, **variables):
        if way != "shmload":
            return {"call_s": 8}
        assert (limit is None) == (variables == {"SHMLOAD_WORKERS": "4"})
        ring_nbytes = 192 * MB if limit is None else 256 * MB
        return {"call_s": 2, "host_nbytes": 300 * MB, "ring_nbytes": ring_nbytes}

    made, _ = bench(load=load)
    assert values(measure_convert(made)) == {
        "convert": 4,
        "memory": pytest.approx(108),
        "memory-limited": pytest.approx(44),
    }


def test_summary_has_the_figures_with_targets(bench):
    made, _ = bench(uploads=UPLOADS, describe={"GPU": "T4"}, peers={})
    assert format_line(["GPU T4"], measure_upload(made)) == "GPU T4; upload 90.7 %"


def test_float32_is_made_only_for_what_reads_it(tmp_path):
    sources = Sources(tmp_path)
    assert sources.flux_fp32 in suite_of("gpu", sources).sources
    assert sources.flux_fp32 in suite_of("gpu", sources, ["convert", "call"]).sources
    assert sources.flux_fp32 not in suite_of("gpu", sources, ["upload"]).sources


def test_tensors_are_told_in_milliseconds(bench):
    made, _ = bench(small_tensors={"call_s": 0.015, "first_s": 0.1, "torch_s": 0.03})
    (figure,) = measure_tensors(made)
    assert figure.sample.median == pytest.approx(15)
    assert figure.target.is_reached(figure.sample.median)


def test_peers_are_those_that_are_installed_and_run(bench):
    def peer(name, *paths, **variables):
        if name == "instanttensor":
            raise ProbeFailed("exited with 1:\nTraceback\nValueError: only CUDA")
        assert [bool(variables), name] in ([False, "safetensors"], [True, "fastsafetensors"])
        return {"call_s": 4 if name == "safetensors" else 1}

    versions = {
        "safetensors": "0.8.0",
        "fastsafetensors": "0.5.0",
        "runai-model-streamer": None,
        "instanttensor": "0.2.2",
    }
    made, said = bench(load={"call_s": 2}, peer=peer, peers=versions)
    assert values(measure_peers(made)) == {"peer-safetensors": 2, "peer-fastsafetensors": 0.5}
    assert said[0] == "instanttensor 0.2.2 does not run here: ValueError: only CUDA"


def test_peers_that_are_not_installed_are_named():
    gpu = {"GPU": "T4"}
    processes = FakeProcesses(describe=gpu, peers={"safetensors": "0.8.0", "instanttensor": None})
    said = describe_gpu(processes)
    assert said == {"GPU": "T4", "peers": "safetensors 0.8.0, instanttensor not installed"}


def test_no_gpu_is_described_by_nothing():
    assert describe_gpu(FakeProcesses(describe={})) == {}


def test_measurement_fails_if_another_program_keeps_removing_the_segments(bench):
    made, _ = bench(load={"call_s": 1}, warm={})
    with pytest.raises(ProbeFailed, match="keeps removing"):
        measure_call(made)
