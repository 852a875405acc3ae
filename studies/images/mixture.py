"""Images whose law is known: a mixture of Gaussians of few factors, fitted to clusters of real images.

    p_t(x) = sum_k w_k N(x; mu_k, U_k diag(l_k) U_k^T + floor + t^2),        p(c | x) = sum_k p(k | x) p(c | k)

Clusters are found without labels, and p(c | k) is the share of label c in cluster k: some clusters are pure, others
hold fours and nines. Then `p(x | c)` has the weights `w_k p(c | k) / p(c)`, and the unconditional model is the mixture
of the conditional ones, so guidance has a known answer,

    p(x | c)^w p(x)^(1-w)  ~  p(x | c) p(c | x)^(w-1),

and draws of p(x | c) that are kept with probability p(c | x)^(w-1) <= 1 are exact. It prefers pure clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import crepe_diffusion as cd
from crepe_diffusion.models import Model
from crepe_diffusion.processes import FisherTable, Gaussian, Process

__all__ = ["FactorLaw", "FactorMixture", "fit_law", "guided_draws", "guided_log_mass", "measured_process"]


@dataclass(frozen=True)
class FactorLaw:
    """Weights (k,), means (k, n), axes (k, n, q) with orthonormal columns, their variances (k, q), labels (k, classes).

    `floor` is the variance of every direction, that of the factors is added to it; `labels` is p(c | k).
    """

    weights: Tensor
    means: Tensor
    axes: Tensor
    variances: Tensor
    floor: float
    labels: Tensor
    event_shape: tuple[int, ...]

    def to_tensors(self) -> dict[str, Tensor]:
        floor, shape = torch.tensor(self.floor, dtype=torch.float64), torch.tensor(self.event_shape)
        tensors = {
            name: getattr(self, name).contiguous() for name in ("weights", "means", "axes", "variances", "labels")
        }
        return tensors | {"floor": floor, "event_shape": shape}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> FactorLaw:
        rest = {name: x for name, x in tensors.items() if name not in ("floor", "event_shape")}
        return cls(**rest, floor=float(tensors["floor"]), event_shape=tuple(tensors["event_shape"].tolist()))

    def log_components(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """`log N_k(x)` (rows, k), and the coordinates of x - mu_k along the factors (rows, k, q)."""
        x = x.flatten(1)
        n, q = self.axes.shape[1:]
        z = (x @ self._flat_axes()).unflatten(1, (-1, q)) - torch.einsum("kn,knq->kq", self.means, self.axes)
        square = x.square().sum(1, keepdim=True) - 2 * x @ self.means.T + self.means.square().sum(1)
        low = (self.floor + t * t)[:, None]
        high = low[..., None] + self.variances
        quadratic = square / low - (z.square() * (1 / low[..., None] - 1 / high)).sum(2)
        log_det = (n - q) * low.log() + high.log().sum(2) + n * math.log(2 * math.pi)
        return -0.5 * (quadratic + log_det), z

    def denoise(self, x: Tensor, t: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """`E[x_0 | x]` for several weights (k,) of the components at once."""
        log_components, z = self.log_components(x, t)
        low = (self.floor + t * t)[:, None]
        shrink = self.floor / low
        along = z * ((self.variances + self.floor) / (low[..., None] + self.variances) - shrink[..., None])
        found = []
        for w in weights:
            r = torch.softmax(w.log() + log_components, 1)
            moved = (r[..., None] * along).flatten(1) @ self._flat_axes().T
            found.append((shrink * x.flatten(1) + (1 - shrink) * (r @ self.means) + moved).reshape(x.shape))
        return found

    def _flat_axes(self) -> Tensor:
        return self.axes.permute(1, 0, 2).flatten(1)

    def class_log_probability(self, x: Tensor, label: int, t: float) -> Tensor:
        """`log p_t(c | x)`."""
        log_joint = self.log_components(x, x.new_full((len(x),), t))[0] + self.weights.log()
        return (log_joint + self.labels[:, label].log()).logsumexp(1) - log_joint.logsumexp(1)

    def conditional(self, label: int, process: Process | None = None) -> FactorMixture:
        return FactorMixture(self, self.weights * self.labels[:, label], process)

    def unconditional(self, process: Process | None = None) -> FactorMixture:
        return FactorMixture(self, self.weights, process)


class FactorMixture(Model):
    """Components of a law with weights of their own. Models of one law share their evaluation, as one network would."""

    dtype = torch.float64

    def __init__(self, law: FactorLaw, weights: Tensor, process: Process | None = None):
        self.law, self.weights, self.event_shape = law, weights / weights.sum(), law.event_shape
        self._process = process or Gaussian()

    def process(self) -> Process:
        return self._process

    @property
    def network(self) -> Hashable:
        return id(self.law)

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.law.denoise(x, t, [self.weights])[0]

    def predict_together(self, models: Sequence[Model], x: Tensor, t: Tensor) -> list[Tensor]:
        return self.law.denoise(x, t, [m.weights for m in models if isinstance(m, FactorMixture)])

    def responsibilities(self, x: Tensor, t: float) -> Tensor:
        """The posterior probability of each component, (rows, components)."""
        return torch.softmax(self.weights.log() + self.law.log_components(x, x.new_full((len(x),), t))[0], 1)

    def log_prob(self, x: Tensor, t: float) -> Tensor:
        """`log p_t(x)`, exactly."""
        return (self.weights.log() + self.law.log_components(x, x.new_full((len(x),), t))[0]).logsumexp(1)

    def sample(self, n: int, stream: cd.Stream, t: float = 0.0) -> Tensor:
        """Exact draws at noise t."""
        law = self.law
        k = stream.at("component").categorical(self.weights.log().expand(n, -1))
        along = stream.at("factors").normal((n, law.axes.shape[2])) * law.variances[k].sqrt()
        rest = stream.at("floor").normal((n, law.means.shape[1])) * math.sqrt(law.floor + t * t)
        x = law.means[k] + rest
        for j in k.unique().tolist():
            here = k == j
            x[here] += along[here] @ law.axes[j].T
        return x.reshape(n, *self.event_shape)


def fit_law(x: Tensor, label: Tensor, n_components: int = 40, n_factors: int = 12, n_rounds: int = 20) -> FactorLaw:
    """Clusters by k-means, then the main directions of each, and one floor for all others."""
    event, flat = tuple(x.shape[1:]), x.flatten(1).double()
    pick = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:n_components]
    centres = flat[pick]
    for _ in range(n_rounds):
        nearest = torch.cdist(flat, centres).argmin(1)
        centres = torch.stack([flat[nearest == k].mean(0) for k in range(n_components)])
    parts, left = [], 0.0
    for k in range(n_components):
        own = flat[nearest == k]
        values, vectors = torch.linalg.eigh(torch.cov(own.T))
        share = torch.bincount(label[nearest == k], minlength=int(label.max()) + 1).double() / len(own)
        parts.append((own.mean(0), vectors[:, -n_factors:], values[-n_factors:], share))
        left += len(own) * float(values[:-n_factors].sum())
    means, axes, variances, labels = map(torch.stack, zip(*parts, strict=True))
    floor = left / (len(flat) * (flat.shape[1] - n_factors))
    weights = torch.bincount(nearest, minlength=n_components).double() / len(flat)
    return FactorLaw(weights, means, axes, (variances - floor).clamp(min=1e-6), floor, labels, event)


def guided_draws(law: FactorLaw, label: int, scale: float, n: int, stream: cd.Stream, t: float) -> tuple[Tensor, float]:
    """n exact draws of `p_t(x|c)^w p_t(x)^(1-w)` for w = scale >= 1, and the share of proposals that were kept."""
    kept, tried, model = [torch.zeros(0, *law.event_shape, dtype=torch.float64)], 0, law.conditional(label)
    while sum(map(len, kept)) < n:
        x = model.sample(2 * n, stream.at("try", tried), t)
        log_p = (scale - 1) * law.class_log_probability(x, label, t)
        kept.append(x[stream.at("keep", tried).bernoulli(log_p)])
        tried += 2 * n
    x = torch.cat(kept)
    return x[:n], len(x) / tried


def guided_log_mass(law: FactorLaw, label: int, scale: float, stream: cd.Stream, t: float, n: int = 10_000) -> float:
    """log of the mean of `p_t(c | x)^(w-1)` over draws of p_t(x | c), which is `log Z_t + (w - 1) log p(c)`."""
    x = law.conditional(label).sample(n, stream, t)
    return float(((scale - 1) * law.class_log_probability(x, label, t)).logsumexp(0)) - math.log(n)


def measured_process(models: Sequence[FactorMixture], ladder: cd.Ladder, n: int = 1000, seed: int = 0) -> Gaussian:
    """Kernels with one variance per principal direction of the first model, measured on exact draws of every model.

    They are measured at the levels of the ladder and interpolated between them.
    """
    stream = cd.Stream(seed)
    draws = [model.sample(n, stream.at("draws", j)) for j, model in enumerate(models)]
    axes = torch.linalg.eigh(torch.cov(draws[0].flatten(1).T))[1].T.flip(0).contiguous()
    process = Gaussian(variance="fisher-diagonal", basis=axes)
    tables = [
        cd.information_from_data(model, x, ladder.levels, process, stream.at("noise", j)).state_dict()
        for j, (model, x) in enumerate(zip(models, draws, strict=True))
    ]
    values, mean = (torch.cat([table[key] for table in tables]) for key in ("values", "mean"))
    return process.fitted(FisherTable(ladder.levels, values, mean))
