"""Tokenizers are restored exactly: from their parts, or by their own pickle."""

import math
import pickle

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers_tiny import clip_tokenizer, qwen2_tokenizer, t5_tokenizer

from shmload._building.parts import put_tokenizer_together, take_tokenizer_apart

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


# As of a real T5: most of them are read inexactly of JSON.
SCORES = [("<unk>", 0.0), *((f"w{n}", -math.log(n + 2) * 1.37) for n in range(200))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: clip_tokenizer()._tokenizer,
        lambda: qwen2_tokenizer()._tokenizer,
        lambda: t5_tokenizer()._tokenizer,
        lambda: Tokenizer(BPE()),
        lambda: changed(Tokenizer(BPE(WORDS, [("a", "b")], unk_token="a", dropout=0.5))),
        lambda: changed(Tokenizer(BPE(WORDS, [], byte_fallback=True, fuse_unk=True))),
        lambda: Tokenizer(Unigram()),
        lambda: changed(Tokenizer(Unigram([*SCORES, ("</s>", -1.1)], 0, True))),
        lambda: changed(Tokenizer(Unigram(SCORES[1:]))),
    ],
)
def test_restored_tokenizer_has_the_same_json(make):
    made = make()
    parts = take_tokenizer_apart(made)
    assert parts is not None
    assert put_tokenizer_together(*parts).to_str() == made.to_str()


@pytest.mark.parametrize(
    "model",
    [
        WordLevel(WORDS, "a"),
        WordPiece(WORDS, unk_token="a", max_input_chars_per_word=7),
        BPE({"a": 0, "b": 2}, []),
        BPE({"a": 0, "b\0c": 1}, []),
        Unigram([("a", -1.0), ("b\0c", -2.0)]),
    ],
    ids=["words", "pieces", "a number that no word has", "a word with the mark", "that of Unigram"],
)
def test_what_its_own_pickle_restores_is_not_taken_apart(model):
    tokenizer = Tokenizer(model)
    assert take_tokenizer_apart(tokenizer) is None
    assert pickle.loads(pickle.dumps(tokenizer)).to_str() == tokenizer.to_str()


def test_what_nothing_restores_exactly_is_refused():
    with pytest.raises(ValueError, match="cannot be restored exactly"):
        take_tokenizer_apart(Tokenizer(Unigram([*SCORES, ("b\0c", -2.0)])))


_PIECES = {
    "normalizer": [
        normalizers.BertNormalizer(strip_accents=False),
        normalizers.NFKC(),
        normalizers.Precompiled(b"\0" * 8),
        normalizers.Prepend("_"),
        normalizers.Replace(Regex("a+"), "b"),
        normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]),
        normalizers.ByteLevel(),
    ],
    "pre_tokenizer": [
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.CharDelimiterSplit("-"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Metaspace("_", "first", False),
        pre_tokenizers.Punctuation("isolated"),
        pre_tokenizers.Split(Regex(r"\s+"), "removed", invert=True),
        pre_tokenizers.UnicodeScripts(),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()]),
    ],
    "decoder": [
        decoders.BPEDecoder("</w>"),
        decoders.ByteFallback(),
        decoders.CTC("<pad>", "|", True),
        decoders.Fuse(),
        decoders.Metaspace(),
        decoders.Strip("_", 1, 2),
        decoders.WordPiece("##", False),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteLevel()]),
    ],
    "post_processor": [
        processors.BertProcessing(("</s>", 3), ("a", 0)),
        processors.ByteLevel(trim_offsets=False),
        processors.RobertaProcessing(("</s>", 3), ("a", 0)),
        processors.Sequence([processors.ByteLevel(), processors.ByteLevel()]),
    ],
}


@pytest.mark.parametrize(
    ("where", "piece"),
    [(where, piece) for where, pieces in _PIECES.items() for piece in pieces],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
@pytest.mark.parametrize("model", [BPE(WORDS, []), Unigram(SCORES), WordLevel(WORDS, "a")])
def test_each_piece_of_a_tokenizer_is_kept(where, piece, model):
    tokenizer = Tokenizer(model)
    setattr(tokenizer, where, piece)
    parts = take_tokenizer_apart(tokenizer)
    restored = put_tokenizer_together(*parts) if parts else pickle.loads(pickle.dumps(tokenizer))
    assert restored.to_str() == tokenizer.to_str()
