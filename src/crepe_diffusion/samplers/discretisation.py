"""What the size of the steps does to means and to log Z: two steps against one of double size.

A first-order error is as large as what double steps add to it. For a path (x_s, x_m, x_t) of two steps, with the noise
n of both together, on the way of particle i, and with the error `e = sum_j c_j (L_j - log p_j,s / p_j,t)` of a ratio:

    x'   = x_s + k_up d S(x_s) + n                      the double step up, by the same noise
    g    = exp(e(x_s, x') - e(x_s, x_m) - e(x_m, x_t)) - 1
    G_i  = sum of g over all pairs of steps on the way of i
    mean(f; double) - mean(f) = sum_i w_i (G_i - mean G) f(x_i)

Weighted paths down are paths up from the target by the proposal's own kernel, so it is this kernel whose step is
doubled: `Coupled`. Of the densities only `log p_j,t(x') - log p_j,t(x_t)` is needed, a short way at one time. It costs
one evaluation per pair, none where the proposal noises as trained. For log Z alone nothing need be evaluated:
`Doubling`.

    log Z(double) - log Z  =  sum_k  log E[exp(W_double + A)] - log E[exp(W)]
    exp(A)  =  Q_double(end | start) bridge(middle | start, end)  /  Q(middle | start) Q(end | middle)

Each pair of steps is compared alone, from the particles that are weighted to its start, so that errors do not grow
with the number of steps. `A` is there because paths were made by two steps: without it, the difference of the proposals
would be taken for one of log Z. An error of the measured variance acts like a step that is too large, and is part of
both.

Paths down and paths up have errors of their own, often of opposite sign, and Bennett's estimate that of their mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from crepe_diffusion.batches import rows_like
from crepe_diffusion.devices import home, real
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.diagnostics.starting import by_eve
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Discrete, Evaluation, GaussianProcess
from crepe_diffusion.processes.asked import Steps
from crepe_diffusion.random import Stream

__all__ = ["Coupled", "Doubling"]

Point = tuple[Tensor, Evaluation]
"""States with what is known of them."""


class Doubling:
    """The comparison for both directions: `add` every pair of steps, then read `estimates`.

    It evaluates nothing where predictions are kept; else three rows per pair, counted in `rows`.
    """

    def __init__(self, evaluate: Evaluator, n: int):
        self.evaluate, self.n, self.rows = evaluate, n, 0
        process = evaluate.process
        event = torch.Size(evaluate.target.models[0].event_shape)
        # Tokens that change one by one have a ratio that is exact whatever the step (uniform ones up to a quadrature,
        # with an error of 0.001 or less on steep tables: studies/battery/nodes.py); so have known densities.
        self.exact = process.log_probs is not None or (process.is_discrete and not process.multiplies(event))
        self._value = {-1: 0.0, 1: 0.0}
        self._change = {d: torch.zeros(n, dtype=torch.float64) for d in (-1, 1)}

    def add(self, points: tuple[Point, Point, Point], log_w: Tensor, eve: Tensor, k: int, direction: int) -> None:
        """Particles at the times k, k + direction and k + 2 direction, with weights and Eves of the first."""
        times = [self.evaluate.times[k + i * direction].expand(self.n) for i in range(3)]
        (w_1, q_1), (w_2, q_2), (w, q) = (
            self._ratios(*points[a], times[a], *points[b], times[b], direction) for a, b in ((0, 1), (1, 2), (0, 2))
        )
        reward = points[2][1].reward - points[0][1].reward
        fine, double = reward - direction * (w_1 + w_2), reward - direction * w
        fine, double, a = home(fine, double, q - q_1 - q_2)
        counts = log_w > -torch.inf
        m = (log_w + fine)[counts & fine.isfinite()].logsumexp(0)
        # E[exp(A)] = 1 is known: subtracting it takes most of the noise away.
        gain = a.exp() * ((double - m).exp() - 1) - ((fine - m).exp() - 1)
        gain = gain.where(counts & gain.isfinite(), 0.0)
        weight = log_w.exp()
        mean = weight @ gain
        # On the way up particles lose what they gain on the way down.
        self._value[direction] -= direction * float(mean)
        self._change[direction] -= direction * by_eve(weight * (gain - mean), eve)

    def _ratios(
        self, x: Tensor, at_x: Evaluation, t_x: Tensor, y: Tensor, at_y: Evaluation, t_y: Tensor, direction: int
    ) -> tuple[Tensor, Tensor]:
        """`sum_j c_j L_j - L_Q` of a step from x to y, and the log of its kernel over that of the noising step."""
        process, coefficients = self.evaluate.process, self.evaluate.coefficients
        low, high = ((y, at_y, t_y), (x, at_x, t_x))[::-direction]
        c = torch.tensor(coefficients.target, dtype=real(x.device), device=x.device)

        if isinstance(process, Discrete) and not self.evaluate.keeps_predictions:
            up = torch.ones(len(x), dtype=torch.bool, device=x.device)
            asked = Steps.between(process, low[0], low[2], up, Stream(0))
            before = self.evaluate.counts.rows
            found = self.evaluate.ask(high[0], high[2], asked)[1]
            self.rows += self.evaluate.counts.rows - before
            models, proposal = found[:-1], found[-1]
            return c @ models - proposal, proposal if direction < 0 else torch.zeros_like(proposal)

        def ratios(at_low: Evaluation) -> tuple[Tensor, Tensor]:
            return process.log_ratios(low[0], high[0], at_low, high[1], low[2], high[2], coefficients)

        models, proposal = ratios(low[1])
        # Without a drift on its way up the proposal noises as the models do.
        down = ratios(replace(low[1], drift=torch.zeros_like(low[1].drift)))[1] if coefficients.k_up else proposal
        return c @ models - proposal, down if direction < 0 else down - proposal

    def estimates(self, dof: float) -> dict[str, Estimate]:
        """How much too large log Z is, by the direction of the paths it is estimated from."""
        down, up = (
            Estimate(self._value[d], float(self._change[d].norm()), dof if self._value[d] else float("inf"))
            for d in (-1, 1)
        )
        both = (self._change[-1] + self._change[1]).norm() / 2
        return {"down": down, "up": up, "bar": Estimate((down.value + up.value) / 2, float(both), down.dof)}


class Coupled:
    """`g` of every pair of steps down, for Gaussian states; costs one evaluation per pair, counted in `rows`."""

    def __init__(self, evaluate: Evaluator):
        self.evaluate, self.rows = evaluate, 0

    @staticmethod
    def applies(evaluate: Evaluator) -> bool:
        """Whether ratios have an error that double steps show: not if densities are known, nor for tokens."""
        return isinstance(evaluate.process, GaussianProcess) and evaluate.process.log_probs is None

    def gain(self, points: tuple[Point, Point, Point], k: int) -> Tensor:
        """From particles that were at the times k, k - 1 and k - 2 of the ladder, (n,) on the CPU."""
        x_t, at_t = points[0]
        t, m, s = (self.evaluate.times[i].expand(len(x_t)) for i in (k, k - 1, k - 2))
        process, coefficients = self.evaluate.process, self.evaluate.coefficients
        y = self._double_step(points, s, m, t)
        before, at_y = self.evaluate.counts.rows, at_t
        if y is not x_t:
            at_y = self.evaluate(y, t, rewards=False)
            self.rows += self.evaluate.counts.rows - before
        c = torch.tensor(coefficients.target, dtype=real(x_t.device), device=x_t.device)

        def ratios(low: Point, high: Point, s: Tensor, t: Tensor) -> Tensor:
            return process.log_ratios(low[0], high[0], low[1], high[1], s, t, coefficients)[0]

        double = ratios(points[2], (y, at_y), s, t) + process.log_density_ratios(x_t, y, at_t, at_y, t)
        gain = (c @ (double - ratios(points[2], points[1], s, m) - ratios(points[1], points[0], m, t))).expm1()
        # A path that met no finite prediction has no weight either.
        return home(gain.where(gain.isfinite(), 0.0))[0].to(torch.float64)

    def _double_step(self, points: tuple[Point, Point, Point], s: Tensor, m: Tensor, t: Tensor) -> Tensor:
        """Where one step up from x_s would have led, with the noise of both steps; x_t itself if that is the same."""
        (x_t, _), (_, at_m), (x_s, at_s) = points
        process, k = self.evaluate.process, self.evaluate.coefficients.k_up
        assert isinstance(process, GaussianProcess)
        first, second, both = (process.noising_variance(a, b)[:, 0] for a, b in ((s, m), (m, t), (s, t)))
        scale = (both / (first + second)).sqrt()
        if not k and bool((scale - 1).abs().max() < 1e-9):
            return x_t
        first, second, both, scale = (rows_like(v, x_s).to(x_s.dtype) for v in (first, second, both, scale))
        drift_s, drift_m = process.project(at_s.drift), process.project(at_m.drift)
        noise = x_t - x_s - k * (first * drift_s + second * drift_m)
        return x_s + k * both * drift_s + scale * noise
