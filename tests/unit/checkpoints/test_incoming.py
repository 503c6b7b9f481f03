"""What is shown of a download: weights that are there, and that the load is certain to read."""

import json
from pathlib import Path

import pytest

from shmload._checkpoints.incoming import Incoming, parts_there
from shmload._checkpoints.wanted import Hub, Wanted

_INDEX = "model_index.json"
_UNET = "unet/diffusion_pytorch_model"


class Download:
    """A repository of a pipeline with a UNet and a text encoder; `bring` completes files."""

    def __init__(self, root: Path, *names: str) -> None:
        self._root = root / "models--org--name"
        self.snapshot = self._root / "snapshots" / ("a" * 40)
        self._blobs = self._root / "blobs"
        self._blobs.mkdir(parents=True)
        self.names = frozenset({_INDEX, "unet/config.json", *names})

    def incoming(self, *, is_pipeline=True, passed=(), use_safetensors=None, **wanted):
        return Incoming(
            wanted=Wanted(source="org/name", **wanted),
            names=self.names,
            snapshot=self.snapshot,
            is_pipeline=is_pipeline,
            passed=frozenset(passed),
            use_safetensors=use_safetensors,
            before=parts_there(self.snapshot, self.names),
        )

    def bring(self, *names, content=None):
        for name in names:
            blob = self._blobs / name.replace("/", "-")
            blob.write_text(json.dumps(_CONTENTS.get(name, {}) if content is None else content))
            link = self.snapshot / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)

    def write(self, nbytes):
        """Write some bytes of a file that is not complete."""
        (self._blobs / "b.1234.incomplete").write_bytes(bytes(nbytes))


_CONTENTS = {
    _INDEX: {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
    },
    "unet/config.json": {"_class_name": "UNet2DConditionModel"},
    f"{_UNET}.safetensors.index.json": {
        "weight_map": {
            str(n): f"diffusion_pytorch_model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
        }
    },
}
_SHARDS = [f"{_UNET}-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def shown(incoming):
    """Return the names of the shards that are shown."""
    source = incoming.source()
    return [
        str(shard.relative_to(incoming.snapshot))
        for checkpoint in (source.checkpoints if source else ())
        for shard in checkpoint.shards
    ]


def test_model_is_shown_with_its_configuration(tmp_path):
    one = f"{_UNET}.safetensors"
    download = Download(tmp_path, one)
    incoming = download.incoming()
    download.bring(one)
    assert shown(incoming) == []
    download.bring(_INDEX)
    assert shown(incoming) == []
    download.bring("unet/config.json")
    assert shown(incoming) == [one]
    checkpoint = incoming.source().checkpoints[0]
    assert (checkpoint.component, checkpoint.class_name) == ("unet", "UNet2DConditionModel")
    assert shown(download.incoming(passed=["unet"])) == []
    assert shown(download.incoming(components=["text_encoder"])) == []
    model = download.incoming(is_pipeline=False, hub=Hub(subfolder="unet"))
    assert shown(model) == [one]


def test_shards_are_shown_one_by_one(tmp_path):
    index = f"{_UNET}.safetensors.index.json"
    download = Download(tmp_path, index, *_SHARDS)
    incoming = download.incoming()
    download.bring(_INDEX, "unet/config.json", _SHARDS[1])
    assert shown(incoming) == []
    download.bring(index)
    assert shown(incoming) == [_SHARDS[1]]
    assert shown(download.incoming(dtype="auto")) == []
    download.bring(_SHARDS[0], _SHARDS[2])
    assert shown(incoming) == shown(download.incoming(dtype={"unet": "auto"})) == _SHARDS


def test_shards_of_quantised_weights_are_shown_together(tmp_path):
    index = f"{_UNET}.safetensors.index.json"
    download = Download(tmp_path, index, *_SHARDS)
    files = [Path(name).name for name in _SHARDS]
    weights = {"a.weight": files[0], "a.weight_scale": files[1], "b.weight": files[2]}
    download.bring(index, content={"weight_map": weights})
    download.bring(_INDEX, "unet/config.json", _SHARDS[0])
    assert shown(download.incoming()) == []
    download.bring(*_SHARDS[1:])
    assert shown(download.incoming()) == _SHARDS


@pytest.mark.parametrize(
    ("there", "rival", "wanted"),
    [
        # The repository has what the load prefers; the download may bring it or not.
        (f"{_UNET}.bin", f"{_UNET}.safetensors", {}),
        (f"{_UNET}.safetensors", f"{_UNET}.safetensors.index.json", {}),
        (f"{_UNET}.safetensors", f"{_UNET}.fp16.safetensors", {"variant": "fp16"}),
        (f"{_UNET}.fp16.safetensors", f"{_UNET}.safetensors", {}),
        # Plain files of this folder are loaded only if another folder has the variant.
        (f"{_UNET}.safetensors", "text_encoder/model.fp16.safetensors", {"variant": "fp16"}),
    ],
)
def test_file_that_another_may_take_the_place_of_is_not_shown(tmp_path, there, rival, wanted):
    download = Download(tmp_path, there, rival)
    download.bring(_INDEX, "unet/config.json", there)
    assert shown(download.incoming(**wanted)) == []


def test_copy_is_not_shown(tmp_path):
    one = f"{_UNET}.safetensors"
    download = Download(tmp_path, one)
    download.bring(_INDEX, "unet/config.json")
    (download.snapshot / one).write_bytes(b"")
    assert shown(download.incoming()) == []


def test_download_has_begun_when_it_brings_more_than_the_index(tmp_path):
    download = Download(tmp_path, f"{_UNET}.safetensors")
    download.bring("unet/config.json")
    incoming = download.incoming()
    download.bring(_INDEX)
    download.write(1000)
    assert not incoming.has_begun(incoming.there())
    assert download.incoming(is_pipeline=False).has_begun(incoming.there())
    download.write(2 << 20)
    assert incoming.has_begun(incoming.there())
