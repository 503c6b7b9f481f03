"""What torchao, quanto and bitsandbytes make is made once, and is the library's own result.

The packages are not among those that the tests install: each slows the import of diffusers. A test
is skipped where its package is missing. CONTRIBUTING.md says how to run them.
"""

import sys

import diffusers
import pytest
import torch
import transformers
from diffusers.quantizers.base import DiffusersQuantizer
from mappings import Mappings, copied_nbytes_of
from quantised_parts import assert_same_parts, parts_of_model
from transformers.quantizers import HfQuantizer

import shmload

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.filterwarnings("ignore"),  # of the packages themselves
]

_DTYPE = torch.bfloat16
_FLUX = diffusers.FluxTransformer2DModel, "transformer"
_T5 = transformers.T5EncoderModel, "text_encoder_2"


def _torchao(library, name, **given):
    quantization = pytest.importorskip("torchao.quantization")
    return library.TorchAoConfig(getattr(quantization, name)(version=2, **given))


def _int4(library):
    granularity = pytest.importorskip("torchao.quantization.granularity")
    given = {"weight_dtype": torch.int4, "granularity": granularity.PerGroup(16)}
    return _torchao(library, "IntxWeightOnlyConfig", **given)


def _quanto(library, dtype):
    pytest.importorskip("optimum.quanto")
    argument = "weights_dtype" if library is diffusers else "weights"
    return library.QuantoConfig(**{argument: dtype})


def _bitsandbytes(library, **given):
    pytest.importorskip("bitsandbytes")
    if library is diffusers:
        pytest.skip("diffusers quantises by bitsandbytes on a GPU alone")
    return library.BitsAndBytesConfig(**given)


_KINDS = {
    "torchao-int8": lambda library: _torchao(library, "Int8WeightOnlyConfig"),
    "torchao-float8": lambda library: _torchao(library, "Float8WeightOnlyConfig"),
    "torchao-dynamic": lambda library: _torchao(library, "Int8DynamicActivationInt8WeightConfig"),
    "torchao-int4": _int4,
    "quanto-int8": lambda library: _quanto(library, "int8"),
    "quanto-float8": lambda library: _quanto(library, "float8"),
    "quanto-int4": lambda library: _quanto(library, "int4"),
    "bitsandbytes-int8": lambda library: _bitsandbytes(library, load_in_8bit=True),
    "bitsandbytes-fp4": lambda library: _bitsandbytes(library, load_in_4bit=True),
    "bitsandbytes-nested-nf4": lambda library: _bitsandbytes(
        library,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_DTYPE,
    ),
}


@pytest.fixture
def runs(monkeypatch):
    """The quantisers that have run."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # setuptools, which quanto imports, changes it
    found = []
    for base in (DiffusersQuantizer, HfQuantizer):
        preprocess = base.preprocess_model

        def note(quantiser, *args, _preprocess=preprocess, **kwargs):
            found.append(type(quantiser).__name__)
            return _preprocess(quantiser, *args, **kwargs)

        monkeypatch.setattr(base, "preprocess_model", note)
    return found


def private_share(model):
    """Return which share of a model's bytes this process alone has.

    bitsandbytes makes a table of 1 KiB anew for each weight whose scales are quantised.
    """
    tensors = [
        each
        for name, each in parts_of_model(model)
        if isinstance(each, torch.Tensor) and not name.endswith("nested_quant_map")
    ]
    mappings = Mappings()
    inside = [each for each in tensors if "/shmload-" in mappings.find(each)[1]]
    whole, shared = (sum(each.nbytes for each in some) for some in (tensors, inside))
    return (whole - shared + copied_nbytes_of(inside)) / whole


@pytest.mark.parametrize("which", [_FLUX, _T5], ids=["diffusers", "transformers"])
@pytest.mark.parametrize("kind", _KINDS)
def test_model_is_quantised_once(saved, runs, kind, which):
    cls, subfolder = which
    library = diffusers if cls.__module__.startswith("diffusers") else transformers
    given = {"subfolder": subfolder, "dtype": _DTYPE}
    source, configure = saved("flux", "bfloat16"), _KINDS[kind]
    wanted = cls.from_pretrained(source, quantization_config=configure(library), **given)
    runs.clear()
    for _ in range(2):
        config = configure(library)
        got = shmload.load_model(cls, source, quantization_config=config, keep=True, **given)
        assert_same_parts(parts_of_model(got), parts_of_model(wanted))
        assert private_share(got) <= 0.02
        assert len(runs) == 1
    if cls is transformers.T5EncoderModel:
        with torch.no_grad():
            tokens = torch.arange(8)[None]
            assert torch.equal(got(tokens)[0], wanted(tokens)[0])


# What diffusers makes with bitsandbytes needs a GPU, and transformers saves nothing of quanto's.
_SAVED = [
    *((kind, _FLUX) for kind in ("torchao-int8", "torchao-float8", "quanto-int8", "quanto-float8")),
    *((kind, _T5) for kind in ("torchao-int8", "bitsandbytes-int8", "bitsandbytes-nested-nf4")),
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("kind", "which"), _SAVED)
def test_saved_model_is_that_of_the_library_and_is_shared(saved, tmp_path, kind, which):
    cls, subfolder = which
    config = _KINDS[kind](diffusers if which is _FLUX else transformers)
    source = saved("flux", "bfloat16") / subfolder
    model = cls.from_pretrained(source, quantization_config=config, dtype=_DTYPE)
    model.save_pretrained(tmp_path)
    wanted = cls.from_pretrained(tmp_path, dtype=_DTYPE)
    for _ in range(2):
        got = shmload.load_model(cls, tmp_path, keep=True, dtype=_DTYPE)
        assert_same_parts(parts_of_model(got), parts_of_model(wanted))
        assert private_share(got) <= 0.02
    assert {info.conversion for info in shmload.segments() if not info.kept} == {"raw"}
    assert shmload.plan(tmp_path, dtype=_DTYPE).left_out == ()
