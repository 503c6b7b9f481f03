"""A tensor that is joined with nothing stays where it is."""

import torch

from shmload.integrations._building.joins import JoinsOfOne


def test_one_contiguous_tensor_is_not_copied():
    whole = torch.arange(24, dtype=torch.uint8).view(6, 4)
    with JoinsOfOne():
        first, second = (torch.cat([part]) for part in whole.chunk(2))
        across = torch.cat([whole], dim=1)
    assert first.data_ptr() == across.data_ptr() == whole.data_ptr()
    assert second.data_ptr() == whole.data_ptr() + 12
    assert torch.equal(second, whole[3:])


def test_others_are_joined_as_ever():
    whole = torch.arange(24, dtype=torch.uint8).view(6, 4)
    with JoinsOfOne():
        joined = torch.cat([whole[3:], whole[:3]])
        columns = torch.cat([whole[:, :2]])
        stacked = torch.stack([whole])
    assert torch.equal(joined, torch.cat((whole[3:], whole[:3])))
    assert columns.is_contiguous()
    assert columns.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert stacked.data_ptr() != whole.data_ptr()
