"""Whether each change of a file is noticed, however the file is reached and whatever hides it."""

import os

import pytest

from shmload._host.files import files_below, fingerprint

_OLD = b'{"layers": 1}'


@pytest.fixture(params=["file link", "link of a link", "hub cache"])
def file(request, tmp_path):
    """Make `pipeline/unet/config.json` in one form; return the file that has its bytes."""
    pipeline, elsewhere = tmp_path / "pipeline", tmp_path / "elsewhere"
    pipeline.mkdir()
    elsewhere.mkdir()
    unet, real = pipeline / "unet", elsewhere / "config.json"
    match request.param:
        case "file link":
            unet.mkdir()
            (unet / "config.json").symlink_to(real)
        case "link of a link":
            (tmp_path / "other").symlink_to(elsewhere)
            unet.symlink_to(tmp_path / "other")
        case "hub cache":
            unet.mkdir()
            real = elsewhere / "blobs" / ("1" * 40)
            real.parent.mkdir()
            (unet / "config.json").symlink_to("../../elsewhere/blobs/" + "1" * 40)
    real.write_bytes(_OLD)
    return real


def write(path, content):
    path.write_bytes(content)


def replace(path, content):
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)


@pytest.mark.parametrize("change", [write, replace])
@pytest.mark.parametrize("content", [b'{"layers": 2}', b'{"layers": 10}'])
def test_change_under_the_old_time_is_noticed(file, tmp_path, change, content):
    before, found = files_below(tmp_path / "pipeline"), file.stat()
    assert list(before) == [str(tmp_path / "pipeline" / "unet" / "config.json")]
    assert files_below(tmp_path / "pipeline") == before
    change(file, content)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))  # as `cp -p` and `rsync -a` do
    assert files_below(tmp_path / "pipeline") != before


def test_removed_file_is_noticed(file, tmp_path):
    before = files_below(tmp_path / "pipeline")
    file.unlink()
    assert files_below(tmp_path / "pipeline") != before
    assert fingerprint(file) is None


def test_link_that_leads_to_another_folder_is_noticed(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(_OLD)
    pipeline = tmp_path / "pipeline"
    pipeline.mkdir()
    for name in ("unet", "vae"):  # one folder under two names
        (pipeline / name).symlink_to(tmp_path / "first")
    for name in ("unet", "vae"):
        before = files_below(pipeline)
        (pipeline / name).unlink()
        (pipeline / name).symlink_to(tmp_path / "second")
        assert files_below(pipeline) != before, name


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "self").symlink_to("self")
    found = files_below(tmp_path)
    assert found[str(tmp_path / "self")] is None
    assert str(tmp_path / "a" / "file") in found
