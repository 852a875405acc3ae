"""Walks along the ladder, and the one formula of this package.

    log_work(path) = r_s(x_s) - r_t(x_t) + sum_j c_j L_j(path) - L_Q(path)

for a path between the clean end (s, x_s) and the noisy end (t, x_t), in whichever direction it was walked. It
estimates `log pi_s(x_s) - log pi_t(x_t) - L_Q`. A swap is accepted with `log_work(down) - log_work(up)`, a particle
of SMC that walks down gains the log-weight `log_work(down)`, and `E_down[exp(log_work)] = Z_s / Z_t`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Coefficients, Evaluation
from crepe_diffusion.random import Stream

__all__ = ["Path", "log_target_ratio", "log_work", "walk"]


@dataclass(frozen=True)
class Path:
    """Where a walk of each row ended, and what is needed to judge it."""

    x: Shaped[Tensor, "rows *event"]
    seen: Evaluation
    reward_s: Float[Tensor, " rows"]
    reward_t: Float[Tensor, " rows"]
    models: Float[Tensor, "models rows"]
    proposal: Float[Tensor, " rows"]


def log_work(path: Path, coefficients: Coefficients) -> Float[Tensor, " rows"]:
    """The log-work of each path; the only place where these four terms meet."""
    c = torch.tensor(coefficients.target, dtype=torch.float64, device=path.models.device)
    return path.reward_s - path.reward_t + c @ path.models - path.proposal


def log_target_ratio(
    evaluate: Evaluator,
    x: Shaped[Tensor, "rows *event"],
    y: Shaped[Tensor, "rows *event"],
    at_x: Evaluation,
    at_y: Evaluation,
    t: Float[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """`log pi_t(y) - log pi_t(x)` at one time, as exact as `Process.log_density_ratios`; evaluates nothing."""
    c = torch.tensor(evaluate.coefficients.target, dtype=torch.float64, device=at_x.reward.device)
    return c @ evaluate.process.log_density_ratios(x, y, at_x, at_y, t) + at_y.reward - at_x.reward


def walk(
    evaluate: Evaluator,
    x: Shaped[Tensor, "rows *event"],
    seen: Evaluation,
    index: Int[Tensor, " rows"],
    direction: Int[Tensor, " rows"],
    n_steps: int,
    stream: Stream,
    *,
    end_rewards: bool = True,
) -> Path:
    """Every row takes `n_steps` sub-steps by the proposal: up (+1), down (-1), or stays and is evaluated again (0).

    `index` counts times of the ladder. Costs `n_steps` evaluations per row, one batch per step. A row whose path met a
    prediction that is not finite gets a log-work of NaN, which every kernel rejects.
    """
    times, coefficients, process = evaluate.ladder.times.to(x.device), evaluate.coefficients, evaluate.process
    up, moving = direction > 0, direction != 0
    start_reward = seen.reward
    models = torch.zeros(len(coefficients.target), len(x), dtype=torch.float64, device=x.device)
    proposal = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for k in range(n_steps):
        s, t = times[index + direction.clamp(max=0)], times[index + direction.clamp(min=0)]
        index = index + direction
        x_new = process.step(x, seen, s, t, up, stream.at(k), coefficients)
        last = k == n_steps - 1
        seen_new = evaluate(x_new, times[index], rewards=last and end_rewards)
        step_models, step_proposal = process.step_ratios(x, x_new, seen, seen_new, s, t, up, coefficients)
        if not last:
            step_models = step_models.where(seen_new.possible, torch.nan)
        models = models + step_models.where(moving, 0.0)
        proposal = proposal + step_proposal.where(moving, 0.0)
        x, seen = x_new, seen_new
    return Path(
        x=x,
        seen=seen,
        reward_s=torch.where(up, start_reward, seen.reward),
        reward_t=torch.where(up, seen.reward, start_reward),
        models=models,
        proposal=proposal,
    )
