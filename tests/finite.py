"""Finite toys whose laws are known: masked and uniform tokens, and a line of points with Gaussian-shaped kernels.

Each toy gives a chain with a proposal that matches no part of its target, all its states, and the exact
log-densities of its levels, computed here from the definition and not by the package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.batches import rows_like
from crepe_diffusion.processes.base import Coefficients, Evaluation, Process
from crepe_diffusion.random import Stream

TASKS = ("tempering", "tilting", "composition", "guidance", "everything")
POWER = 3.0


def random_table(shape: tuple[int, ...], seed: int) -> Tensor:
    return Stream(seed).uniform((1, *shape))[0] + 0.15


def reward_on_tokens(p: Tensor) -> Tensor:
    """Asymmetric in tokens and positions; sees probabilities (rows, length, V)."""
    v = torch.arange(p.shape[-1], dtype=p.dtype)
    place = 1 + torch.arange(p.shape[1], dtype=p.dtype)
    return ((p * (v * v - 1.3 * v)).sum(-1) * place).sum(-1)


def build(p: cd.models.Model, q: cd.models.Model, task: str, reward: object) -> tuple[cd.Target, tuple[float, ...]]:
    """The target of a task, and proposal exponents that are not its own."""
    tilt = {"anneal": cd.anneal.power(POWER, floor=1e-3), "negligible": 0.0}
    if task == "tempering":
        return p**1.7, (0.8,)
    if task == "tilting":
        return p.tilt(reward, **tilt), (1.2,)
    if task == "composition":
        return p * q, (0.6, 0.9)
    if task == "guidance":
        return cd.guided(conditional=q, unconditional=p, scale=1.8), (0.3, 0.7)
    return (p**-0.4 * q**1.9).tilt(reward, **tilt), (0.2, 0.5)


@dataclass
class Toy:
    chain: cd.ReplicaExchange
    states: Tensor
    log_pi: Tensor


def gamma(m: int, n_levels: int) -> float:
    """The annealing of level m, from the definition."""
    start = 1e-3 ** (1 / POWER)
    return (start + (1 - start) * (1 - m / (n_levels - 1))) ** POWER


def tokens(
    kind: str,
    task: str,
    *,
    vocab: int = 3,
    length: int = 1,
    n_levels: int = 3,
    substeps: int = 1,
    explorer: object = None,
    oracle: bool = False,
    dependent: bool = False,
    prompt: Tensor | None = None,
    at_once: int | None = None,
    nodes: int = 20,
    counted: bool = False,
    **options: object,
) -> Toy:
    """One position, or several, which are independent of each other unless `dependent`.

    `at_once` and `nodes` are those of the process; `oracle` replaces ratios by exact densities; `counted` fixes the
    number of masks of each level.
    """
    shape = (vocab,) * length

    def table(seed: int) -> Tensor:
        if dependent or length == 1:
            return random_table(shape, seed)
        parts = [random_table((vocab,), seed + 10 * i) for i in range(length)]
        joint = parts[0]
        for part in parts[1:]:
            joint = joint[..., None] * part
        return joint

    p, q = (cd.models.TokenTable(table(seed), kind, prompt=prompt) for seed in (1, 2))
    target, exponents = build(p, q, task, reward_on_tokens)
    process = replace(p.process(), log_probs=tuple(m.log_prob for m in target.models) if oracle else None)
    process = replace(process, at_once=at_once, **({"nodes": nodes} if kind == "uniform" else {}))
    process = process.counted() if counted else process
    chain = cd.ReplicaExchange(
        target,
        cd.ladder.linear(n_levels, substeps=substeps),
        proposal=cd.Proposal(exponents=exponents),
        explorer=explorer,
        process=process,
        **options,
    )
    states = p.all_states()
    if prompt is not None:
        states = states[((states == prompt) | (prompt < 0)).all(1)]
    total = sum(target.exponents)
    log_pi = []
    for m in range(n_levels):
        t = torch.tensor(m / (n_levels - 1), dtype=torch.float64)
        value = sum(c * model.log_prob(states, t).nan_to_num(neginf=-1e9) for model, c in target.factors)
        impossible = target.models[0].log_prob(states, t) == -torch.inf
        if counted:
            n_free = length if prompt is None else int((prompt < 0).sum())
            impossible |= (states == vocab).sum(1) != round(m / (n_levels - 1) * n_free)
        if target.rewards:
            t_rows = t.expand(len(states))
            mixed = torch.softmax(
                sum(c / total * model.predict(states, t_rows).clamp(min=-1e4) for model, c in target.factors),
                -1,
            )
            value = value + gamma(m, n_levels) * reward_on_tokens(mixed)
        log_pi.append(torch.where(impossible, -torch.inf, value))
    return Toy(chain, states, torch.stack(log_pi))


# -- a line of points -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line(Process):
    """Points 0..n-1 with Gaussian-shaped noising; the proposal's noising kernel leans on what it knows of x_s.

    A prediction is the exact reversal: log B_j(. | x_t) over the points one step below.
    """

    log_noising: tuple[Tensor, ...]
    log_top: Tensor
    is_discrete: ClassVar[bool] = True

    def _f(self, x_s: Tensor, s: Tensor) -> Tensor:
        return torch.stack(self.log_noising)[s.long(), x_s[:, 0]][:, None]

    def _up(self, x_s: Tensor, drift: Tensor, s: Tensor, coefficients: Coefficients) -> Tensor:
        return torch.log_softmax(self._f(x_s, s) + coefficients.k_up * drift.clamp(min=-50), -1)

    def _down(self, drift: Tensor, coefficients: Coefficients) -> Tensor:
        return torch.log_softmax(coefficients.k_down * drift, -1)

    def noise(self, stream: Stream, like: Tensor, t: float, coefficients: Coefficients) -> Tensor:
        return stream.categorical(self.log_top.expand(*like.shape, -1))

    def drift(
        self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], guidance: Tensor | None, coefficients: Coefficients
    ) -> Tensor:
        return sum(c * p for c, p in zip(coefficients.proposal, predictions, strict=True))

    def step(
        self, x: Tensor, seen: Evaluation, s: Tensor, t: Tensor, up: Tensor, stream: Stream, coefficients: Coefficients
    ) -> Tensor:
        n = seen.drift.shape[-1]
        rise = self._up(x, seen.drift, s.clamp(max=len(self.log_noising) - 1), coefficients)
        log_p = torch.where(rows_like(up, seen.drift), rise, self._down(seen.drift, coefficients))
        stay = torch.nn.functional.one_hot(x, n).to(torch.float64).log()
        return stream.categorical(torch.where(rows_like(s == t, log_p), stay, log_p))

    def kernel_ratios(
        self,
        x_s: Tensor,
        x_t: Tensor,
        at_s: Evaluation,
        at_t: Evaluation,
        s: Tensor,
        t: Tensor,
        coefficients: Coefficients,
    ) -> tuple:
        s = s.clamp(max=len(self.log_noising) - 1)
        pick = lambda log_p, x: log_p.gather(-1, x[..., None])[:, 0, 0]  # noqa: E731
        up = pick(self._f(x_s, s), x_t)
        models = torch.stack([pick(p, x_s) - up for p in at_t.predictions])
        return models, pick(self._down(at_t.drift, coefficients), x_s) - pick(
            self._up(x_s, at_s.drift, s, coefficients), x_t
        )

    def expectation(self, x: Tensor, t: Tensor, predictions: tuple[Tensor, ...], coefficients: Coefficients) -> Tensor:
        v = torch.arange(predictions[0].shape[-1], dtype=torch.float64)
        return sum(
            c / coefficients.total * (p.exp() * v).sum(-1)
            for c, p in zip(coefficients.target, predictions, strict=True)
        )


class LineModel(cd.models.Model):
    """Marginals p_i = p_{i-1} F_i, and the exact reversal of each step."""

    def __init__(self, p: Tensor, noising: list[Tensor]):
        self.event_shape, self.dtype = (1,), torch.float64
        self.marginals = [p / p.sum()]
        for f in noising:
            self.marginals.append(self.marginals[-1] @ f)
        back = [torch.full((len(p), len(p)), 1 / len(p), dtype=torch.float64).log()]
        for i, f in enumerate(noising):
            back.append((self.marginals[i][:, None] * f / self.marginals[i + 1]).T.log())
        self.back = torch.stack(back)

    def process(self) -> Process:
        raise NotImplementedError

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.back[t.long(), x[:, 0]][:, None]


def line(task: str, *, n: int = 3, n_levels: int = 3, substeps: int = 1, explorer: object = None) -> Toy:
    """Times are step numbers; the last step forgets everything, so that the noise end is known."""
    steps = (n_levels - 1) * substeps
    points = torch.arange(n, dtype=torch.float64)
    noising = []
    for i in range(steps):
        width = 0.6 + 0.5 * i
        f = torch.exp(-0.5 * ((points[:, None] - 0.9 * points - 0.1) / width) ** 2)
        noising.append(f / f.sum(1, keepdim=True))
    p, q = (LineModel(random_table((n,), seed), noising) for seed in (3, 4))
    target, exponents = build(p, q, task, lambda z: 0.7 * (z[:, 0] - 0.4) ** 2)
    log_pi = []
    for m in range(n_levels):
        i = m * substeps
        value = sum(c * model.marginals[i].log() for model, c in target.factors)
        if target.rewards:
            total = sum(target.exponents)
            z = sum(c / total * (model.back[i].exp() * points).sum(-1) for model, c in target.factors)
            value = value + gamma(m, n_levels) * 0.7 * (z - 0.4) ** 2
        log_pi.append(value)
    process = Line(tuple(f.log() for f in noising), log_pi[-1])
    chain = cd.ReplicaExchange(
        target,
        cd.ladder.of(range(steps + 1), substeps=substeps),
        process=process,
        proposal=cd.Proposal(k=(0.3, 0.8), exponents=exponents),
        explorer=explorer,
    )
    return Toy(chain, torch.arange(n)[:, None], torch.stack(log_pi))
