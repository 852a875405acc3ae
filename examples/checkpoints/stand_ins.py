"""Checkpoints in miniature: the real classes with small random weights, so that the examples run anywhere in seconds.

Each function stands for one line that loads the real checkpoint, which is its docstring. What they draw is noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat", "dog"]
BLOCKS = {"layers_per_block": 1, "norm_num_groups": 4, "block_out_channels": (8, 16), "attention_head_dim": 2}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _random(network: nn.Module) -> nn.Module:
    """Weights that let every input matter; some layers of transformers start at zero."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8, **special)


def _clip(kind: Any, seed: int) -> Any:
    from transformers import CLIPTextConfig

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0}
    return kind(CLIPTextConfig(**sizes, **tokens, max_position_embeddings=8, projection_dim=16)).eval()


def _t5(seed: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    config = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def vae(channels: int = 4, seed: int = 3, **config: float) -> Any:
    """`AutoencoderKL.from_pretrained("stabilityai/sd-vae-ft-mse")`"""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"latent_channels": channels, "block_out_channels": (4, 4), "norm_num_groups": 2, "sample_size": 16}
    return AutoencoderKL(in_channels=3, out_channels=3, **sizes, **blocks, **config).eval()


def ddpm(n_classes: int | None = None, seed: int = 0) -> Any:
    """`DDPMPipeline.from_pretrained("google/ddpm-cifar10-32")`"""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    unet = UNet2DModel(8, in_channels=3, out_channels=3, num_class_embeds=n_classes, **blocks, **BLOCKS)
    return _quiet(DDPMPipeline(unet.eval(), DDPMScheduler(clip_sample=False)))


def dit(seed: int = 0) -> Any:
    """`DiTPipeline.from_pretrained("facebook/DiT-XL-2-256")`"""
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(seed)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    network = DiTTransformer2DModel(in_channels=4, out_channels=8, num_embeds_ada_norm=1000, norm_num_groups=4, **sizes)
    return _quiet(DiTPipeline(_random(network), vae(), DDIMScheduler(clip_sample=False)))


def stable_diffusion(prediction: str = "epsilon", seed: int = 0) -> Any:
    """`StableDiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")`"""
    from diffusers import DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextModel

    steps = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    scheduler = DDIMScheduler(**steps, clip_sample=False, prediction_type=prediction)
    parts = (_clip(CLIPTextModel, 1), _tokenizer(), _text_unet(seed), scheduler, None, None)
    return _quiet(StableDiffusionPipeline(vae(), *parts, requires_safety_checker=False))


def sdxl(seed: int = 0) -> Any:
    """`StableDiffusionXLPipeline.from_pretrained("stabilityai/stable-diffusion-xl-base-1.0")`"""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    steps = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    more = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 40,
    }
    texts = (_clip(CLIPTextModel, 1), _clip(CLIPTextModelWithProjection, 2), _tokenizer(), _tokenizer())
    unet = _text_unet(seed, cross_attention_dim=32, **more)
    scheduler = EulerDiscreteScheduler(**steps, timestep_spacing="leading")
    return _quiet(StableDiffusionXLPipeline(vae(), *texts, unet, scheduler, add_watermarker=False))


def _text_unet(seed: int, cross_attention_dim: int = 16, **config: Any) -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(8, cross_attention_dim=cross_attention_dim, **blocks, **BLOCKS, **config).eval()


def sd3(seed: int = 0) -> Any:
    """`StableDiffusion3Pipeline.from_pretrained("stabilityai/stable-diffusion-3-medium-diffusers")`"""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(seed)
    sizes = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "pos_embed_max_size": 8}
    text = {"joint_attention_dim": 32, "caption_projection_dim": 16, "pooled_projection_dim": 32}
    network = _random(SD3Transformer2DModel(8, 2, in_channels=4, out_channels=4, **sizes, **text))
    clips = [_clip(CLIPTextModelWithProjection, i) for i in (1, 2)]
    texts = (clips[0], _tokenizer(), clips[1], _tokenizer(), _t5(3), _tokenizer())
    decoder = vae(scaling_factor=1.5305, shift_factor=0.0609)
    return _quiet(StableDiffusion3Pipeline(network, FlowMatchEulerDiscreteScheduler(shift=3.0), decoder, *texts))


def flux(guidance: bool = True, seed: int = 0) -> Any:
    """`FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev")`"""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    torch.manual_seed(seed)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    text = {"joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)}
    network = _random(FluxTransformer2DModel(1, in_channels=16, guidance_embeds=guidance, **sizes, **text))
    decoder = vae(4, scaling_factor=0.3611, shift_factor=0.1159)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    parts = (decoder, _clip(CLIPTextModel, 1), _tokenizer(), _t5(3), _tokenizer(), network)
    pipe = FluxPipeline(scheduler, *parts)
    pipe.default_sample_size = 8
    return _quiet(pipe)


def clip(seed: int = 1) -> tuple[Any, Any]:
    """Nothing: without a network `ClipScore` loads "openai/clip-vit-base-patch16" itself."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 8, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config={**sizes, **text, "pad_token_id": 0}, vision_config=vision, projection_dim=12)
    network = _random(CLIPModel(config))
    network.logit_scale.data.fill_(2.0)
    return network, _tokenizer()


class EDMNet(nn.Module):
    """The interface of EDM's and EDM2's networks, around a small one: `net(x, sigma, labels) -> D`."""

    def __init__(self, label_dim: int = 10, img_resolution: int = 8, img_channels: int = 3, sigma_data: float = 0.5):
        super().__init__()
        self.label_dim, self.img_resolution, self.img_channels = label_dim, img_resolution, img_channels
        self.sigma_data = sigma_data
        self.first = nn.Conv2d(img_channels, 8, 3, padding=1)
        self.label = nn.Linear(label_dim, 8, bias=False) if label_dim else None
        self.last = nn.Conv2d(8, img_channels, 3, padding=1)

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        x, sigma = x.to(torch.float32), sigma.to(torch.float32).reshape(-1, 1, 1, 1)
        q2 = sigma**2 + self.sigma_data**2
        hidden = self.first(x * q2.rsqrt()) + (sigma.log() / 4).sin()
        if self.label is not None:
            zeros = torch.zeros(1, self.label_dim, device=x.device)
            hidden = hidden + self.label(zeros if class_labels is None else class_labels)[:, :, None, None]
        return self.sigma_data**2 / q2 * x + sigma * self.sigma_data * q2.rsqrt() * self.last(hidden.tanh())


def edm(label_dim: int = 10, seed: int = 0) -> EDMNet:
    """A network of NVlabs/edm2 with weights from `cd.models.convert_edm`; the docs have the lines."""
    torch.manual_seed(seed)
    return EDMNet(label_dim).eval()


class Velocity(nn.Module):
    """`u(x, t)`, from noise at t = 0 to data at t = 1, as flow_matching and torchcfm train it."""

    def __init__(self, dim: int = 2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim + 1, 16), nn.SiLU(), nn.Linear(16, dim))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t[:, None]], 1))


def velocity(seed: int = 0) -> Velocity:
    """Your own network, trained by conditional flow matching."""
    torch.manual_seed(seed)
    return Velocity().eval()
