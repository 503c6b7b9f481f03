"""A wrong remembered rule is detected: it costs time, and never a wrong bit."""

import pytest
import torch
from comparing import assert_equal, reference
from traces import Messages, mentions_of_view

import shmload
from shmload._building import rules
from shmload._checkpoints.rule import Rule

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize(
    ("order", "keep"), [("bytes_come_first", True), ("bytes_come_last", False)]
)
@pytest.mark.parametrize(
    "wrong",
    [
        Rule(target="BF16"),  # ignores the tensors that Wan keeps in float32
        Rule(target="F8_E4M3"),
        Rule(target="F32"),
        Rule(target="BF16", only=frozenset({"patch_embedding.weight", "shared.weight"})),
        Rule(),
    ],
    ids=lambda rule: rule.text.replace("/", "-"),
)
def test_remembered_rule_that_is_wrong_gives_a_right_pipeline(
    saved, configure, monkeypatch, tmp_path, evicts, request, wrong, order, keep
):
    request.getfixturevalue(order)
    source = f"{saved('wan')}/"
    configure(cache_dir=tmp_path)
    right = shmload.plan(source, torch_dtype=torch.bfloat16)
    configure(cache_dir=tmp_path / "wrong")
    with monkeypatch.context() as patch:
        patch.setattr(rules, "derive_rule", lambda *_: wrong)
        planned = shmload.plan(source, torch_dtype=torch.bfloat16)
        assert {shard.conversion for shard in planned.shards} <= {wrong.text, "raw"}
    with Messages() as said:
        got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=keep)
    with Messages() as wanted_said:
        wanted = reference(source, torch.bfloat16)
    assert_equal(got, wanted)
    own = [text for text in said.texts if text[0].startswith("shmload")]
    assert [text for text in said.texts if text not in own] == wanted_said.texts
    assert not mentions_of_view(got)
    if own:
        # A rule found wrong is not used again.
        again = shmload.plan(source, torch_dtype=torch.bfloat16)
        changed = [s for s in again.shards if s.conversion != wrong.text]
        assert set(changed) <= set(right.shards) or keep
        assert changed


def test_rule_that_narrows_what_the_model_keeps_is_found_out(
    saved, configure, monkeypatch, tmp_path, shm_names
):
    # Without torch_dtype diffusers' models are float32: a cast through a smaller dtype must be
    # detected.
    source = saved("flux")
    configure(cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "derive_rule", lambda *_: Rule(target="BF16"))
        shmload.plan(source)
    pipes, states = [], []
    for load in (shmload.load_pipeline, reference):
        torch.manual_seed(5)
        pipes.append(load(source))
        states.append(torch.get_rng_state())
    assert_equal(*pipes)
    assert torch.equal(*states)
    assert shm_names() == []  # the files themselves are mapped, not what was cast
