"""The examples on the page for servers run as printed, and what it says of updates holds."""

import re

import pytest
from pages import blocks

_SOURCE = "path/to/stable-diffusion"
_LORA = "path/to/lora.safetensors"
_ASK = """
async def ask():
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "http", "query_string": b"prompt=a+lighthouse"}, None, send)
    print(sent[0]["status"], sent[1]["body"][1:4])

asyncio.run(ask())
"""
_COMPARE = """
options = {"num_inference_steps": 2, "output_type": "pt"}
plain, ink, again = (
    make("x", style, generator=torch.manual_seed(0), **options) for style in (None, "ink", None)
)
print(plain.equal(again), plain.equal(ink))
"""
# What each example needs to be tried, and its output, in the order of the page.
_TRIALS = {
    "workers": (_ASK, r"200 b'PNG'\n"),
    "img2img": ("", r"torch.bfloat16 \(\d+, \d+\)\n"),
    "lora": (f"import torch\n{_COMPARE}", r"True False\n"),
}


def examples():
    return [each for each in blocks("servers.md") if _SOURCE in each]


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A LoRA for the tiny UNet, with weights that are not zero."""
    from adapters import save_lora
    from pipelines import build

    path = tmp_path_factory.mktemp("lora") / "lora.safetensors"
    return save_lora(build("stable-diffusion").unet, path)


def test_each_example_is_run_below():
    assert len(examples()) == len(_TRIALS)


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.parametrize("place", range(len(_TRIALS)), ids=_TRIALS)
def test_example_runs(saved, lora, tmp_path, warm_python, evicts, place):
    more, printed = list(_TRIALS.values())[place]
    text = examples()[place].replace(_SOURCE, str(saved("stable-diffusion")))
    path = tmp_path / "example.py"
    path.write_text(text.replace(_LORA, str(lora)) + more)
    ended = warm_python.run(path)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(printed, ended.stdout)
