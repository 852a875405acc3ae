"""What one row of a public checkpoint costs: parameters, operations and seconds by arithmetic, without its weights.

    seconds per row            = operations / (peak of the card * share that is used)
    rows per effective draw    = (levels * sub-steps) * networks * (2 + 2 sum r / (1 - r))
    rows of the set-up         = fit_samples * (levels - 1) * sub-steps * networks

The architectures are built on the meta device, where nothing is stored or computed, and torch counts the operations of
one call. The second line is how often a draw from the noise end arrives at best (`docs/decisions.md`), here with every
pair of levels rejecting half of its swaps. Run it: `python tools/checkpoint_costs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

PEAK, SHARE = 312e12, 0.4  # an A100 in bfloat16, of which large networks use about this share
LEVELS, SUBSTEPS, REJECTION = 9, 4, 0.5
FIT = 64  # fit_samples: trajectories that measure the variance once, before the run


def ddpm() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import UNet2DModel

    blocks = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (128, 256, 256, 256), "attention_head_dim": None}
    return UNet2DModel(32, 3, 3, down_block_types=blocks, up_block_types=up, **sizes), {}, (3, 32, 32), 1


def dit() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(16, 72, 4, 8, 28, sample_size=32)
    return network, {"class_labels": torch.zeros(1, dtype=torch.long)}, (4, 32, 32), 2


def stable_diffusion() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(64, cross_attention_dim=768)
    return network, {"encoder_hidden_states": torch.zeros(1, 77, 768)}, (4, 64, 64), 2


def sdxl() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
        use_linear_projection=True,
    )
    added = {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
    inputs = {"encoder_hidden_states": torch.zeros(1, 77, 2048), "added_cond_kwargs": added}
    return network, inputs, (4, 128, 128), 2


def sd3() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import SD3Transformer2DModel

    network = SD3Transformer2DModel(
        128, num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192
    )
    text = {"encoder_hidden_states": torch.zeros(1, 333, 4096), "pooled_projections": torch.zeros(1, 2048)}
    return network, text, (16, 128, 128), 2


def flux() -> tuple[Any, dict[str, Any], tuple[int, ...], int]:
    from diffusers import FluxTransformer2DModel

    network = FluxTransformer2DModel(guidance_embeds=True)
    text = {"encoder_hidden_states": torch.zeros(1, 512, 4096), "pooled_projections": torch.zeros(1, 768)}
    places = {"img_ids": torch.zeros(4096, 3), "txt_ids": torch.zeros(512, 3), "guidance": torch.zeros(1)}
    return network, {**text, **places}, (16, 128, 128), 1


CHECKPOINTS: dict[str, Callable[[], tuple[Any, dict[str, Any], tuple[int, ...], int]]] = {
    "DDPM CIFAR-10, 32 x 32": ddpm,
    "DiT-XL/2, 256 x 256": dit,
    "Stable Diffusion 1.5, 512 x 512": stable_diffusion,
    "SDXL, 1024 x 1024": sdxl,
    "SD3 medium, 1024 x 1024": sd3,
    "Flux.1 dev, 1024 x 1024": flux,
}


def measured(make: Callable[[], tuple[Any, dict[str, Any], tuple[int, ...], int]]) -> tuple[float, float, int, int]:
    """Parameters, operations of one row, numbers of one state, and networks of a usual target."""
    with torch.device("meta"):
        network, inputs, event, n = make()
        x = torch.zeros(1, 4096, 64) if "img_ids" in inputs else torch.zeros(1, *event)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            network(x, timestep=torch.zeros(1), return_dict=False, **inputs)
    size = 1
    for k in event:
        size *= k
    return sum(p.numel() for p in network.parameters()), counter.get_total_flops(), size, n


def table() -> str:
    """The table of the guide."""
    pairs = LEVELS - 1
    visits = 2 + 2 * pairs * REJECTION / (1 - REJECTION)
    lines = [
        "| checkpoint | parameters | weights in bfloat16 | operations per row | ms per row | a chain's states |"
        " rows per iteration | seconds per effective draw | set-up, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, make in CHECKPOINTS.items():
        parameters, operations, size, n = measured(make)
        seconds, rows = operations / (PEAK * SHARE), LEVELS * SUBSTEPS * n
        # What a replica keeps: its state, the drift, and one prediction per network, in single precision.
        fit = FIT * (LEVELS - 1) * SUBSTEPS * n
        memory = 4 * LEVELS * size * (2 + n) / 2**20
        lines.append(
            f"| {name} | {parameters / 1e6:,.0f} M | {2 * parameters / 2**30:.1f} GiB | {operations / 1e9:,.0f} G |"
            f" {1e3 * seconds:.1f} | {memory:.1f} MiB | {rows} | {seconds * rows * visits:,.1f} |"
            f" {seconds * fit:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print(f"one effective draw per {2 + 2 * (LEVELS - 1) * REJECTION / (1 - REJECTION):.0f} iterations at best")
