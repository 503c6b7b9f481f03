"""What is made once has a name that any publication may have, and that says what it is made of."""

import pytest

from shmload._building.once import name_of
from shmload._segments.publications import Publication


@pytest.mark.parametrize(
    "file", ["_model.safetensors", "-.safetensors", "__", "a b?.ckpt", "é", "x" * 200]
)
def test_name_of_any_file_is_one_of_a_publication(tmp_path, file):
    path = tmp_path / file
    path.touch()
    name = name_of("quantised", path, {})
    assert Publication.parse(name) == Publication(name)


def test_other_facts_or_another_content_are_another_name(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    names = {name_of("quantised", path, {}), name_of("mixed", path, {})}
    names.add(name_of("quantised", path, {"given_as": "org/name"}))
    path.write_text("more")
    names.add(name_of("quantised", path, {}))
    assert len(names) == 4
    assert name_of("quantised", path, {}) in names


def test_object_that_may_mean_more_than_it_shows_has_no_name(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    assert name_of("quantised", path, {"given": object()}) is None
