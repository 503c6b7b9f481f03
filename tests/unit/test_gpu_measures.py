"""`scripts/bench gpu` calculates its figures correctly, shown on easy numbers."""

from typing import ClassVar

import pytest
from benchmarks.bench import Bench, ProbeFailed
from benchmarks.gpu import (
    describe_gpu,
    measure_call,
    measure_convert,
    measure_peers,
    measure_tensors,
    measure_upload,
    suite,
)
from benchmarks.report import format_line

GB = 10**9
MB = 10**6
UPLOADS = {
    "pinned": 54 * GB,
    "pageable": 10 * GB,
    "load_pipeline": 49 * GB,
    "to_device": 40 * GB,
}


class FakeBench(Bench):
    """Gives answers by the function's name and, for a load or a peer, by the way."""

    answers: ClassVar = {}

    def ask(self, function, *arguments, **variables):
        found = self.answers.get(function.__name__)
        return found(*arguments, **variables) if callable(found) else found

    def resident(self):
        return self.answers.get("resident", {"segment"})

    def evict(self):
        pass


@pytest.fixture
def bench(tmp_path, monkeypatch):
    said = []
    made = FakeBench(tmp_path, tmp_path, 3, said.append)
    for name, nbytes in (("flux-8-bf16", 1000), ("flux-8-fp32", 2000), ("flux-small", 0)):
        made.source(name).mkdir()
        (made.source(name) / "model.safetensors").write_bytes(bytes(nbytes))

    def make(**answers):
        monkeypatch.setattr(FakeBench, "answers", answers)
        return made, said

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
    assert all(figure.is_reached for figure in figures)
    assert figures[0].beside["to_device, the whole call"].median == pytest.approx(40)


def test_call_is_compared_with_the_better_way_of_diffusers(bench):
    def load(way, *arguments, HF_ENABLE_PARALLEL_LOADING=""):
        if way == "accelerate":
            return {"call_s": 1}
        return {"call_s": 0.25 if way == "shmload" else 2 if HF_ENABLE_PARALLEL_LOADING else 3}

    made, _ = bench(load=load)
    (figure,) = measure_call(made)
    assert figure.sample.values == (8, 8, 8)
    assert figure.beside["accelerate"].median == 1
    assert figure.beside["shmload, of the files"].median == pytest.approx(1000 / 0.25 / GB)


def test_conversion_and_the_memory_beside_what_may_be_ahead(bench):
    def load(way, small, source, limit=None, **variables):
        if way != "shmload":
            return {"call_s": 8}
        assert (limit is None) == (variables == {"SHMLOAD_WORKERS": "4"})
        bound_nbytes = 192 * MB if limit is None else 256 * MB
        return {"call_s": 2, "host_nbytes": 300 * MB, "bound_nbytes": bound_nbytes}

    made, _ = bench(load=load)
    assert values(measure_convert(made)) == {
        "convert": 4,
        "memory": pytest.approx(108),
        "memory-limited": pytest.approx(44),
    }


def test_summary_has_the_figures_with_targets(bench):
    made, _ = bench(uploads=UPLOADS, describe={"GPU": "T4"}, peers={})
    assert format_line(["GPU T4"], measure_upload(made)) == "GPU T4; upload 90.7 %"


def test_float32_is_made_only_for_what_reads_it():
    assert "flux-8-fp32" in suite(8).sources
    assert "flux-8-fp32" in suite(8, ["convert", "call"]).sources
    assert "flux-8-fp32" not in suite(8, ["upload"]).sources


def test_tensors_are_told_in_milliseconds(bench):
    made, _ = bench(small_tensors={"call_s": 0.015, "first_s": 0.1, "torch_s": 0.03})
    (figure,) = measure_tensors(made)
    assert figure.sample.median == pytest.approx(15)
    assert figure.is_reached


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


def test_the_gpu_the_model_and_peers_that_are_not_installed_are_named(bench):
    made, _ = bench(describe={"GPU": "T4"}, peers={"safetensors": "0.8.0", "instanttensor": None})
    assert describe_gpu(made) == {
        "GPU": "T4",
        "peers": "safetensors 0.8.0, instanttensor not installed",
        "weights": "FluxTransformer2DModel with 8 double and 12 single blocks",
    }


def test_no_gpu_is_described_by_nothing(bench):
    made, _ = bench(describe={})
    assert describe_gpu(made) == {}


def test_measurement_fails_if_another_program_keeps_removing_the_segments(bench):
    made, _ = bench(load={"call_s": 1}, resident=set())
    with pytest.raises(ProbeFailed, match="keeps removing"):
        measure_call(made)
