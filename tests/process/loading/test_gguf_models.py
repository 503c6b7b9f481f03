"""Models from GGUF files, quantised and as floats, equal what diffusers makes of them."""

import diffusers
import gguf
import gguf_models
import pytest
import torch
from comparing import assert_modules_equal
from gguf_files import dequantised, save_blocks
from gguf_models import MODELS
from mappings import in_no_segment

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("remembers")]

_KINDS = ["Q4_K", "Q8_0", "Q6_K", "BF16", "Q4_0", "Q5_K"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function that writes a class's GGUF file; returns its path and its configuration's."""
    made = {}

    def write(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = gguf_models.build(name)
            model.save_config(folder / "config")
            save_blocks(gguf_models.quantise(model, _KINDS), folder / "model.gguf")
            made[name] = folder / "model.gguf", str(folder / "config")
        return made[name]

    return write


def quantised(dtype):
    return diffusers.GGUFQuantizationConfig(compute_dtype=dtype)


def library_alone(name, path, config, dtype):
    return getattr(diffusers, name).from_single_file(
        str(path), config=config, quantization_config=quantised(dtype), torch_dtype=dtype
    )


def decoded():
    """Return the segments that have a file's weights."""
    return [info for info in shmload.segments() if not info.kept]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in MODELS),
        (next(iter(MODELS)), torch.float16),
    ],
)
def test_quantised_model_is_that_of_diffusers(written, name, dtype, evicts):
    path, config = written(name)
    given = {"config": config, "quantization_config": quantised(dtype), "keep": True}
    got = shmload.load_model(name, path, dtype=dtype, **given)
    wanted = library_alone(name, path, config, dtype)
    assert_modules_equal(got, wanted, name)
    kinds = {key: getattr(each, "quant_type", None) for key, each in wanted.named_parameters()}
    assert {key: getattr(each, "quant_type", None) for key, each in got.named_parameters()} == kinds
    blocks = {key for key, kind in kinds.items() if kind is not None}
    assert len(blocks) > 5
    # Only what it keeps in float32 hinders a cast before.
    assert not in_no_segment(got.state_dict()).keys() & blocks
    assert getattr(diffusers, name)._keep_in_fp32_modules or not in_no_segment(got.state_dict())
    resident = decoded()
    assert_modules_equal(shmload.load_model(name, path, dtype=dtype, **given), wanted, name)
    assert [each.name for each in decoded()] == [each.name for each in resident]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("FluxTransformer2DModel", None), ("WanTransformer3DModel", torch.bfloat16)],
)
def test_without_configuration_it_is_an_ordinary_model(written, name, dtype, evicts):
    path, config = written(name)
    got = shmload.load_model(name, path, config=config, dtype=dtype, keep=True)
    tensors = {each.name: _as_float32(each, path) for each in gguf.GGUFReader(path).tensors}
    given = {} if dtype is None else {"torch_dtype": dtype}
    wanted = getattr(diffusers, name).from_single_file(tensors, config=config, **given)
    assert_modules_equal(got, wanted, name)
    assert in_no_segment(got.state_dict()) == {}
    with pytest.raises(shmload.ArgumentError, match="one model and no pipeline; load it by load_m"):
        shmload.load_pipeline(path, config=config)


def _as_float32(tensor, path):
    shape = tuple(map(int, reversed(tensor.shape)))
    if tensor.tensor_type.name in ("F32", "F16"):
        return torch.from_numpy(tensor.data.copy()).view(shape)
    return dequantised(tensor.tensor_type.name, tensor.data, torch.float32).view(shape)
