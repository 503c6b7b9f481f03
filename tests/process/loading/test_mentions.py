"""Messages and objects have the user's paths, never paths of a view."""

import pytest
from comparing import assert_loads_equal

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("spelling", ["{}/", "{}", "./{}"])
def test_source_is_named_as_the_library_would(saved, monkeypatch, spelling):
    source = saved("wan")
    monkeypatch.chdir(source.parent)
    assert_loads_equal(spelling.format(source.name), "bf16")
