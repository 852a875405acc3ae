"""Checkpoints of the diffusers library: pipelines, or a network with its scheduler.

D(y, sigma | c) = c_skip y + c_out F(c_in y, step | c),    c_* by the scheduler's prediction type (`parametrisations`)

Only the configuration of a scheduler is read. Its `step` is never called: it keeps one step index for the whole batch,
and every row here has its own noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from crepe_diffusion.devices import resident
from crepe_diffusion.errors import InputError, check_choice, optional
from crepe_diffusion.models.base import checked_event
from crepe_diffusion.models.conditions import Condition
from crepe_diffusion.models.parametrisations import Karras, Parametrisation, RectifiedFlow, TrainingSteps
from crepe_diffusion.models.pretrained import Decode, Network, Pretrained, pixels
from crepe_diffusion.processes import Process

__all__ = ["from_diffusers"]


def from_diffusers(
    source: Any,
    condition: Any = None,
    *,
    scheduler: Any = None,
    event_shape: Sequence[int] | None = None,
    timesteps: str = "interpolated",
    decode: Decode | None = None,
    dtype: torch.dtype = torch.float32,
    process: Process | None = None,
) -> Pretrained:
    """A pipeline of diffusers, or a network and its `scheduler`, as a model.

    `condition` is a prompt (pipelines with text encoders; None is the empty prompt), a class (None is the null class of
    a DiT), or a dictionary of tensors without batch axis that the network gets as keyword arguments, such as
    `{"encoder_hidden_states": ...}`. Prompts and their guidance for a distilled Flux: `("a cat", 3.5)`.

    Epsilon, v and sample predictions, the EDM preconditioning and flow matching are read from the scheduler; the second
    half of outputs with a learned variance is dropped; nothing is clipped, whatever `clip_sample` is. `timesteps` is
    `"interpolated"` (the network gets fractional steps) or `"nearest"` (integers; levels of `.ladder` are then training
    steps). The decoder is the pipeline's own VAE. Distilled networks (LCM, Turbo, Lightning) are no denoisers.

    Needs `crepe-diffusion[diffusers]`.

    For example:

        pipe = diffusers.DiTPipeline.from_pretrained("facebook/DiT-XL-2-256")
        p = cd.models.from_diffusers(pipe, 207)
        target, ladder = cd.guided(p, p.given(None), 1.5), p.ladder(9, substeps=4)
    """
    check_choice("timesteps", timesteps, ("interpolated", "nearest"))
    optional("diffusers", "from_diffusers", "diffusers")
    pipeline = None if scheduler is not None else source
    network = source
    if pipeline is not None:
        network = getattr(source, "transformer", None) or getattr(source, "unet", None)
        scheduler = getattr(source, "scheduler", None)
        if network is None or scheduler is None:
            raise InputError(
                "from_diffusers takes a pipeline that has a unet or transformer and a scheduler, or a network with"
                f" scheduler=...; got an object of type {type(source).__name__!r}"
            )
    if not hasattr(network, "config") or not callable(network):
        raise InputError(f"the network must be a model of diffusers, got an object of type {type(network).__name__!r}")
    event = _event(network, pipeline) if event_shape is None else checked_event(event_shape)
    parametrisation = _parametrisation(scheduler, timesteps == "nearest", event, _is_flux(network))
    call = _call_flux if _is_flux(network) else _call
    return Pretrained(
        Network(network, call, parametrisation),
        event,
        condition,
        encode=_Encoder(network, pipeline, event),
        decode=decode or _decoder(pipeline),
        dtype=dtype,
        process=process,
    )


def _bare(network: Any) -> Any:
    """The network itself where torch.compile has wrapped it."""
    return getattr(network, "_orig_mod", network)


def _is_flux(network: Any) -> bool:
    from diffusers import FluxTransformer2DModel

    return isinstance(_bare(network), FluxTransformer2DModel)


def _event(network: Any, pipeline: Any) -> tuple[int, ...]:
    config = network.config
    if _is_flux(network):
        size = getattr(pipeline, "default_sample_size", None)
        channels = config.in_channels // 4  # two by two latents are one token
    else:
        size, channels = getattr(config, "sample_size", None), config.in_channels
    if size is None:
        raise InputError("this network does not state its sample_size: give event_shape=(channels, height, width)")
    height, width = (size, size) if isinstance(size, int) else size
    return (channels, height, width)


# -- schedules -----------------------------------------------------------------------------------------------------


def _parametrisation(scheduler: Any, nearest: bool, event: tuple[int, ...], flux: bool) -> Parametrisation:
    from diffusers import LCMScheduler, TCDScheduler

    config, name = getattr(scheduler, "config", None), type(scheduler).__name__
    if config is None:
        raise InputError(f"scheduler must be a scheduler of diffusers, got {scheduler!r}")
    if isinstance(scheduler, (LCMScheduler, TCDScheduler)):
        raise InputError(
            f"{name} belongs to a distilled network, which maps noise to samples and is no denoiser: take the"
            " checkpoint that it was distilled from, with that one's scheduler"
        )
    prediction = config.get("prediction_type")
    if hasattr(scheduler, "precondition_inputs"):  # EDM, and nothing else, preconditions
        sign = {"epsilon": 1.0, "v_prediction": -1.0}.get(prediction)
        if sign is None:
            raise InputError(f"{name}: prediction_type must be 'epsilon' or 'v_prediction', got {prediction!r}")
        return Karras(config.sigma_data, sign, config.sigma_min, config.sigma_max, config.get("rho", 7.0))
    if config.get("use_flow_sigmas") or (
        hasattr(scheduler, "scale_noise") and not hasattr(scheduler, "alphas_cumprod")
    ):
        if config.get("invert_sigmas"):
            raise InputError(f"{name} with invert_sigmas counts time from noise to data: use from_velocity(noise_at=0)")
        return RectifiedFlow(_shift(config, event), 1.0 if flux else 1000.0, config.num_train_timesteps)
    if not hasattr(scheduler, "alphas_cumprod"):
        raise InputError(
            f"{name} has neither alphas_cumprod nor the sigmas of a flow: the scheduler should be that of the training,"
            " such as DDPMScheduler, EDMEulerScheduler or FlowMatchEulerDiscreteScheduler"
        )
    if prediction is None:
        raise InputError(
            f"{name} does not state its prediction_type, so the network's output could be noise, v or the sample: make"
            " a scheduler that does, such as DDPMScheduler.from_config(scheduler.config, prediction_type='epsilon')"
        )
    abar = scheduler.alphas_cumprod.to(torch.float64)
    sigmas = ((1 - abar) / abar).sqrt()
    # Zero terminal signal, also where it is written as 2^-24, is no noise level that a replica could stand on.
    sigmas = sigmas[sigmas < 4000]
    continuous = config.get("timestep_type") == "continuous" and prediction == "v_prediction"
    return TrainingSteps(tuple(sigmas.tolist()), prediction, nearest, continuous)


def _shift(config: Any, event: tuple[int, ...]) -> float:
    """The shift of a flow schedule; a dynamic one depends on the number of tokens of the image."""
    if not config.get("use_dynamic_shifting"):
        return float(config.get("shift", config.get("flow_shift", 1.0)))
    tokens = event[-1] * event[-2] / 4
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)


# -- calls ---------------------------------------------------------------------------------------------------------


def _call(network: Any, x: Tensor, step: Tensor, condition: Any) -> Tensor:
    out = network(x, timestep=step, return_dict=False, **(condition or {}))[0]
    # The second half is a learned variance, which ratios of densities do not use.
    return out[:, : x.shape[1]] if out.shape[1] == 2 * x.shape[1] else out


def _call_flux(network: Any, x: Tensor, step: Tensor, condition: Any) -> Tensor:
    """Flux sees two by two latents as one token with its place, and text without one."""
    rows, channels, height, width = x.shape
    h, w = height // 2, width // 2
    tokens = x.reshape(rows, channels, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(rows, h * w, 4 * channels)
    place = resident(_places(h, w), x.device, x.dtype)
    text = torch.zeros(condition["encoder_hidden_states"].shape[1], 3, dtype=x.dtype, device=x.device)
    out = network(tokens, timestep=step, img_ids=place, txt_ids=text, return_dict=False, **condition)[0]
    return out.reshape(rows, h, w, channels, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


@lru_cache
def _places(h: int, w: int) -> Tensor:
    """(0, row, column) of each token."""
    return torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w))


# -- conditions and pictures ---------------------------------------------------------------------------------------


class _Encoder:
    """From a prompt, a class or tensors to the keyword arguments of the network, without batch axis."""

    __slots__ = ("event", "network", "pipeline")  # no __dict__: tokenizers and text encoders are no part of the model

    def __init__(self, network: Any, pipeline: Any, event: tuple[int, ...]):
        self.network, self.pipeline, self.event = network, pipeline, event

    def __call__(self, condition: Any) -> Condition | None:
        if isinstance(condition, (dict, Tensor)):
            return {"class_labels": condition} if isinstance(condition, Tensor) else condition
        has_text = hasattr(self.pipeline, "encode_prompt")
        guidance = None
        if isinstance(condition, tuple) and len(condition) == 2 and isinstance(condition[0], str):
            condition, guidance = condition
        if isinstance(condition, str) or (condition is None and has_text):
            if not has_text:
                raise InputError(
                    f"the prompt {condition!r} needs a pipeline with text encoders: give the pipeline instead of its"
                    " network, or a dictionary of tensors such as {'encoder_hidden_states': ...}"
                )
            return self._text(condition or "", guidance)
        return self._label(condition)

    def _label(self, label: Any) -> Condition | None:
        from diffusers import DiTTransformer2DModel

        config = self.network.config
        n = config.get("num_embeds_ada_norm") if isinstance(_bare(self.network), DiTTransformer2DModel) else None
        null = n  # a DiT has one more embedding, for no class
        if n is None:
            n = config.get("num_class_embeds")
        if label is None:
            if null is not None:
                return {"class_labels": torch.tensor(null)}
            if n is not None:
                raise InputError(f"this network is conditional on {n} classes: give one of 0 to {n - 1} as condition")
            if config.get("cross_attention_dim") and "encoder_hid_dim" in config:
                raise InputError(
                    "this network needs text: give its pipeline, or {'encoder_hidden_states': ...} as its condition"
                )
            return None
        last = n if null is not None else (n or 0) - 1
        if not isinstance(label, int) or n is None or not 0 <= label <= last:
            known = "this network has no classes" if n is None else f"classes are 0 to {last}"
            raise InputError(f"condition must be a class, a prompt or a dictionary of tensors, got {label!r}; {known}")
        return {"class_labels": torch.tensor(label)}

    @torch.no_grad()
    def _text(self, prompt: str, guidance: float | None) -> Condition:
        from diffusers import SD3Transformer2DModel

        pipe, bare, config = self.pipeline, _bare(self.network), self.network.config
        device = next(bare.parameters()).device
        options: dict[str, Any] = {"prompt": prompt, "device": device, "num_images_per_prompt": 1}
        if _is_flux(bare):
            text, pooled, _ = pipe.encode_prompt(prompt_2=None, **options)
            out = {"encoder_hidden_states": text[0], "pooled_projections": pooled[0]}
            if config.guidance_embeds:
                out["guidance"] = torch.tensor(3.5 if guidance is None else float(guidance), dtype=torch.float32)
            return out
        options["do_classifier_free_guidance"] = False
        if isinstance(bare, SD3Transformer2DModel):
            text, _, pooled, _ = pipe.encode_prompt(prompt_2=None, prompt_3=None, **options)
            return {"encoder_hidden_states": text[0], "pooled_projections": pooled[0]}
        if config.get("addition_embed_type") == "text_time":  # SDXL
            text, _, pooled, _ = pipe.encode_prompt(**options)
            if not prompt and pipe.config.get("force_zeros_for_empty_prompt"):
                text, pooled = torch.zeros_like(text), torch.zeros_like(pooled)
            height, width = (n * pipe.vae_scale_factor for n in self.event[-2:])
            size = torch.tensor([height, width, 0, 0, height, width], dtype=text.dtype)
            return {"encoder_hidden_states": text[0], "added_cond_kwargs": {"text_embeds": pooled[0], "time_ids": size}}
        found = pipe.encode_prompt(**options)
        if len(found) != 2:
            raise InputError(
                f"prompts of {type(pipe).__name__} are not known here: encode the prompt yourself and give the keyword"
                " arguments of the network as a dictionary of tensors without batch axis"
            )
        return {"encoder_hidden_states": found[0][0]}


def _decoder(pipeline: Any) -> Decode:
    """Images from 0 to 1: by the pipeline's own decoder, or from pixels between -1 and 1."""
    vae = getattr(pipeline, "vae", None) or getattr(pipeline, "vqvae", None)
    if vae is None:
        return pixels
    scale, shift = vae.config.get("scaling_factor") or 1.0, vae.config.get("shift_factor") or 0.0

    def decode(x: Tensor) -> Tensor:
        first = next(vae.parameters())
        return pixels(vae.decode((x / scale + shift).to(first), return_dict=False)[0].to(x.dtype))

    return decode
