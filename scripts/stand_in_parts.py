"""Tiny parts that are made here, instead of those that diffusers' tests fetch from the hub."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# What makes a configuration tiny; each class takes what it knows.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "d_ff", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "ffn_hidden_size"), 32),
    **dict.fromkeys(("d_kv", "kv_channels"), 16),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 1103),
    **{"image_size": 32, "patch_size": 8, "deepstack_visual_indexes": [0, 1]},
}
# What a class reads and has no default for.
_WITHOUT_DEFAULT = {"ChatGLMConfig": {"original_rope": True}}


def replace_the_hub(folder: Path) -> None:
    """In this child, replace what tests fetch; files that parts need go into `folder`."""
    import diffusers
    import transformers
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.feature_extraction_utils import FeatureExtractionMixin
    from transformers.processing_utils import ProcessorMixin

    def tokenizer(cls: Any, source: Any, **kwargs: Any) -> Any:
        if cls.__name__ == "ChatGLMTokenizer":
            return cls(str(_sentences(folder)))
        return _tokenizer(f"{cls.__name__} {source}")

    def model(cls: Any, source: Any, **kwargs: Any) -> Any:
        return _seeded(cls(kwargs.get("config") or _config(cls.config_class)))

    def config(source: Any, **kwargs: Any) -> Any:
        is_t5 = "t5" in source.lower()
        return _config(transformers.T5Config if is_t5 else transformers.Qwen2Config)

    def processor(cls: Any, source: Any, **kwargs: Any) -> Any:
        return _processor(cls, folder / "tokenizer")

    def extractor(cls: Any, source: Any, **kwargs: Any) -> Any:
        return cls(**kwargs)

    for owner, change in (
        (PreTrainedTokenizerBase, _or_local(PreTrainedTokenizerBase, tokenizer)),
        (FeatureExtractionMixin, _or_local(FeatureExtractionMixin, extractor)),
        (ProcessorMixin, _or_local(ProcessorMixin, processor)),
        (diffusers.UNet2DModel, _or_local(diffusers.UNet2DModel, _unet)),
        (PreTrainedModel, classmethod(model)),
        (PretrainedConfig, classmethod(lambda cls, *args, **kwargs: _config(cls))),
        (transformers.AutoConfig, config),
        (transformers.AutoTokenizer, lambda source, **kwargs: _tokenizer(str(source))),
    ):
        mock.patch.object(owner, "from_pretrained", change).start()


def _or_local(base: Any, otherwise: Callable[..., Any]) -> Any:
    """Read from a directory in the ordinary way, and make anything else."""
    ordinary = base.from_pretrained.__func__

    def read(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(source).is_dir():
            return ordinary(cls, source, *args, **kwargs)
        return otherwise(cls, source, **kwargs)

    return classmethod(read)


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


def _sentences(folder: Path) -> Path:
    """Write the vocabulary that ChatGLM's tokenizer reads."""
    import sentencepiece

    path = folder / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a red cat", "the dog", "a lighthouse in the fog"] * 9),
            model_writer=file,
            vocab_size=22,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return path


def _processor(cls: Any, folder: Path) -> Any:
    """Make a processor of the parts that its class asks for, each with its defaults."""
    import transformers

    tokens = {name: f"<|{name}|>" for name in ("image_token", "grid_bos_token", "grid_eos_token")}
    tokenizer = _tokenizer("")
    tokenizer.save_pretrained(folder)
    tokenizer = type(tokenizer).from_pretrained(folder, extra_special_tokens=tokens)
    images = getattr(transformers, cls.__name__.replace("Processor", "ImageProcessor"), None)
    parts = {"image_processor": (images or transformers.Qwen2VLImageProcessor)()}
    if "video_processor" in inspect.signature(cls).parameters:
        parts["video_processor"] = transformers.Qwen3VLVideoProcessor()
    return cls(tokenizer=tokenizer, **parts)


def _unet(cls: Any, source: Any, **kwargs: Any) -> Any:
    return cls(
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _config(config_class: Any) -> Any:
    """Make a tiny configuration, with tiny ones of its parts."""
    has = vars(config_class())
    parts = {
        name: _config(part).to_dict()
        for name, part in getattr(config_class, "sub_configs", {}).items()
        if name in has and hasattr(part, "model_type")
    }
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in has and isinstance(has[name], list | tuple) == isinstance(value, list)
    }
    return config_class(**sizes, **parts, **_WITHOUT_DEFAULT.get(config_class.__name__, {}))


def _seeded(model: Any) -> Any:
    """Fill the weights of a class that leaves them as the memory was."""
    import torch

    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model
