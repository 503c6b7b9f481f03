"""Make a GGUF file of Flux's transformer, for the benchmarks.

    python gguf_checkpoints.py whole|large|small DIRECTORY

The directory gets `model.gguf` and the folder `config`. The whole one has Flux's 12 billion
parameters by their original names. The large one has two double and four single blocks of it: 1.3
billion parameters. Matrices are random blocks of Q4_K, as in the files that people share, and the
rest is in float32 and float16.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WHOLE, _LARGE = (19, 38), (2, 4)
_WIDTH, _HEAD, _TEXT, _POOLED, _TIME, _CHANNELS = 3072, 128, 4096, 768, 256, 64
_K_ELEMENTS = 256
_CLASS = "FluxTransformer2DModel"

Shape = tuple[int, ...]


def _original_shapes(doubles: int, singles: int) -> Iterator[tuple[str, Shape]]:
    for name, rows, columns in _layers(doubles, singles):
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)
    norms = [
        *(f"double_blocks.{n}.{each}_attn.norm" for n in range(doubles) for each in ("img", "txt")),
        *(f"single_blocks.{n}.norm" for n in range(singles)),
    ]
    for norm in norms:
        yield f"{norm}.query_norm.scale", (_HEAD,)
        yield f"{norm}.key_norm.scale", (_HEAD,)


def _layers(doubles: int, singles: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, outputs and inputs of each linear layer."""
    yield "img_in", _WIDTH, _CHANNELS
    yield "txt_in", _WIDTH, _TEXT
    for name, inputs in (("time_in", _TIME), ("vector_in", _POOLED)):
        yield f"{name}.in_layer", _WIDTH, inputs
        yield f"{name}.out_layer", _WIDTH, _WIDTH
    for number in range(doubles):
        for each in ("img", "txt"):
            block = f"double_blocks.{number}.{each}"
            yield f"{block}_mod.lin", 6 * _WIDTH, _WIDTH
            yield f"{block}_attn.qkv", 3 * _WIDTH, _WIDTH
            yield f"{block}_attn.proj", _WIDTH, _WIDTH
            yield f"{block}_mlp.0", 4 * _WIDTH, _WIDTH
            yield f"{block}_mlp.2", _WIDTH, 4 * _WIDTH
    for number in range(singles):
        yield f"single_blocks.{number}.linear1", 7 * _WIDTH, _WIDTH
        yield f"single_blocks.{number}.linear2", _WIDTH, 5 * _WIDTH
        yield f"single_blocks.{number}.modulation.lin", 3 * _WIDTH, _WIDTH
    yield "final_layer.linear", _CHANNELS, _WIDTH
    yield "final_layer.adaLN_modulation.1", 2 * _WIDTH, _WIDTH


def _make(directory: Path, config: dict[str, Any], shapes: Iterator[tuple[str, Shape]]) -> None:
    import gguf
    import numpy as np

    (directory / "config").mkdir(parents=True)
    written = json.dumps({"_class_name": _CLASS} | config)
    (directory / "config" / "config.json").write_text(written)
    writer = gguf.GGUFWriter(directory / "model.gguf", "flux", use_temp_file=False)
    generator = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_K
    for name, shape in shapes:
        if len(shape) > 1 and shape[-1] % _K_ELEMENTS == 0:
            blocks = np.prod(shape) // _K_ELEMENTS
            content = generator.integers(0, 256, (blocks, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            content[:, 1:4:2] &= 0x1F  # scales below 0.01
            writer.add_tensor(name, content.reshape(*shape[:-1], -1), raw_dtype=kind)
        else:
            dtype = np.float32 if len(shape) == 1 else np.float16
            writer.add_tensor(name, generator.normal(0, 0.02, shape).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _make_flux(directory: Path, blocks: tuple[int, int]) -> None:
    doubles, singles = blocks
    config = {"num_layers": doubles, "num_single_layers": singles, "guidance_embeds": False}
    _make(directory, config, _original_shapes(doubles, singles))


def _make_small(directory: Path) -> None:
    import diffusers

    config = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 64,
        "num_attention_heads": 4,
        "axes_dims_rope": [16, 24, 24],
        "guidance_embeds": False,
    }
    state = diffusers.FluxTransformer2DModel(**config).state_dict()
    _make(directory, config, ((name, tuple(tensor.shape)) for name, tensor in state.items()))


if __name__ == "__main__":
    size, target = sys.argv[1], Path(sys.argv[2])
    if size == "small":
        _make_small(target)
    else:
        _make_flux(target, {"whole": _WHOLE, "large": _LARGE}[size])
