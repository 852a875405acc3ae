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

from crepe_diffusion.batches import rows_like
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Coefficients, Evaluation
from crepe_diffusion.processes.discrete import InTurn, Uniform
from crepe_diffusion.random import Stream

__all__ = ["Path", "denoise", "log_target_ratio", "log_work", "walk"]


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

    `index` counts times of the ladder. Costs `n_steps` evaluations per row, one batch per step; where positions change
    in turn, one per turn of a row, and one for a row that stays. A row whose path met a prediction that is not finite
    gets a log-work of NaN, which every kernel rejects.
    """
    times, coefficients, process = evaluate.ladder.times.to(x.device), evaluate.coefficients, evaluate.process
    up, moving = direction > 0, direction != 0
    if isinstance(process, InTurn):
        end = index + n_steps * direction
        s, t = times[torch.minimum(index, end)], times[torch.maximum(index, end)]
        turns = process.turns(x, s, t, up, stream.at("turns"))
        if turns is not None:
            return _walk_in_turn(evaluate, process, x, seen, s, t, direction, turns, stream, end_rewards)
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
        at_once = process.positions_at_once(x) if isinstance(process, Uniform) else None
        if isinstance(process, Uniform) and at_once is not None:
            at_t = tuple(
                q.where(rows_like(up, q), p) for p, q in zip(seen.predictions, seen_new.predictions, strict=True)
            )
            x_s, x_t = _ends(x, x_new, up)
            step_models = _detour(evaluate, process, x_s, x_t, at_t, s, t, moving, at_once, stream.at(k, "detour"))
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


def _walk_in_turn(
    evaluate: Evaluator,
    process: InTurn,
    x: Tensor,
    seen: Evaluation,
    s: Tensor,
    t: Tensor,
    direction: Tensor,
    turns: Tensor,
    stream: Stream,
    end_rewards: bool,
) -> Path:
    """A walk from one end of (s, t) to the other on which positions change in their turns.

    A conditional is read at the noisier end of its change, whichever way the row walks, so that the ratio does
    not depend on the direction. Sub-steps in between would change neither the law of the path nor its ratio.
    """
    up, last, start, start_reward = direction > 0, turns.flatten(1).amax(1), x, seen.reward
    # A row that stays may have been drawn again; one without weight may owe that to a prediction. Both are evaluated.
    fresh = (direction == 0) | ((last == 0) & ~seen.possible)
    seen = Evaluation(tuple(p.clone() for p in seen.predictions), seen.drift.clone(), seen.reward.clone())
    log_p = torch.zeros(len(seen.predictions) + 1, len(x), dtype=torch.float64, device=x.device)
    for turn in range(1, max(int(last.max()), int(fresh.any())) + 1):
        positions, chosen = process.turn(turns, turn)
        x_new = process.change(x, positions, chosen, process.at(seen.drift, positions), up, stream.at(turn))
        falling = process.log_conditionals(seen, x_new, positions, chosen)
        rows = ((last >= turn) | (fresh & (turn == 1))).nonzero()[:, 0]
        seen_new = evaluate(x_new[rows], t[rows], rewards=False)
        for old, new in zip(_parts(seen), _parts(seen_new), strict=True):
            old.index_copy_(0, rows, new)
        rising = process.log_conditionals(seen, x, positions, chosen)
        log_p = log_p + torch.where(up, rising, falling)
        log_p[:-1] = log_p[:-1].where(seen.possible | (last <= turn), torch.nan)
        x = x_new
    x_s, x_t = _ends(start, x, up)
    log_p = (log_p + process.coin_ratio(x_s, x_t, s, t)).where(direction != 0, 0.0)
    seen = evaluate.known(x, torch.where(up, t, s), seen, rewards=end_rewards)
    return Path(
        x=x if x is not start else x.clone(),
        seen=seen,
        reward_s=torch.where(up, start_reward, seen.reward),
        reward_t=torch.where(up, seen.reward, start_reward),
        models=process.known_ratios(log_p[:-1], x_s, x_t, s, t).where(direction != 0, 0.0),
        proposal=log_p[-1],
    )


def _ends(start: Tensor, end: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The clean and the noisy end of a walk."""
    rises = rows_like(up, start)
    return torch.where(rises, start, end), torch.where(rises, end, start)


def _detour(
    evaluate: Evaluator,
    process: Uniform,
    x_s: Tensor,
    x_t: Tensor,
    at_t: tuple[Tensor, ...],
    s: Tensor,
    t: Tensor,
    moving: Tensor,
    at_once: int,
    stream: Stream,
) -> Tensor:
    """`log p_s(x_s) - log p_t(x_t)` of every model, (models, rows), along a way on which little changes at once.

    At time t positions change in random order, then time falls at x_s. The order has the same law both ways.
    """
    rank = stream.order(((x_s != x_t) & rows_like(moving, x_t)).flatten(1)).reshape(x_t.shape)
    turns = (rank + at_once - 1).div(at_once, rounding_mode="floor")
    last, x, predictions = turns.flatten(1).amax(1), x_t, tuple(p.clone() for p in at_t)
    models = torch.zeros(len(at_t), len(x), dtype=torch.float64, device=x.device)
    for turn in range(1, int(last.max()) + 1):
        y = torch.where(turns == turn, x_s, x)
        models = models + torch.stack([process.log_jump(x, y, p, t) for p in predictions])
        rows = (last > turn).nonzero()[:, 0]
        if len(rows):
            seen = evaluate(y[rows], t[rows], rewards=False)
            models[:, rows] = models[:, rows].where(seen.possible, torch.nan)
            for old, new in zip(predictions, seen.predictions, strict=True):
                old.index_copy_(0, rows, new)
        x = y
    rows = moving.nonzero()[:, 0]
    for time, weight in process.quadrature(s[rows], t[rows]) if len(rows) else ():
        seen = evaluate(x_s[rows], time, rewards=False)
        slopes = torch.stack([process.time_slope(x_s[rows], p, time) for p in seen.predictions])
        models[:, rows] -= (weight * slopes).where(seen.possible, torch.nan)
    return models


def _parts(seen: Evaluation) -> tuple[Tensor, ...]:
    return (*seen.predictions, seen.drift, seen.reward)


def denoise(
    evaluate: Evaluator, x: Shaped[Tensor, "rows *event"], s: float, t: float, stream: Stream
) -> Shaped[Tensor, "rows *event"]:
    """One plain step of every row from t down to s by the proposal, without a ratio.

    Costs one evaluation per row; where positions change in turn, one per turn of a row.
    """
    process = evaluate.process
    down = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    to, since = (torch.full((len(x),), time, dtype=torch.float64, device=x.device) for time in (s, t))
    turns = process.turns(x, to, since, down, stream.at("turns")) if isinstance(process, InTurn) else None
    if not isinstance(process, InTurn) or turns is None:
        seen = evaluate(x, since, rewards=False)
        return process.step(x, seen, to, since, down, stream, evaluate.coefficients)
    last = turns.flatten(1).amax(1)
    for turn in range(1, int(last.max()) + 1):
        positions, chosen = process.turn(turns, turn)
        rows = (last >= turn).nonzero()[:, 0]
        drift = process.at(evaluate(x[rows], since[rows], rewards=False).drift, positions[rows])
        log_q = torch.zeros(len(x), *drift.shape[1:], dtype=drift.dtype, device=x.device).index_copy_(0, rows, drift)
        x = process.change(x, positions, chosen, log_q, down, stream.at(turn))
    return x
