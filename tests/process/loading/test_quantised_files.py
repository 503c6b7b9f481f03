"""Models that torchao, bitsandbytes and quanto have quantised and saved come from shared memory.

The packages are not among those that the tests install: each slows the import of diffusers. A test
is skipped where its package is missing. CONTRIBUTING.md says how to run them.
"""

import gc
import sys
import warnings

import diffusers
import pytest
import torch
import transformers
from mappings import Mappings
from quantised_parts import assert_same_parts, parts_of_model

import shmload

pytestmark = [
    pytest.mark.libraries,
    # Of the packages themselves, as they are imported and used.
    pytest.mark.filterwarnings("ignore"),
]

_DTYPE = {"dtype": torch.bfloat16}
_FLUX = (diffusers.FluxTransformer2DModel, "transformer")
_T5 = (transformers.T5EncoderModel, "text_encoder_2")


def _torchao(library, kind):
    quantization = pytest.importorskip("torchao.quantization")
    return library.TorchAoConfig(getattr(quantization, f"{kind}WeightOnlyConfig")(version=2))


def _bitsandbytes(**given):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **given)


def _quanto(dtype):
    pytest.importorskip("optimum.quanto")
    return diffusers.QuantoConfig(weights_dtype=dtype)


# What diffusers makes with bitsandbytes needs a GPU, and transformers saves nothing of quanto's.
_KINDS = {
    "torchao-int8": (_FLUX, lambda: _torchao(diffusers, "Int8")),
    "torchao-float8": (_FLUX, lambda: _torchao(diffusers, "Float8")),
    "torchao-int8-of-transformers": (_T5, lambda: _torchao(transformers, "Int8")),
    "bitsandbytes-nf4": (_T5, lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes-int8": (_T5, lambda: _bitsandbytes(load_in_8bit=True)),
    "quanto-int8": (_FLUX, lambda: _quanto("int8")),
    "quanto-float8": (_FLUX, lambda: _quanto("float8")),
}


@pytest.fixture(params=list(_KINDS))
def quantised(request, saved, tmp_path, monkeypatch):
    """A class, and the directory of a model of it that was quantised and saved."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # setuptools, which quanto imports, changes it
    (cls, subfolder), configure = _KINDS[request.param]
    with warnings.catch_warnings(action="ignore"):
        config = configure()
        model = cls.from_pretrained(
            saved("flux", "bfloat16") / subfolder, quantization_config=config, **_DTYPE
        )
    model.save_pretrained(tmp_path / request.param)
    return cls, tmp_path / request.param


def test_model_is_that_of_the_library_and_is_shared(quantised, evicts):
    cls, folder = quantised
    wanted = cls.from_pretrained(folder, **_DTYPE)
    for _ in range(2):
        got = shmload.load_model(cls, folder, keep=True, **_DTYPE)
        found = parts_of_model(got)
        assert_same_parts(found, parts_of_model(wanted))
        assert [(type(p), p.dtype) for p in got.parameters()] == [
            (type(p), p.dtype) for p in wanted.parameters()
        ]
        mappings = Mappings()
        private = {
            name
            for name, part in found
            if isinstance(part, torch.Tensor)
            and part.numel() > 1
            and "/shmload-" not in mappings.find(part)[1]
        }
        # bitsandbytes computes these from the file's.
        assert {name.rpartition(".")[2] for name in private} <= {"code", "nested_code"}
        (info,) = shmload.segments()
        assert (info.conversion, info.is_leased) == ("raw", True)
        del got, found
        gc.collect()
    assert shmload.plan(folder, **_DTYPE).left_out == ()
