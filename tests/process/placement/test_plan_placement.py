"""`plan` with an inventory knows the loaded models' sizes, and its device map plans to itself."""

import ast
import functools

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import shmload
from shmload._building.module_trees import component_of, components_of
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload._cli.main import main

_FAMILIES = ("stable-diffusion", "sdxl", "sd3", "flux", "wan", "qwen-image")
_MIXED = {"vae": torch.float32, "default": torch.bfloat16}


def _components(folder, torch_dtype):
    found = components_of(resolve(Wanted(source=folder), folder), torch_dtype)
    return {component.name: component for component in found}


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.libraries
@pytest.mark.parametrize("torch_dtype", [None, torch.bfloat16, torch.float16, _MIXED], ids=str)
@pytest.mark.parametrize("family", _FAMILIES)
def test_planned_sizes_are_those_of_the_loaded_models(saved, family, torch_dtype):
    folder = saved(family, "bfloat16")
    given = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **given)
    loaded = {
        name: component_of(name, model)
        for name, model in pipe.components.items()
        if isinstance(model, torch.nn.Module)
    }
    # Sizes, modules, modules that stay whole, and ties.
    assert _components(folder, torch_dtype) == loaded


@pytest.mark.libraries
def test_component_without_safetensors_is_not_forgotten(copied):
    folder = copied("flux")
    (weights,) = (folder / "vae").glob("*.safetensors")
    with_more = {**load_file(weights), "epoch": 3}  # which shmload does not read
    vae = weights.with_suffix(".bin")
    torch.save(with_more, vae)
    weights.unlink()
    found = _components(folder, "bfloat16")["vae"]
    assert found.module.is_unit
    assert found.nbytes == vae.stat().st_size
    wanted = shmload.plan(folder, components=["transformer"], inventory="1GiB").placement
    assert list(wanted.components) == ["transformer"]


@pytest.mark.libraries
def test_component_that_the_class_does_not_take_needs_no_place(saved):
    asked = {"pipeline_class": "FluxPriorReduxPipeline", "inventory": "1GiB"}
    planned = shmload.plan(saved("flux"), **asked).placement
    assert list(planned.components) == ["text_encoder", "text_encoder_2"]


# The answer ---------------------------------------------------------------------------------------


@pytest.fixture
def run_plan(warm_python, tmp_path):
    """Run `shmload plan`."""
    program = tmp_path / "program.py"
    program.write_text("from shmload.__main__ import run\nrun()")
    return functools.partial(warm_python.run, program, "plan")


@pytest.mark.libraries
def test_printed_map_can_be_pasted(saved, run_plan):
    limits = "cuda:0=200KB,cuda:1=200KB,cuda:2=400KB"
    shown = run_plan(saved("flux"), "--dtype", "bfloat16", "--inventory", limits)
    assert shown.returncode == 0, shown.stderr
    table, printed = shown.stdout.split("\n\n")[0], shown.stdout.split("\n\n")[2]
    assert table.splitlines()[0].split() == ["COMPONENT", "SIZE", "DEVICE", "SHARE"]
    device_map = ast.literal_eval(printed.removeprefix("device_map = "))
    assert {key.partition(".")[0] for key in device_map} == {
        "text_encoder",
        "text_encoder_2",
        "transformer",
        "vae",
    }
    again = run_plan(
        *(saved("flux"), "--dtype", "bfloat16", "--inventory", limits, "--device-map", printed)
    )
    assert again.stdout == shown.stdout


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["--inventory", "many"], "'many' is not a size"),
        (2, ["--inventory", "1GiB", "--device-map", "{0:"], "cannot be read as a dict"),
        (2, ["--inventory", "1GiB", "--device-map", '{"tranformer": 0}'], "mean 'transformer'"),
        (2, ["--device-map", "cuda:9"], "--inventory"),
    ],
)
def test_what_cannot_be_planned_is_one_line(saved, capsys, code, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(saved("flux")), *arguments], prog_name="shmload")
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
