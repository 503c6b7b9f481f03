"""Tiny components of families of which diffusers' tests make none that can be saved.

Each function is called after `replace_the_hub`: what it "reads" from the hub is made, tiny.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import transformers

_TINY = "tiny-qwen"
_VAE_OF_FLUX_2 = {
    "block_out_channels": (4,),
    "down_block_types": ("DownEncoderBlock2D",),
    "latent_channels": 1,
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "sample_size": 32,
    "up_block_types": ("UpDecoderBlock2D",),
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
_VAE_OF_WAN = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "z_dim": 16}

Components = dict[str, Any]


class Further(NamedTuple):
    """A class of pipelines, and what makes its components."""

    class_name: str
    make: Callable[[], Components]


FURTHER: dict[str, Further] = {}
"""By family."""


def _of(class_name: str) -> Callable[[Callable[[], Components]], None]:
    """Register a function that makes components; it is named by its family."""

    def register(make: Callable[[], Components]) -> None:
        FURTHER[make.__name__] = Further(class_name, make)

    return register


@_of("DDPMPipeline")
def ddpm() -> Components:
    return {
        "unet": diffusers.UNet2DModel.from_pretrained(_TINY),
        "scheduler": diffusers.DDPMScheduler(),
    }


@_of("LucyEditPipeline")
def lucy() -> Components:
    transformer = diffusers.WanTransformer3DModel(
        attention_head_dim=12,
        ffn_dim=32,
        freq_dim=32,
        num_attention_heads=2,
        num_layers=2,
        rope_max_seq_len=32,
        text_dim=32,
    )
    return {
        "tokenizer": transformers.AutoTokenizer.from_pretrained("t5"),
        "text_encoder": transformers.UMT5EncoderModel.from_pretrained(_TINY),
        "vae": diffusers.AutoencoderKLWan(**_VAE_OF_WAN),
        "scheduler": _flow(),
        "transformer": transformer,
    }


@_of("ErnieImagePipeline")
def ernie_image() -> Components:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    text = sizes | {"model_type": "mistral", "num_key_value_heads": 1, "vocab_size": 1103}
    vision = sizes | {"image_size": 32, "model_type": "pixtral", "patch_size": 8}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    transformer = diffusers.ErnieImageTransformer2DModel(
        ffn_hidden_size=64,
        hidden_size=32,
        in_channels=4,
        num_attention_heads=2,
        num_layers=2,
        out_channels=4,
        rope_axes_dim=(4, 6, 6),
        text_in_dim=32,
    )
    return {
        "transformer": transformer,
        "vae": diffusers.AutoencoderKLFlux2(**_VAE_OF_FLUX_2),
        "text_encoder": transformers.Mistral3Model(config),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(_TINY),
        "scheduler": _flow(),
        "pe": transformers.Ministral3ForCausalLM.from_pretrained(_TINY),
        "pe_tokenizer": transformers.AutoTokenizer.from_pretrained(_TINY),
    }


@_of("Ideogram4Pipeline")
def ideogram4() -> Components:
    sizes = {
        "adaln_dim": 32,
        "attention_head_dim": 16,
        "in_channels": 4,
        "intermediate_size": 64,
        "llm_features_dim": 32,
        "mrope_section": (2, 3, 3),
        "num_attention_heads": 2,
        "num_layers": 2,
    }
    return {
        "scheduler": _flow(),
        "vae": diffusers.AutoencoderKLFlux2(**_VAE_OF_FLUX_2),
        "text_encoder": transformers.Qwen2Model.from_pretrained(_TINY),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(_TINY),
        "transformer": diffusers.Ideogram4Transformer2DModel(**sizes),
        "unconditional_transformer": diffusers.Ideogram4Transformer2DModel(**sizes),
        "prompt_enhancer_head": diffusers.Ideogram4PromptEnhancerHead(32, 1103),
    }


@_of("LongCatImagePipeline")
def longcat_image() -> Components:
    transformer = diffusers.LongCatImageTransformer2DModel(
        attention_head_dim=16,
        axes_dims_rope=[4, 4, 8],
        in_channels=16,
        joint_attention_dim=32,
        num_attention_heads=2,
        num_layers=1,
        num_single_layers=1,
        pooled_projection_dim=32,
    )
    return {
        "scheduler": _flow(),
        "vae": diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=1),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(_TINY),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(_TINY),
        "text_processor": _qwen2_vl_processor(),
        "transformer": transformer,
    }


@_of("SanaWMPipeline")
def sana_wm() -> Components:
    transformer = diffusers.SanaWMTransformer3DModel(
        caption_channels=32,
        chunk_plucker_channels=6,
        chunk_plucker_post_attn_blocks=1,
        hidden_size=32,
        image_size=32,
        in_channels=4,
        linear_head_dim=16,
        num_attention_heads=2,
        num_layers=4,
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        decoder_inject_noise=(False, False),
        decoder_layers_per_block=(1, 1),
        decoder_spatio_temporal_scaling=(True,),
        downsample_type=("spatial",),
        latent_channels=4,
        layers_per_block=(1,),
        patch_size=1,
        spatio_temporal_scaling=(True,),
        upsample_factor=(1,),
        upsample_residual=(False,),
    )
    return {
        "tokenizer": transformers.AutoTokenizer.from_pretrained("gemma"),
        "text_encoder": transformers.Gemma2Model.from_pretrained(_TINY),
        "vae": vae,
        "transformer": transformer,
        "scheduler": _flow(),
    }


@_of("RFD4ProteinaPipeline")
def rfd4_proteina() -> Components:
    # As many atoms and residues as its code has tables for.
    mask = [[True] * 37 for _ in range(147)]
    vae = diffusers.RFD4ProteinaAutoencoder(
        atom37_mask=mask,
        allowed_residue_types=[[True] * 147 for _ in range(7)],
        dim_cond=16,
        latent_dim=8,
        nheads=2,
        nlayers=1,
        pair_repr_dim=16,
        token_dim=32,
    )
    transformer = diffusers.RFD4ProteinaTransformer(
        dim_cond=16,
        latent_dim=8,
        nheads=2,
        nlayers=2,
        pair_repr_dim=16,
        t_emb_dim=16,
        token_dim=32,
        tri_mult_c=16,
    )
    return {
        "transformer": transformer,
        "vae": vae,
        "bb_ca_scheduler": diffusers.RFD4ProteinaScheduler("log", "tan", 1.0, 1.0),
        "local_latents_scheduler": diffusers.RFD4ProteinaScheduler("log", "tan", 1.0, 1.0),
    }


@_of("Kandinsky6SRPipeline")
def kandinsky6() -> Components:
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        axes_dims=(4, 6, 6),
        ff_dim=64,
        in_visual_dim=4,
        model_dim=32,
        num_visual_blocks=2,
        out_visual_dim=4,
        time_dim=32,
    )
    vae = diffusers.Kandinsky6SRVAE(
        decoder_block_out_channels=(8, 16, 32),
        encoder_block_out_channels=(8, 16, 32),
        latent_channels=4,
        layers_per_block=1,
    )
    return {"transformer": transformer, "vae": vae, "scheduler": _flow()}


@_of("BriaFibo2Pipeline")
def bria_fibo2() -> Components:
    transformer = diffusers.BriaFibo2Transformer2DModel(
        axes_dims=(4, 6, 6),
        axes_lens=(32, 8, 8),
        cap_feat_dim=32,
        dim=32,
        in_channels=1,
        injection_layer_ids=(0,),
        max_num_gist_tokens=8,
        min_num_gist_tokens=4,
        n_heads=2,
        n_layers=2,
        n_refiner_layers=1,
        perceiver_num_layers=1,
    )
    return {
        "transformer": transformer,
        "scheduler": _flow(),
        "vae": diffusers.AutoencoderKLFlux2(**_VAE_OF_FLUX_2),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration.from_pretrained(_TINY),
        "processor": transformers.Qwen3VLProcessor.from_pretrained(_TINY),
    }


@_of("QwenImage21Pipeline")
def qwenimage21() -> Components:
    transformer = diffusers.QwenImage21Transformer2DModel(
        attention_head_dim=16,
        axes_dims_rope=(4, 6, 6),
        context_in_dim=32,
        in_channels=64,
        num_attention_heads=2,
        num_layers=2,
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1
    )
    processor = transformers.Qwen3VLProcessor.from_pretrained(_TINY)
    processor.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    return {
        "scheduler": _flow(),
        "vae": vae,
        "text_encoder": transformers.Qwen3VLForConditionalGeneration.from_pretrained(_TINY),
        "processor": processor,
        "transformer": transformer,
    }


@_of("LLaDA2Pipeline")
def llada2() -> Components:
    return {
        "model": transformers.Qwen2ForCausalLM.from_pretrained(_TINY),
        "scheduler": diffusers.BlockRefinementScheduler(),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(_TINY),
    }


@_of("DiffusionGemmaPipeline")
def diffusion_gemma() -> Components:
    return {
        "model": transformers.Gemma2ForCausalLM.from_pretrained(_TINY),
        "scheduler": diffusers.BlockRefinementScheduler(),
        "processor": transformers.AutoTokenizer.from_pretrained("gemma"),
    }


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def _qwen2_vl_processor() -> Any:
    return transformers.Qwen2VLProcessor.from_pretrained(_TINY)
