"""What an error offers in place of an argument, the same call accepts."""

import re
import shutil

import pytest

import shmload

pytestmark = pytest.mark.usefixtures("evicts")

# "(there: a, b)", "it has a, b", "files of weights: a, b; choose", "did you mean 'a'?"
_LISTS = re.compile(r"(?:there: |it has (?!no |several )|files of weights: |there are )([^;)\n]+)")
_MEANT = re.compile(r"did you mean (.+?)\?(?: |;|$)")
_COMMITS = ("1928f47" + "0" * 33, "1928f47" + "1" * 33)


def remedies(error):
    """Return the values that an error offers."""
    text = str(error)
    listed = [each for part in _LISTS.findall(text) for each in part.split(", ")]
    return [*dict.fromkeys(each.strip("'") for each in (*listed, *_MEANT.findall(text)))]


@pytest.fixture
def cached(saved, hub_cache, monkeypatch):
    """The arguments of a model in the hub cache: two commits, a branch and a pull request."""
    source = saved("stable-diffusion") / "vae"
    for commit in _COMMITS:
        hub_cache.add("me/vae", source, commit)
    refs = hub_cache.root / "models--me--vae" / "refs"
    (refs / "refs/pr").mkdir(parents=True)
    (refs / "refs/pr/7").write_text(_COMMITS[0])
    (refs / "gone").write_text("2" * 40)
    return {"source": "me/vae", "cache_dir": hub_cache.root, "local_files_only": True}


@pytest.mark.parametrize("revision", ["1928f47", "mian", "refs/pr/8", "gone"])
def test_revisions(cached, revision):
    with pytest.raises(shmload.SourceNotFound) as caught:
        shmload.warm(**cached, revision=revision)
    offered = remedies(caught.value)
    assert {"main", "refs/pr/7", *_COMMITS} <= {*offered}
    assert "gone" not in offered
    for each in offered:
        assert shmload.warm(**cached, revision=each).segments


def _adapters(folder, saved):
    model = saved("stable-diffusion") / "vae/diffusion_pytorch_model.safetensors"
    for name in ("one", "two"):
        shutil.copy(model, folder / f"{name}.safetensors")
    return folder


CASES = [
    # a function that makes the source, the argument, a wrong value
    (lambda folder, saved: saved("stable-diffusion"), "subfolder", "uent"),
    (lambda folder, saved: saved("stable-diffusion"), "components", ["vea"]),
    (lambda folder, saved: saved("stable-diffusion"), "dtype", "bflot16"),
    (_adapters, "weight_name", None),
    (_adapters, "weight_name", "tow.safetensors"),
    (lambda folder, saved: saved("stable-diffusion"), "source", "stable-difusion"),
]


@pytest.mark.parametrize(("make", "argument", "wrong"), CASES)
def test_other_arguments(saved, tmp_path, make, argument, wrong):
    source = make(tmp_path, saved)
    given = {"source": source, argument: wrong}
    if argument == "source":  # beside no other folder with such a name
        source = shutil.copytree(source, tmp_path / "stable-diffusion")
        given["source"] = source.with_name(wrong)
    with pytest.raises(shmload.ShmloadError) as caught:
        shmload.warm(**given)
    offered = remedies(caught.value)
    assert offered, caught.value
    for each in offered:
        value = [each] if argument == "components" else each
        assert shmload.warm(**{**given, argument: value}) is not None
