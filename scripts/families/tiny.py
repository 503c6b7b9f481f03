"""Makes tiny pipelines with the components of diffusers' own tests, without the hub."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of pipelines, and the test that can make one."""

    family: str
    class_name: str
    module: str
    """The module of the test, below the checkout."""
    test: str


def save_tiny(candidate: Candidate, source: Path) -> None:
    """Make a tiny pipeline and save it; call it in a child, which it changes.

    Raises:
        ValueError: the pipeline has no weights.
        Exception: whatever a test raises that cannot make its components.
    """
    import diffusers
    import torch

    _replace_the_hub()
    test = getattr(importlib.import_module(candidate.module), candidate.test)()
    torch.manual_seed(0)
    components = test.get_dummy_components()
    pipe = getattr(diffusers, candidate.class_name)(**components)
    pipe.save_pretrained(source)
    if not list(source.glob("*/*.safetensors")):
        raise ValueError("it has no weights")


def _replace_the_hub() -> None:
    """In this child, replace what the tests fetch from the hub by tiny parts that are made here."""
    import transformers
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    def tokenizer(cls: Any, source: Any, **kwargs: Any) -> Any:
        return _tokenizer(f"{cls.__name__} {source}")

    def model(cls: Any, source: Any, **kwargs: Any) -> Any:
        return cls(kwargs.get("config") or _config(cls.config_class))

    def config(source: Any, **kwargs: Any) -> Any:
        return _config(transformers.T5Config if "t5" in source else transformers.Qwen2Config)

    for owner, change in (
        (PreTrainedTokenizerBase, classmethod(_or_local(PreTrainedTokenizerBase, tokenizer))),
        (PreTrainedModel, classmethod(model)),
        (PreTrainedConfig, classmethod(lambda cls, *args, **kwargs: _config(cls))),
        (transformers.AutoConfig, config),
        (transformers.AutoTokenizer, lambda source, **kwargs: _tokenizer(str(source))),
    ):
        mock.patch.object(owner, "from_pretrained", change).start()


def _or_local(base: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Read from a directory in the ordinary way, and make anything else."""
    ordinary = base.from_pretrained.__func__

    def read(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(source).is_dir():
            return ordinary(cls, source, *args, **kwargs)
        return otherwise(cls, source, **kwargs)

    return read


def _tokenizer(name: str) -> Any:
    import tokenizers_tiny as tiny

    for word, make in (
        ("t5", tiny.t5_tokenizer),
        ("clip", tiny.clip_tokenizer),
        ("gemma", tiny.gemma_tokenizer),
    ):
        if word in name.lower():
            return make()
    return tiny.qwen2_tokenizer()


def _config(config_class: Any) -> Any:
    """Make a tiny configuration; what a class does not know, it keeps as an attribute."""
    known = {
        **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "d_ff"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_layers", "num_attention_heads", "num_heads"), 2),
        **{"num_key_value_heads": 2, "d_kv": 16, "vocab_size": 1103},
        **{"image_size": 32, "patch_size": 8},
    }
    has = vars(config_class())
    return config_class(**{name: value for name, value in known.items() if name in has})
