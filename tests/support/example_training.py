"""A small training program as diffusers' examples write them; it knows nothing of shmload.

It loads the parts of a Stable Diffusion model, trains the UNet for two steps, puts it into a
pipeline, saves that and makes a picture. It prints digests of what it made.
"""

import hashlib
import os
import sys

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer


def digest(model):
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main(path, output_dir):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    noise_scheduler = DDPMScheduler.from_pretrained(path, subfolder="scheduler")
    tokenizer = CLIPTokenizer.from_pretrained(path, subfolder="tokenizer", revision=None)
    text_encoder = CLIPTextModel.from_pretrained(path, subfolder="text_encoder", revision=None)
    vae = AutoencoderKL.from_pretrained(path, subfolder="vae", revision=None, variant=None)
    unet = UNet2DConditionModel.from_pretrained(path, subfolder="unet", revision=None)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    for step in range(2):
        latents = vae.encode(torch.randn(1, 3, 16, 16)).latent_dist.sample()
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (1,))
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        tokens = tokenizer("a cat", padding="max_length", truncation=True, return_tensors="pt")
        hidden = text_encoder(tokens.input_ids)[0]
        loss = F.mse_loss(unet(noisy, timesteps, hidden).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, loss.item())
    pipeline = StableDiffusionPipeline.from_pretrained(
        path, text_encoder=text_encoder, vae=vae, unet=unet, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(output_dir)
    again = UNet2DConditionModel.from_pretrained(os.path.join(output_dir, "unet"))
    image = pipeline("a cat", height=16, width=16, num_inference_steps=2, output_type="np").images
    print("unet", digest(unet), digest(again))
    print("text_encoder", digest(text_encoder), text_encoder.config._name_or_path == path)
    print("image", hashlib.sha256(image.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main(*sys.argv[1:])
