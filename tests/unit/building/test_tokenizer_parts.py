"""Tokenizers are restored from their parts, or not taken apart."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers_tiny import clip_tokenizer, qwen2_tokenizer

from shmload._building.tokenizer_parts import put_together, take_apart

WORDS = {"a": 0, "b": 1, "ab": 2, "</s>": 3}


def changed(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 3)])
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=7)
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<new>", single_word=True, lstrip=True), "<other>"])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: clip_tokenizer()._tokenizer,
        lambda: qwen2_tokenizer()._tokenizer,
        lambda: Tokenizer(BPE()),
        lambda: changed(Tokenizer(BPE(WORDS, [("a", "b")], unk_token="a", dropout=0.5))),
        lambda: changed(Tokenizer(BPE(WORDS, [], byte_fallback=True, fuse_unk=True))),
    ],
)
def test_restored_tokenizer_has_the_same_json(make):
    made = make()
    parts = take_apart(made)
    assert parts is not None
    assert put_together(*parts).to_str() == made.to_str()


@pytest.mark.parametrize(
    "model",
    [
        WordLevel(WORDS, "a"),
        BPE({"a": 0, "b": 2}, []),
        BPE({"a": 0, "b\0c": 1}, []),
    ],
    ids=["another model", "a number that no word has", "a word with the mark between words"],
)
def test_what_would_be_restored_otherwise_is_not_taken_apart(model):
    assert take_apart(Tokenizer(model)) is None
