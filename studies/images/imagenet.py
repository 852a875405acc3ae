"""Storey 3: the paper's own networks in the paper's settings, for those who can download them.

    guidance   p(x|c)^1.7 p(x)^-0.7                 128 noise levels, exchange on the upper 100 steps
    wish       p(x|c)^1.3 p(x)^-0.3 exp(100 r(x))   64 noise levels, exchange on the upper 32 steps, r of ImageReward

`imagenet-64.toml` and `imagenet-512.toml` are runs of them; the second works on latents and decodes them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import crepe_diffusion as cd
from crepe_diffusion.rewards import ImageReward
from crepe_diffusion.run import Experiment

__all__ = ["PROMPTS", "Cost", "imagenet", "load_network", "steps"]

PROMPTS = {
    417: "a blue balloon",
    723: "a colorful pinwheel",
    496: "a green Christmas stocking",
    468: "a yellow cab with dark background",
    791: "an empty shopping cart",
}
STEPS = {"guidance": (128, 100), "wish": (64, 32)}
"""Noise levels in all, and steps from the noise end on which replicas are exchanged."""
SCALES = {"guidance": 1.7, "wish": 1.3}


def steps(task: str) -> cd.Ladder:
    """The paper's ladder: Karras levels from 0.002 to 80, one level per step, the lower ones denoised plainly."""
    n, exchanged = STEPS[task]
    return cd.ladder.karras(exchanged + 1, 0.002, 80.0, n_finish=n - 1 - exchanged)


def load_network(path: Path, kind: str = "training.networks_edm2:Precond") -> nn.Module:
    """A network whose weights `cd.models.convert_edm` wrote; `kind` is its class in the owner's own source."""
    if not path.exists():
        raise cd.InputError(f"no weights at {path}: download a pickle of EDM2 and convert it by cd.models.convert_edm")
    module, _, name = kind.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise cd.InputError(
            f"the class {kind!r} cannot be imported ({error}): clone https://github.com/NVlabs/edm2 and put it on"
            " PYTHONPATH"
        ) from error
    with safe_open(path, "pt") as file:
        about = file.metadata()
    net = make(*json.loads(about["init_args"]), **json.loads(about["init_kwargs"]))
    net.load_state_dict(load_file(path))
    loaded: nn.Module = net.eval().requires_grad_(False)
    return loaded


def target(
    net: nn.Module, partner: nn.Module | None, label: int, scale: float, vae: Any = None
) -> tuple[cd.Target, cd.models.Pretrained]:
    """The guided law, and the conditional model.

    Without a partner, the network's answer to a label of zeros stands for the unconditional model, as it must in the
    paper: there is no unconditional network for 64 x 64. It was not trained so, and a warning says it.
    """
    decode = cd.models.edm2_decoder(vae) if vae is not None else None
    conditional = cd.models.from_edm(net, label, decode=decode)
    unconditional = conditional.given(None) if partner is None else cd.models.from_edm(partner, decode=decode)
    return cd.guided(conditional, unconditional, scale), conditional


def imagenet(
    net: str,
    partner: str = "",
    vae: str = "",
    label: int = 417,
    task: str = "guidance",
    scale: float = 0.0,
    device: str = "cuda",
    kind: str = "training.networks_edm2:Precond",
) -> Experiment:
    """Guided images of an EDM2 network; `scale = 0` is the paper's strength for this task.

    `net` and `partner` are converted weights, `vae` the name of the autoencoder of latents. Rewards of a `[[reward]]`
    table are of kind `image-reward` (prompt and weights) or `brightness`, both of the decoded prediction.
    """
    if task not in STEPS:
        raise cd.InputError(f"task must be {' or '.join(STEPS)}, got {task!r}")
    networks = [load_network(Path(path), kind).to(device) for path in (net, partner) if path]
    decoder = None
    if vae:
        from diffusers import AutoencoderKL

        decoder = AutoencoderKL.from_pretrained(vae).to(device).eval().requires_grad_(False)
    law, model = target(networks[0], networks[1] if partner else None, label, scale or SCALES[task], decoder)
    if model.decode is None:
        raise cd.InputError(f"{net} is a network of latents {model.event_shape}: give its autoencoder as vae")
    decode: Callable[[Tensor], Tensor] = model.decode

    def brightness(x: Tensor) -> Tensor:
        return decode(x).flatten(1).double().mean(1)

    class OfImage:
        def __init__(self, prompt: str, weights: str):
            self.judge = ImageReward(prompt, weights).to(device)

        def __call__(self, x: Tensor) -> Tensor:
            return self.judge(decode(x))

    kinds: dict[str, Callable[..., Any]] = {"image-reward": OfImage, "brightness": brightness}
    return Experiment(law, rewards=kinds, scalars={"brightness": brightness}, defaults=defaults(task), decode=decode)


def defaults(task: str) -> dict[str, Any]:
    """The paper's ladder and kernels as a configuration."""
    n, exchanged = STEPS[task]
    ladder = {"kind": "karras", "n_levels": exchanged + 1, "sigma_min": 0.002, "sigma_max": 80.0}
    return {"ladder": ladder | {"n_finish": n - 1 - exchanged}, "sampler": {"process": {"kind": "euler-maruyama"}}}


# -- what it costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """A network and a card, as far as time and memory depend on them.

    GFLOP of one row: EDM2's table states 102 (S) and 46 (XS) billion multiply-adds, each of two operations. An A100 has
    312 TFLOP/s in half precision and 80 GB; a third of that speed is assumed.
    """

    gflop: float
    parameters: float
    event: tuple[int, ...]
    tflops: float = 312 / 3

    def rows(self, task: str, n_samples: int) -> int:
        """Rows of the guided pair for one chain: its start, its iterations, and what is denoised plainly below."""
        n, exchanged = STEPS[task]
        below = n - 1 - exchanged
        return 2 * (exchanged + 1 + n_samples * (exchanged + 1 + below))

    def hours(self, task: str, n_samples: int) -> float:
        return self.rows(task, n_samples) * self.gflop / (1000 * self.tflops) / 3600

    def gigabytes(self, task: str) -> float:
        """Weights in half precision of two networks; states with predictions, drifts and proposals in float32."""
        size = 1
        for n in self.event:
            size *= n
        states = (STEPS[task][1] + 1) * size * 4 * 8
        return (2 * 2 * self.parameters + states) / 1e9


COSTS = {
    "imagenet-64": Cost(gflop=2 * 102, parameters=280e6, event=(3, 64, 64)),
    "imagenet-512": Cost(gflop=2 * 46, parameters=125e6, event=(4, 64, 64)),
}


def cost_table(n_samples: int = 512) -> list[list[object]]:
    """For each preset and task: rows, hours and memory of one chain of so many draws."""
    rows: list[list[object]] = []
    for name, cost in COSTS.items():
        for task in STEPS:
            n, hours, memory = cost.rows(task, n_samples), cost.hours(task, n_samples), cost.gigabytes(task)
            rows.append([name, task, f"{n:,}", f"{hours:.2f}", f"{memory:.1f}"])
    return rows
