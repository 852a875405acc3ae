"""Networks that judge images, as rewards: each is a function from images (rows, 3, h, w) with values from 0 to 1.

    r(image) = 100 cos(image, text)      log p(label | image)      a linear head on an embedding of the image

Use them with the decoder of the model: `p.tilt(ClipScore("a red cat"), decode=p.decode, batch_size=8)`. All of them can
be differentiated. Each is given a loaded network, or a name or folder from which `transformers` loads one; that needs
`crepe-diffusion[rewards]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crepe_diffusion.errors import InputError, optional

__all__ = ["Aesthetic", "Classifier", "ClipScore", "EachImage", "ImageReward", "Preprocess"]

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# The mean and deviation of the raw scores of ImageReward-v1.0, by which its authors normalise.
IMAGE_REWARD_MEAN, IMAGE_REWARD_STD = 0.16717362830052426, 1.0333394966054072


@dataclass(frozen=True)
class Preprocess:
    """Images from 0 to 1 as a network wants them: clipped, resized, cropped to a square and normalised.

    Does what the image processors of `transformers` do, on tensors and with a gradient.
    """

    size: int = 224
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    crop: bool = True
    """Resize the shorter side and cut the middle out; otherwise both sides are resized."""
    mode: str = "bicubic"

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise InputError(
                f"this reward takes images (rows, 3, height, width) with values from 0 to 1, got {tuple(images.shape)};"
                " latents are decoded by decode=p.decode"
            )
        x = images.clamp(0, 1).to(torch.float32).expand(-1, 3, -1, -1)
        height, width = x.shape[-2:]
        short = min(height, width)  # the longer side is rounded down, as transformers does
        wanted = tuple(self.size * n // short for n in (height, width)) if self.crop else (self.size, self.size)
        if wanted != (height, width):
            x = nn.functional.interpolate(x, wanted, mode=self.mode, align_corners=False, antialias=True).clamp(0, 1)
        top, left = ((n - self.size) // 2 for n in x.shape[-2:])
        x = x[:, :, top : top + self.size, left : left + self.size]
        mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in (self.mean, self.std))
        return (x - mean) / std

    @classmethod
    def from_pretrained(cls, name: str) -> Preprocess:
        """From the `preprocessor_config.json` of a checkpoint."""
        cached_file = optional("transformers.utils", "a preprocessor by name", "rewards").cached_file
        path = cached_file(name, "preprocessor_config.json")
        return cls.of(json.loads(Path(str(path)).read_text()))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Preprocess:
        """From such a configuration."""
        crop = bool(config.get("do_center_crop", False))
        size = config.get("crop_size") if crop else config.get("size")
        size = config.get("size", 224) if size is None else size
        if isinstance(size, Mapping):
            size = size.get("shortest_edge", size.get("height"))
        mode = {2: "bilinear", 3: "bicubic"}.get(config.get("resample", 3), "bicubic")
        return cls(int(size), tuple(config["image_mean"]), tuple(config["image_std"]), crop, mode)


def _ready(network: Any, what: str) -> Any:
    if not isinstance(network, nn.Module):
        raise InputError(f"{what} takes a network or the name of a checkpoint, got {network!r}")
    if network.training:
        raise InputError(f"the network of {what} is in training mode, where it is random: call .eval() on it first")
    return network.requires_grad_(False)


def _place(network: nn.Module) -> Tensor:
    return next(network.parameters())


def _features(out: Any) -> Tensor:
    """An embedding, which newer versions of transformers return inside of an object."""
    found = out if isinstance(out, Tensor) else out.pooler_output
    return nn.functional.normalize(found.to(torch.float32), dim=-1)


class ClipScore:
    """`100 cos(image, text)` by CLIP, the CLIP score without its clipping at 0; larger is better.

    `network` is a `CLIPModel` or the name of one; a loaded one comes with its `tokenizer`. With `scale=None` the cosine
    is multiplied by the network's own temperature, as PickScore does: `ClipScore(text, "yuvalkirstain/PickScore_v1",
    scale=None)`.
    """

    def __init__(
        self,
        text: str,
        network: Any = "openai/clip-vit-base-patch16",
        tokenizer: Any = None,
        *,
        scale: float | None = 100.0,
        preprocess: Preprocess | None = None,
    ):
        if not isinstance(text, str) or not text:
            raise InputError(f"a CLIP score compares with a text, got {text!r}")
        self.network, tokenizer, self.preprocess = _clip(network, tokenizer, preprocess, "ClipScore")
        tokens = tokenizer([text], padding=True, truncation=True, return_tensors="pt")
        tokens = {name: tokens[name].to(_place(self.network).device) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            self.text = _features(self.network.get_text_features(**tokens))[0]
            self.scale = float(self.network.logit_scale.exp()) if scale is None else float(scale)

    def __call__(self, images: Tensor) -> Tensor:
        pixels = self.preprocess(images).to(_place(self.network))
        return self.scale * (_features(self.network.get_image_features(pixel_values=pixels)) @ self.text)


def _clip(network: Any, tokenizer: Any, preprocess: Preprocess | None, what: str) -> tuple[Any, Any, Preprocess]:
    if isinstance(network, str):
        transformers = optional("transformers", f"{what} by name", "rewards")
        tokenizer = transformers.AutoTokenizer.from_pretrained(network) if tokenizer is None else tokenizer
        preprocess = Preprocess.from_pretrained(network) if preprocess is None else preprocess
        network = transformers.CLIPModel.from_pretrained(network).eval()
    network = _ready(network, what)
    if tokenizer is None and what == "ClipScore":
        raise InputError("a loaded CLIP network comes with its tokenizer: ClipScore(text, network, tokenizer)")
    return network, tokenizer, preprocess or Preprocess(network.config.vision_config.image_size)


class Aesthetic:
    """A linear head on the normalised CLIP embedding of the image, such as LAION's aesthetic predictor (1 to 10).

    `head` is the file of the head: `sac+logos+ava1-l14-linearMSE.pth`, which belongs to ViT-L/14, or its state dict.
    """

    def __init__(
        self,
        head: str | Path | Mapping[str, Tensor],
        network: Any = "openai/clip-vit-large-patch14",
        *,
        preprocess: Preprocess | None = None,
    ):
        self.head = _linear_chain(_weights(head), "layers.")
        self.network, _, self.preprocess = _clip(network, None, preprocess, "Aesthetic")
        width = self.network.config.projection_dim
        if self.head[0].in_features != width:
            raise InputError(f"the head takes {self.head[0].in_features} numbers, and the embedding has {width}")
        self.head.to(_place(self.network).device)

    def __call__(self, images: Tensor) -> Tensor:
        pixels = self.preprocess(images).to(_place(self.network))
        return self.head(_features(self.network.get_image_features(pixel_values=pixels)))[:, 0]


class Classifier:
    """`log p(label | image)` of an image classifier: the tilted law is Bayes' posterior of that label.

    `label` is a number, or a name in the network's configuration.
    """

    def __init__(
        self, label: int | str, network: Any = "google/vit-base-patch16-224", *, preprocess: Preprocess | None = None
    ):
        if isinstance(network, str):
            transformers = optional("transformers", "Classifier by name", "rewards")
            preprocess = Preprocess.from_pretrained(network) if preprocess is None else preprocess
            network = transformers.AutoModelForImageClassification.from_pretrained(network).eval()
        self.network = _ready(network, "Classifier")
        config = network.config
        number = config.label2id.get(label) if isinstance(label, str) else label
        if not isinstance(number, int) or not 0 <= number < config.num_labels:
            raise InputError(
                f"this classifier knows the labels 0 to {config.num_labels - 1} by number or name, got {label!r}"
            )
        half = (0.5, 0.5, 0.5)
        self.label, self.preprocess = number, preprocess or Preprocess(config.image_size, half, half, crop=False)

    def __call__(self, images: Tensor) -> Tensor:
        logits = self.network(pixel_values=self.preprocess(images).to(_place(self.network))).logits
        return logits.to(torch.float32).log_softmax(-1)[:, self.label]


class ImageReward:
    """How well an image fits a prompt by human preference: BLIP with a linear head, `ImageReward.pt` of THUDM.

    `weights` is that file (`hf download THUDM/ImageReward ImageReward.pt`) or its state dict; the sizes of the networks
    are read from it. `tokenizer` is that of BERT, by default loaded by name.
    """

    def __init__(self, prompt: str, weights: str | Path | Mapping[str, Tensor], tokenizer: Any = "bert-base-uncased"):
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f"ImageReward compares with a prompt, got {prompt!r}")
        state = _weights(weights)
        self.vision, self.text = _blip(state)
        self.head = _linear_chain(state, "mlp.layers.")
        if isinstance(tokenizer, str):
            auto = optional("transformers", "ImageReward", "rewards").AutoTokenizer
            tokenizer = auto.from_pretrained(tokenizer)
        self.tokens = tokenizer(prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        self.preprocess = Preprocess(self.vision.config.image_size)

    def to(self, device: torch.device | str) -> ImageReward:
        for network in (self.vision, self.text, self.head):
            network.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        place = _place(self.vision)
        seen = self.vision(pixel_values=self.preprocess(images).to(place)).last_hidden_state
        text = self.text(
            input_ids=self.tokens["input_ids"].to(place.device).expand(len(images), -1),
            attention_mask=self.tokens["attention_mask"].to(place.device).expand(len(images), -1),
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=place.device),
        )
        return (self.head(text.last_hidden_state[:, 0])[:, 0] - IMAGE_REWARD_MEAN) / IMAGE_REWARD_STD


class EachImage:
    """Any metric of images that averages over its batch, such as those of torchmetrics: called image by image.

    `metric(image)` gets one image (1, 3, h, w) from 0 to 1, or with `uint8` integers from 0 to 255.

    >>> EachImage(lambda image: image.mean())(torch.tensor([0.2, 0.4])[:, None, None, None].expand(2, 3, 4, 4))
    tensor([0.2000, 0.4000])
    """

    def __init__(self, metric: Callable[[Tensor], Any], *, uint8: bool = False):
        if not callable(metric):
            raise InputError(f"EachImage takes a function of one image, got {metric!r}")
        self.metric, self.uint8 = metric, uint8

    def __call__(self, images: Tensor) -> Tensor:
        images = images.clamp(0, 1)
        if self.uint8:
            images = (255 * images).round().to(torch.uint8)
        values = []
        for image in images.split(1):
            values.append(torch.as_tensor(self.metric(image)).reshape(()))
            if hasattr(self.metric, "reset"):
                self.metric.reset()  # metrics of torchmetrics would average over all images so far
        return torch.stack(values)


# -- loading -------------------------------------------------------------------------------------------------------


def _weights(source: str | Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the downloaded file of the weights")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    return found.get("state_dict", found) if isinstance(found, dict) else {}


def _linear_chain(state: Mapping[str, Tensor], prefix: str) -> nn.Sequential:
    """The linear layers `prefix<i>.weight` one after the other; these heads have nothing between them but dropout."""
    places = sorted(int(m[1]) for name in state if (m := re.fullmatch(re.escape(prefix) + r"(\d+)\.weight", name)))
    if not places:
        raise InputError(f"the weights hold no head: no entry {prefix}0.weight among {sorted(state)[:3]}")
    layers = []
    for i in places:
        weight, bias = state[f"{prefix}{i}.weight"], state[f"{prefix}{i}.bias"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight.to(torch.float32), "bias": bias.to(torch.float32)})
        layers.append(layer)
    return nn.Sequential(*layers).eval().requires_grad_(False)


# Names of BLIP's own vision network and those of transformers.
BLIP_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


def _blip(state: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Vision and text network of BLIP, with the sizes of the weights and 64 numbers per head, as BLIP has."""
    optional("transformers", "ImageReward", "rewards")
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    vision = _part(state, "blip.visual_encoder.")
    text = _part(state, "blip.text_encoder.")
    for old, new in BLIP_NAMES:
        vision = {re.sub(old, new, name): value for name, value in vision.items()}
    try:
        width, patch = vision["embeddings.patch_embedding.weight"].shape[0::3]
        n = vision["embeddings.position_embedding"].shape[1] - 1
        eyes = BlipVisionConfig(
            hidden_size=width,
            intermediate_size=len(vision["encoder.layers.0.mlp.fc1.weight"]),
            num_hidden_layers=_layers(vision, r"encoder\.layers\.(\d+)\."),
            num_attention_heads=max(1, width // 64),
            image_size=round(n**0.5) * patch,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        vocabulary, hidden = text["embeddings.word_embeddings.weight"].shape
        reader = BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            encoder_hidden_size=text["encoder.layer.0.crossattention.self.key.weight"].shape[1],
            intermediate_size=len(text["encoder.layer.0.intermediate.dense.weight"]),
            num_hidden_layers=_layers(text, r"encoder\.layer\.(\d+)\."),
            num_attention_heads=max(1, hidden // 64),
            max_position_embeddings=len(text["embeddings.position_embeddings.weight"]),
        )
    except KeyError as error:
        raise InputError(f"the weights are not those of ImageReward: there is no entry for {error.args[0]!r}") from None
    networks = BlipVisionModel(eyes), BlipTextModel(reader, add_pooling_layer=False)
    for network, weights in zip(networks, (vision, text), strict=True):
        missing, _ = network.load_state_dict(weights, strict=False)
        if missing:
            raise InputError(
                f"the weights are not those of ImageReward: {len(missing)} are missing, first {missing[0]!r}"
            )
    return tuple(network.eval().requires_grad_(False) for network in networks)


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _layers(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max((int(m[1]) for name in state if (m := re.match(pattern, name))), default=-1)
