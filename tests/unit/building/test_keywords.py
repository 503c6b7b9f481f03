"""A slip in one of shmload's own keywords is refused; what the libraries take never is."""

import inspect

import diffusers
import pytest

import shmload
from shmload._building.options import require_no_slip

pytestmark = pytest.mark.libraries


def test_no_component_and_no_keyword_of_the_library_is_taken_for_a_slip():
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")]
    taken = {
        name
        for each in classes
        if isinstance(each, type) and issubclass(each, diffusers.DiffusionPipeline)
        for name in inspect.signature(each.__init__).parameters
    }
    assert len(taken) > 50
    theirs = {"device", "disable_mmap", "proxies", "mirror", "low_cpu_mem_usage", "subfolder"}
    require_no_slip(taken | theirs, shmload.load_pipeline)
    require_no_slip(taken | theirs, shmload.load_model)
