"""Weights in GGUF files: their blocks as they are, or as floats; every command knows them."""

from importlib.metadata import PackageNotFoundError

import pytest
import torch
from gguf_files import content, dequantised, random_blocks, save_blocks
from warming import assert_same

import shmload
from shmload._checkpoints.formats import described
from shmload._segments import pieces

_KINDS = [
    "NVFP4",
    "IQ4_XS",
    "Q4_0",
    "Q5_0",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
]
_SHAPE = (6, 512)


@pytest.fixture(scope="module")
def blocks():
    return {kind: random_blocks(kind, _SHAPE, seed) for seed, kind in enumerate(_KINDS)}


@pytest.fixture(scope="module")
def plain():
    generator = torch.Generator().manual_seed(0)
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return {name: torch.randn(3, 33, generator=generator).to(each) for name, each in dtypes.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory, blocks, plain):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = {f"{kind}.weight": (kind, _SHAPE, raw) for kind, raw in blocks.items()}
    for name, each in plain.items():
        tensors[name] = (name, tuple(each.shape), each.view(torch.uint8).numpy())
    save_blocks(tensors, path)
    return path


@pytest.fixture
def wanted(blocks, plain):
    def want(dtype):
        found = {f"{kind}.weight": dequantised(kind, raw, dtype) for kind, raw in blocks.items()}
        return found | {name: each.to(dtype) for name, each in plain.items()}

    return want


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 2 KiB, so that there are many; no block lies in two of them."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2048)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e5m2"])
def test_floats_are_those_of_the_package(path, wanted, dtype, evicts):
    got = shmload.load_state_dict(path, dtype, keep=True)
    assert_same(got, wanted(getattr(torch, dtype)))
    resident = shmload.segments()
    assert_same(shmload.load_state_dict(path, dtype, keep=True), got)
    assert [each.name for each in shmload.segments()] == [each.name for each in resident]


@pytest.mark.usefixtures("small_pieces")
def test_without_dtype_blocks_are_bytes(path, blocks, plain, evicts):
    got = shmload.load_state_dict(path)
    raw = {f"{kind}.weight": torch.from_numpy(each) for kind, each in blocks.items()}
    assert_same(got, raw | plain)


def test_without_the_package_it_is_named(path, monkeypatch, evicts):
    def lack(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(described, "version", lack)
    for dtype in (None, "bfloat16"):
        with pytest.raises(shmload.LibraryError, match=r"pip install shmload\[gguf\]"):
            shmload.load_state_dict(path, dtype)
    assert shmload.segments() == []


def test_damaged_file(tmp_path, evicts):
    path = tmp_path / "model.gguf"
    whole = content({"a": ("Q4_0", (2, 64), bytes(72))})
    path.write_bytes(whole[:-60])
    with pytest.raises(shmload.ShardMalformed, match=r"model\.gguf is not a valid GGUF file"):
        shmload.load_state_dict(path)
    path.write_bytes(whole.replace(b"GGUF\x03", b"GGUF\x09"))
    with pytest.raises(shmload.ShardMalformed, match=r"valid GGUF file: .*version 9"):
        shmload.load_state_dict(path)
    assert shmload.segments() == []
