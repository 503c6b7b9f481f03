"""A pipeline's resident segments are attached by the next load and leased while in use."""

import gc
import os
from pathlib import Path

import pytest
import torch
from comparing import assert_equal, reference
from mappings import Mappings, state_of

import shmload

pytestmark = pytest.mark.libraries


def test_verify_looks_at_what_was_resident(saved, shm_names, evicts):
    source = saved("flux")
    shmload.warm(source, torch_dtype=torch.bfloat16)
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16, verify=True)
    path = Path("/dev/shm", shm_names()[0])
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x5a")
    path.chmod(0o400)
    with pytest.raises(shmload.SegmentCorrupt, match=path.name):
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, verify=True)


@pytest.mark.parametrize("attached", [False, True])
def test_lease_lasts_as_long_as_the_pipeline(saved, shm_names, evicts, attached):
    source = saved("flux")
    if attached:
        shmload.warm(source, torch_dtype=torch.bfloat16)
        assert not any(info.is_leased for info in shmload.segments())
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert all(info.is_leased for info in shmload.segments())
    names = shm_names()
    with pytest.raises(shmload.SegmentBusy) as busy:
        shmload.evict(str(source))
    assert sorted(busy.value.names) == names == shm_names()
    assert "in this process" in str(busy.value)
    assert_equal(pipe, reference(source, torch.bfloat16))
    del pipe
    gc.collect()
    assert not any(info.is_leased for info in shmload.segments())
    assert len(shmload.evict(str(source))) == len(names)
    assert shm_names() == []


def test_first_load_of_all_keeps_only_the_segments_it_uses(
    saved, configure, tmp_path, shm_names, evicts, bytes_come_first
):
    # No rule is remembered, and the guessed rule is wrong for Wan.
    configure(cache_dir=tmp_path)
    source = saved("wan")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    used = {Path(name).name for _, name in map(Mappings().find, state_of(pipe).values())}
    assert set(shm_names()) == used
