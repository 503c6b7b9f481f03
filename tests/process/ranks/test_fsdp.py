"""Models sharded over ranks equal unsharded ones, and no rank holds a whole model."""

import signal

import diffusers
import pytest
from ranks import Ranks

import shmload

pytestmark = pytest.mark.libraries


@pytest.fixture(scope="module")
def ranks():
    started = Ranks("sharding")
    yield started
    started.end()


@pytest.fixture(scope="module")
def large_source(tmp_path_factory):
    """A pipeline with one model, of 64 MiB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(192, 384),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(folder)
    return str(folder)


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "component", "dtype", "world_size"),
    [
        ("stable-diffusion", "unet", "float32", 2),
        ("sdxl", "text_encoder", "bfloat16", 2),  # the pipeline uses its hidden states
        ("flux", "transformer", "bfloat16", 4),
        ("wan", "text_encoder", "float16", 2),  # keeps some tensors in float32
    ],
)
def test_sharded_model_is_the_ordinary_one(
    ranks, saved, tmp_path, evicts, family, component, dtype, world_size
):
    source = str(saved(family))
    parts = ranks.run(
        "equal", world_size, tmp_path, source=source, component=component, dtype=dtype
    )
    assert sum(parts) == pytest.approx(1)
    assert max(parts) < 1.3 / world_size  # uneven remainders are all on the first ranks


@pytest.mark.slow
def test_model_sharded_in_two_copies_is_the_ordinary_one(ranks, saved, tmp_path, evicts):
    source = str(saved("flux"))
    parts = ranks.run(
        "equal",
        4,
        tmp_path,
        source=source,
        component="text_encoder_2",
        dtype="bfloat16",
        is_hybrid=True,
    )
    assert sum(parts) == pytest.approx(2)


def test_sharded_model_with_tied_weights_trains_like_the_ordinary_one(
    ranks, saved, tmp_path, evicts
):
    ranks.run("train", 2, tmp_path, source=str(saved("wan")), component="text_encoder")


@pytest.mark.slow
def test_partitions_make_the_ordinary_model(ranks, saved, tmp_path, evicts):
    ranks.run("gather", 4, tmp_path, source=str(saved("wan")), component="transformer")


@pytest.mark.parametrize("job", ["place", "parallelize", "shard_columns"])
def test_parts_are_those_of_torch(ranks, tmp_path, job):
    ranks.run(job, 4, tmp_path)


# Memory and deaths --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "zero"])
def test_no_rank_holds_the_whole_model(ranks, large_source, tmp_path, evicts, how):
    shmload.warm(large_source, torch_dtype="bfloat16")
    ranks.run("take_little", 4, tmp_path, source=large_source, component="unet", how=how)


def test_others_take_over_from_a_rank_that_is_killed_while_it_decodes(
    ranks, saved, tmp_path, evicts, shm_names
):
    results = ranks.run(
        "lose_one", 4, tmp_path, source=str(saved("flux")), component="transformer", how="kill"
    )
    assert results == [signal.SIGKILL, "filled", "filled", "filled"]
    # Its view may be left for up to a minute.
    assert not [name for name in shm_names() if "view" not in name]


def test_others_fail_in_time_where_a_rank_stops_while_it_decodes(
    ranks, saved, tmp_path, evicts, shm_names
):
    results = ranks.run(
        "lose_one", 2, tmp_path, source=str(saved("flux")), component="transformer", how="stop"
    )
    assert results == [signal.SIGKILL, "failed"]
    removed = shmload.collect_garbage()  # and its view, if it had made one
    assert len([name for name in removed if "view" not in name]) == 1
    assert not [name for name in shm_names() if "view" not in name]
