"""A small training program as diffusers' examples write them; it knows nothing of shmload.

It loads the parts of a Stable Diffusion model, trains the UNet for two steps with an average of its
weights, saves it, puts it into a pipeline and makes a picture. It prints digests of what it made.
"""

import argparse
import hashlib
import os

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from transformers import CLIPTextModel, CLIPTokenizer


def parse_args():
    parser = argparse.ArgumentParser(description="Train a UNet for some steps.")
    parser.add_argument("--pretrained_model_name_or_path", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_train_steps", type=int, default=2)
    parser.add_argument("--revision", default=None)
    parser.add_argument("--variant", default=None)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def digest(model):
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    path = args.pretrained_model_name_or_path
    weight_dtype = torch.bfloat16

    noise_scheduler = DDPMScheduler.from_pretrained(path, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(path, subfolder="tokenizer", revision=args.revision)
    text_encoder = CLIPTextModel.from_pretrained(
        path, subfolder="text_encoder", revision=args.revision, variant=args.variant
    )
    vae = AutoencoderKL.from_pretrained(
        path, subfolder="vae", revision=args.revision, variant=args.variant
    )
    unet = UNet2DConditionModel.from_pretrained(path, subfolder="unet", revision=args.revision)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    ema_unet = EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)
    vae.to(dtype=weight_dtype)
    text_encoder.to(dtype=weight_dtype)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    lr_scheduler = get_scheduler("constant", optimizer=optimizer)
    for step in range(args.max_train_steps):
        pixels = torch.randn(1, 3, 16, 16).to(weight_dtype)
        latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
        latents = latents.float()
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (1,))
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        tokens = tokenizer(
            "a cat", padding="max_length", max_length=tokenizer.model_max_length,
            truncation=True, return_tensors="pt",
        )  # fmt: skip
        hidden = text_encoder(tokens.input_ids)[0].float()
        loss = F.mse_loss(unet(noisy, timesteps, hidden).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        ema_unet.step(unet.parameters())
        print("step", step, loss.item())

    ema_unet.copy_to(unet.parameters())
    pipeline = StableDiffusionPipeline.from_pretrained(
        path, text_encoder=text_encoder.float(), vae=vae.float(), unet=unet, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(args.output_dir)
    again = UNet2DConditionModel.from_pretrained(os.path.join(args.output_dir, "unet"))
    generator = torch.Generator().manual_seed(args.seed)
    image = pipeline("a cat", height=16, width=16, num_inference_steps=2, generator=generator,
                     output_type="np").images[0]  # fmt: skip
    print("unet", digest(unet), digest(again))
    print("text_encoder", digest(text_encoder), text_encoder.config._name_or_path == path)
    print("image", hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
