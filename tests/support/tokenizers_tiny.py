"""Real tokenizer classes over vocabularies of a few hundred entries, made without a network.

Each function writes the files that a hub repository would hold into a directory of its own and
reads them back with `from_pretrained`. The constructors of transformers 4 and 5 take different
arguments, but both read the same files.
"""

import json
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPTokenizer,
    GemmaTokenizerFast,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    T5TokenizerFast,
)

# Enough merges to make some words one token, so that a swapped vocabulary changes the ids.
_MERGES = ("a t", "c at", "d o", "do g", "t h", "th e", "r e", "re d")
_BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


def clip_tokenizer(*, pad_token: str = "<|endoftext|>") -> PreTrainedTokenizerBase:
    """Make a byte-level BPE tokenizer of 77 positions; second ones, as in SDXL, pad with "!"."""
    merges = (*_MERGES[:1], "c at</w>", "a t</w>", *_MERGES[2:3], "do g</w>")
    pieces = (*_BYTES, *(f"{byte}</w>" for byte in _BYTES), *map(_merged, merges))
    specials = ("<|startoftext|>", "<|endoftext|>")
    files = _bpe_files(pieces + specials, merges)
    config = {"model_max_length": 77, "pad_token": pad_token, "unk_token": "<|endoftext|>"}
    return _read_back(CLIPTokenizer, files, config)


def qwen2_tokenizer() -> PreTrainedTokenizerBase:
    """Make a byte-level BPE tokenizer with Qwen's chat tokens as the last ids."""
    files = _bpe_files((*_BYTES, *map(_merged, _MERGES)), _MERGES)
    first = len(json.loads(files["vocab.json"]))
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = {
        str(first + number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for number, token in enumerate(specials)
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(specials[1:]),
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    return _read_back(Qwen2Tokenizer, files, config)


def t5_tokenizer() -> PreTrainedTokenizerBase:
    """Make a Unigram tokenizer with T5's three special ids; UMT5 of Wan uses the same class."""
    words = ("▁a", "▁cat", "▁dog", "▁the", "▁red")
    letters = tuple("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'-")
    vocab = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    vocab += [(word, -2.0 - number / 7) for number, word in enumerate(words)]
    vocab += [(letter, -6.0 - number / 7) for number, letter in enumerate(letters)]
    core = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    core.decoder = decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    core.add_special_tokens(["<pad>", "</s>", "<unk>"])
    config = {
        "eos_token": "</s>",
        "extra_ids": 0,
        "model_max_length": 512,
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    return _read_back(T5TokenizerFast, {"tokenizer.json": core.to_str()}, config)


def gemma_tokenizer() -> PreTrainedTokenizerBase:
    """Make a BPE tokenizer with byte fallback that begins each text with "<bos>"."""
    specials = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    letters = tuple("▁abcdefghijklmnopqrstuvwxyz")
    fallback = tuple(f"<0x{byte:02X}>" for byte in range(256))
    pieces = (*specials, *fallback, *letters, *map(_merged, _MERGES))
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[tuple(merge.split()) for merge in _MERGES],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    core.add_special_tokens(list(specials))
    config = {
        "add_bos_token": True,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 4096,
        "pad_token": "<pad>",
        "padding_side": "left",
        "unk_token": "<unk>",
    }
    return _read_back(GemmaTokenizerFast, {"tokenizer.json": core.to_str()}, config)


def _merged(merge: str) -> str:
    return merge.replace(" ", "")


def _bpe_files(pieces: tuple[str, ...], merges: tuple[str, ...]) -> dict[str, str]:
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "\n".join(("#version: 0.2", *merges, "")),
    }


def _read_back(
    cls: type[PreTrainedTokenizerBase], files: dict[str, str], config: dict[str, object]
) -> PreTrainedTokenizerBase:
    files = files | {"tokenizer_config.json": json.dumps(config)}
    with tempfile.TemporaryDirectory(prefix="shmload-tokenizer-") as directory:
        for name, text in files.items():
            Path(directory, name).write_text(text, encoding="utf-8")
        tokenizer = cls.from_pretrained(directory)
    # The directory's random name would be the only difference between two builds.
    tokenizer.name_or_path = ""
    return tokenizer
