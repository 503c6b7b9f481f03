"""How scripts/encode_dataset.py finds, opens and crops pictures; without processes or weights."""

import os
from types import SimpleNamespace

import click
import encode_dataset
import numpy as np
import pytest
import torch
from encode_dataset import Picture
from PIL import Image


class Pipe:
    """Stands in for a pipeline without text encoders: it encodes a picture as its pixels."""

    device = torch.device("cpu")
    dtype = torch.float32
    multiple = 1
    """The sides of a picture are rounded down to a multiple of it."""

    def __init__(self):
        self.image_processor = self.vae = self

    def preprocess(self, image):
        sides = [side - side % self.multiple for side in image.size]
        pixels = np.array(image.resize(sides), np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1)[None]

    def encode(self, pixels):
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: pixels))


def encoded(path, size=8, pipe=None):
    """Return the pixels, with shape (height, width, 3), that a pipeline gets for a picture."""
    arrays = encode_dataset.encode(pipe or Pipe(), Picture(str(path), size, None))
    return arrays["latents"].permute(1, 2, 0).numpy()


def test_picture_is_turned_as_its_camera_says(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # the upper half
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # turn it by 90 degrees clockwise to show it
    image.save(tmp_path / "a.png", exif=exif)
    found = encoded(tmp_path / "a.png")
    assert found[:, 4:].min() == 255
    assert found[:, :4].max() == 0


def test_grey_of_16_bits_keeps_its_shades(tmp_path):
    Image.fromarray(np.repeat(np.array([[0, 0x8080, 0xFFFF]], np.uint16), 3, 0)).save(
        tmp_path / "a.png"
    )
    found = encoded(tmp_path / "a.png", 3)
    assert found[0, :, 0].tolist() == [0, 128, 255]
    assert found.shape == (3, 3, 3)


def test_size_that_the_pipeline_would_round_is_an_error(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    pipe = Pipe()
    pipe.multiple = 8
    with pytest.raises(ValueError, match="takes 16 pixels, not 20; give --size 16"):
        encoded(tmp_path / "a.png", 20, pipe)
    assert encoded(tmp_path / "a.png", 24, pipe).shape == (24, 24, 3)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_an_error_at_once(tmp_path, make):
    """Nothing writes to the FIFO: opening it would wait for ever."""
    make(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png is no regular file"):
        encoded(tmp_path / "a.png")
    make(tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"b\.txt is no regular file"):
        encode_dataset.caption_of(Picture(str(tmp_path / "b.png"), 8, None))
    with pytest.raises(FileNotFoundError):
        encoded(tmp_path / "none.png")


def test_files_and_folders_that_are_skipped_are_said(tmp_path):
    (tmp_path / "b.png").mkdir()
    for name in ("a.JPG", "a.txt", "b.png/c.webp", "d.gif", "e.tiff", "f.gif", "README"):
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "b.png")
    found = encode_dataset.find_pictures(tmp_path)
    assert found.names == ["a.JPG", "b.png/c.webp"]
    assert found.without_text == ["b.png/c.webp"]
    assert found.skipped == "4 files (.gif, .tiff, no suffix), 1 folder behind a symbolic link"


def test_nothing_is_said_if_nothing_is_skipped(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").touch()
    assert encode_dataset.find_pictures(tmp_path) == (["a.png"], [], "")


def test_pictures_are_in_the_order_of_their_paths(tmp_path):
    for name in ("a-1.png", "a/2.png", "a/1.png", "b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert encode_dataset.find_pictures(tmp_path)[0] == ["a/1.png", "a/2.png", "a-1.png", "b.png"]


def test_name_that_is_not_utf8_is_an_error_before_anything_is_loaded(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.png")).touch()
    with pytest.raises(click.UsageError, match=r"b'caf\\xe9.png'.*not UTF-8; rename it"):
        encode_dataset.find_pictures(tmp_path)


def test_folder_without_pictures_says_what_it_has(tmp_path):
    (tmp_path / "a.gif").touch()
    with pytest.raises(
        click.UsageError, match=r"no picture in .*\.bmp, .*skipped: 1 file \(.gif\)"
    ):
        encode_dataset.find_pictures(tmp_path)


def test_captions_are_encoded_without_a_vae(tmp_path):
    class TextPipe(Pipe):
        def __init__(self):
            self.vae, self.text_encoder = None, self

        def encode_prompt(self, prompt, device):
            return torch.tensor([[len(prompt)]]), None

    found = encode_dataset.encode(TextPipe(), Picture(str(tmp_path / "none.png"), 8, "four"))
    assert {name: array.tolist() for name, array in found.items()} == {"text.0": [4]}


def test_captions_go_to_every_prompt_that_the_pipeline_asks_for(tmp_path):
    class ThreePipe(Pipe):
        def __init__(self):
            self.vae, self.text_encoder = None, self

        def encode_prompt(self, prompt, prompt_2, prompt_3, device):  # as of Stable Diffusion 3
            return (torch.tensor([[len(prompt + prompt_2 + prompt_3)]]),)

    found = encode_dataset.encode(ThreePipe(), Picture(str(tmp_path / "none.png"), 8, "four"))
    assert found["text.0"].tolist() == [12]


def test_picture_that_was_removed_before_it_was_encoded_fails_without_a_vae_too(tmp_path):
    gone = Picture(str(tmp_path / "none.png"), 8, "", is_gone=True)
    with pytest.raises(FileNotFoundError, match=r"none\.png was removed before it was encoded"):
        encode_dataset.encode(Pipe(), gone)
