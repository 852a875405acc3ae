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
from crepe_diffusion.devices import is_home
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.processes import Coefficients, Discrete, Evaluation, Masked, Uniform
from crepe_diffusion.processes.asked import Steps
from crepe_diffusion.processes.discrete import at_positions, in_turn
from crepe_diffusion.processes.uniform import Jumps, Replaced
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
    return path.reward_s - path.reward_t + _weighted(coefficients, path.models) - path.proposal


def log_target_ratio(
    evaluate: Evaluator,
    x: Shaped[Tensor, "rows *event"],
    y: Shaped[Tensor, "rows *event"],
    at_x: Evaluation,
    at_y: Evaluation,
    t: Float[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """`log pi_t(y) - log pi_t(x)` at one time, as exact as `Process.log_density_ratios`; evaluates nothing."""
    t = t.to(evaluate.device, evaluate.real)
    ratios = evaluate.process.log_density_ratios(x, y, at_x, at_y, t)
    return _weighted(evaluate.coefficients, ratios) + at_y.reward - at_x.reward


def _weighted(coefficients: Coefficients, models: Tensor) -> Tensor:
    """`sum_j c_j L_j`."""
    return torch.tensor(coefficients.target, dtype=models.dtype, device=models.device) @ models


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
    gets a log-work of NaN, which every kernel rejects. `index` and `direction` are on the CPU, all else on the model's
    device, which is waited for once per evaluation (and once more where it must be seen which tokens change).
    """
    coefficients, process = evaluate.coefficients, evaluate.process
    if isinstance(process, Masked) and process.takes_turns:
        end = index + n_steps * direction
        s, t = (evaluate.ladder.times[i] for i in (torch.minimum(index, end), torch.maximum(index, end)))
        tokens, possible = _tokens_home(x, seen.possible)
        turns = process.turns(tokens, s, t, direction > 0, stream.at("turns"))
        if not evaluate.keeps_predictions:
            return _turns_asking(evaluate, process, x, seen, s, t, direction, turns, stream, end_rewards)
        # A row that stays may have been drawn again; one without weight may owe that to a prediction.
        fresh = (direction == 0) | ((turns.flatten(1).amax(1) == 0) & ~possible)
        return _turns(evaluate, process, x, seen, s, t, direction, turns, fresh, stream, end_rewards)
    if isinstance(process, Discrete) and not evaluate.keeps_predictions:
        return _steps_asking(evaluate, process, x, seen, index, direction, n_steps, stream, end_rewards)
    times, moves, ways = evaluate.times, direction != 0, direction.to(x.device)
    up, moving = ways > 0, ways != 0
    start_reward = seen.reward
    models = torch.zeros(len(coefficients.target), len(x), dtype=evaluate.real, device=x.device)
    proposal, nothing = torch.zeros_like(models[0]), models.new_zeros(())
    for k in range(n_steps):
        s, t = process.ends(times, index.to(x.device), ways, coefficients)
        index = index + direction
        x_new = process.step(x, seen, s, t, up, stream.at(k), coefficients)
        last = k == n_steps - 1
        seen_new = evaluate(x_new, evaluate.ladder.times[index], rewards=last and end_rewards)
        step_models, step_proposal = process.step_ratios(x, x_new, seen, seen_new, s, t, up, coefficients)
        at_once = process.positions_at_once(x) if isinstance(process, Uniform) else None
        if isinstance(process, Uniform) and at_once is not None:
            at_t = tuple(
                q.where(rows_like(up, q), p) for p, q in zip(seen.predictions, seen_new.predictions, strict=True)
            )
            x_s, x_t = _ends(x, x_new, up)
            step_models = _detour(evaluate, process, x_s, x_t, at_t, s, t, moves, at_once, stream.at(k, "detour"))
        if not last:
            step_models = step_models.where(seen_new.possible, torch.nan)
        models = models + torch.where(moving, step_models, nothing)
        proposal = proposal + torch.where(moving, step_proposal, nothing)
        x, seen = x_new, seen_new
    return _path(x, seen, start_reward, up, models, proposal)


def _path(x: Tensor, seen: Evaluation, start_reward: Tensor, up: Tensor, models: Tensor, proposal: Tensor) -> Path:
    """The path of rows that are now at x, and began with these rewards."""
    reward_s, reward_t = torch.where(up, start_reward, seen.reward), torch.where(up, seen.reward, start_reward)
    return Path(x, seen, reward_s, reward_t, models, proposal)


def _tokens_home(x: Tensor, possible: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and a boolean of each row on the CPU, in one transfer."""
    if is_home(x):
        return x, possible
    both = torch.cat([x.flatten(1), possible[:, None].to(x.dtype)], 1).cpu()
    return both[:, :-1].reshape(x.shape), both[:, -1].bool()


def _turns(
    evaluate: Evaluator,
    process: Masked,
    x: Tensor,
    seen: Evaluation,
    s: Tensor,
    t: Tensor,
    direction: Tensor,
    turns: Tensor,
    fresh: Tensor,
    stream: Stream,
    end_rewards: bool,
) -> Path:
    """A walk from one end of (s, t) to the other on which positions change in their turns.

    A conditional is read at the noisier end of its change, whichever way the row walks, so that the ratio does
    not depend on the direction. Sub-steps in between would change neither the law of the path nor its ratio. `fresh`
    rows are evaluated even if nothing changes. Turns are on the CPU, where they decide which rows are evaluated.
    """
    last, start, start_reward, device = turns.flatten(1).amax(1), x, seen.reward, x.device
    up, moving, end = direction.to(device) > 0, direction.to(device) != 0, last.to(device)
    when, which = torch.where(direction > 0, t, s), evaluate.which(len(x))
    s, t = s.to(device, evaluate.real), t.to(device, evaluate.real)
    seen = Evaluation(tuple(p.clone() for p in seen.predictions), seen.drift.clone(), seen.reward.clone())
    log_p = torch.zeros(len(seen.predictions) + 1, len(x), dtype=evaluate.real, device=device)
    for turn in range(1, max(int(last.max()), int(fresh.any())) + 1):
        positions, chosen = (part.to(device) for part in in_turn(turns, turn))
        x_new = process.change(x, positions, chosen, at_positions(seen.drift, positions), up, stream.at(turn))
        falling = process.log_conditionals(seen, x_new, positions, chosen)
        rows = ((last >= turn) | (fresh & (turn == 1))).nonzero()[:, 0]
        here = rows.to(device)
        seen_new = evaluate(x_new[here], t[here], rewards=False, which=which[rows])
        for old, new in zip(_parts(seen), _parts(seen_new), strict=True):
            old.index_copy_(0, here, new)
        rising = process.log_conditionals(seen, x, positions, chosen)
        log_p = log_p + torch.where(up, rising, falling)
        log_p[:-1] = log_p[:-1].where(seen.possible | (end <= turn), torch.nan)
        x = x_new
    x_s, x_t = _ends(start, x, up)
    log_p = (log_p + process.coin_ratio(x_s, x_t, s, t)).where(moving, 0.0)
    seen = evaluate.known(x, when, seen, rewards=end_rewards)
    models = process.known_ratios(log_p[:-1], x_s, x_t, s, t).where(moving, 0.0)
    return _path(x if x is not start else x.clone(), seen, start_reward, up, models, log_p[-1])


def _turns_asking(
    evaluate: Evaluator,
    process: Masked,
    x: Tensor,
    seen: Evaluation,
    s: Tensor,
    t: Tensor,
    direction: Tensor,
    turns: Tensor,
    stream: Stream,
    end_rewards: bool,
) -> Path:
    """The walk of `_turns`, with the same draws, where no prediction is kept between turns.

    Every turn asks for its tokens at the noisier end of its change. A walk of n turns then costs n rows as well, since
    its cleaner end is not evaluated; one more if a reward looks at predictions.
    """
    last, start, start_reward, device = turns.flatten(1).amax(1), x, seen.reward, x.device
    up, moving, when = direction.to(device) > 0, direction.to(device) != 0, torch.where(direction > 0, t, s)
    s, t, which = s.to(device, evaluate.real), t.to(device, evaluate.real), evaluate.which(len(x))
    log_p = torch.zeros(len(evaluate.coefficients.target) + 1, len(x), dtype=evaluate.real, device=device)
    for turn in range(1, int(last.max()) + 1):
        rows = (last >= turn).nonzero()[:, 0]
        here = rows.to(device)
        asked = process.asked(x, turns, turn, up, stream.at(turn)).rows(here)
        noisy = process.noisier(x[here], asked)
        tokens, found = evaluate.ask(noisy, t[here], asked, which=which[rows])
        x = x.index_copy(0, here, process.changed(noisy, asked, tokens))
        log_p[:, here] += found
    x_s, x_t = _ends(start, x, up)
    log_p = (log_p + process.coin_ratio(x_s, x_t, s, t)).where(moving, 0.0)
    seen = evaluate(x, when, rewards=end_rewards)
    models = process.known_ratios(log_p[:-1], x_s, x_t, s, t).where(moving, 0.0)
    return _path(x if x is not start else x.clone(), seen, start_reward, up, models, log_p[-1])


def _steps_asking(
    evaluate: Evaluator,
    process: Discrete,
    x: Tensor,
    seen: Evaluation,
    index: Tensor,
    direction: Tensor,
    n_steps: int,
    stream: Stream,
    end_rewards: bool,
) -> Path:
    """The steps of `walk`, with the same draws, where no prediction is kept: each asks once, at its noisier end.

    Rows that stay are not evaluated. A reward that looks at predictions costs one row more, at the end of the walk, and
    so does each step of a process whose ratio has a way of its own.
    """
    start, start_reward, device = x, seen.reward, x.device
    up, moving, moves = direction.to(device) > 0, direction.to(device) != 0, direction != 0
    rows, which = moves.nonzero()[:, 0], evaluate.which(len(x))
    here, times, begin, end = rows.to(device), evaluate.ladder.times, index, index + n_steps * direction
    log_p = torch.zeros(len(evaluate.coefficients.target) + 1, len(x), dtype=evaluate.real, device=device)
    at_once = process.positions_at_once(x) if isinstance(process, Uniform) else None
    for k in range(n_steps if len(rows) else 0):
        s, t = (times[torch.stack([index, index + direction])].sort(0).values).to(device, evaluate.real)
        index = index + direction
        noisy = process.noised(x, s, t, stream.at(k)).where(rows_like(up, x), x)
        asked = Steps.between(process, x, s, up, stream.at(k)).rows(here)
        tokens, found = evaluate.ask(noisy[here], t[here], asked, which=which[rows])
        clean = x.index_copy(0, here, tokens.reshape(-1, *x.shape[1:]))
        if isinstance(process, Uniform) and at_once is not None:
            branch = stream.at(k, "detour")
            found[:-1] = _detour(evaluate, process, clean, noisy, None, s, t, moves, at_once, branch)[:, here]
        log_p[:, here] += found
        x = torch.where(rows_like(up, x), noisy, clean)
    seen = evaluate(x, times[end], rewards=end_rewards)
    x_s, x_t = _ends(start, x, up)
    s, t = (times[i].to(device, evaluate.real) for i in (torch.minimum(begin, end), torch.maximum(begin, end)))
    models = process.known_ratios(log_p[:-1], x_s, x_t, s, t).where(moving, 0.0)
    return _path(x if x is not start else x.clone(), seen, start_reward, up, models, log_p[-1])


def _ends(start: Tensor, end: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The clean and the noisy end of a walk."""
    rises = rows_like(up, start)
    return torch.where(rises, start, end), torch.where(rises, end, start)


def _detour(
    evaluate: Evaluator,
    process: Uniform,
    x_s: Tensor,
    x_t: Tensor,
    at_t: tuple[Tensor, ...] | None,
    s: Tensor,
    t: Tensor,
    moving: Tensor,
    at_once: int,
    stream: Stream,
) -> Tensor:
    """`log p_s(x_s) - log p_t(x_t)` of every model, (models, rows), along a way on which little changes at once.

    At time t positions change in random order, then time falls at x_s. The order has the same law both ways. At x_t it
    is evaluated again if predictions are not given.
    """
    device, which = x_s.device, evaluate.which(len(x_s))
    rank = stream.order((x_s != x_t).flatten(1).cpu() & moving[:, None])
    turns = (rank + at_once - 1).div(at_once, rounding_mode="floor")
    last, x, n_models = turns.amax(1), x_t, len(evaluate.coefficients.target)
    models = torch.zeros(n_models, len(x), dtype=evaluate.real, device=device)
    for turn in range(1, int(last.max()) + 1):
        positions, chosen = (part.to(device) for part in in_turn(turns, turn))
        jumps = Jumps(positions, chosen, x_s.flatten(1).gather(1, positions))
        if turn == 1 and at_t is not None:
            models = models + jumps.of(process, x, t, at_t, evaluate.coefficients)[1][:-1]
        else:
            rows = (last >= turn).nonzero()[:, 0]
            here = rows.to(device)
            models[:, here] += evaluate.ask(x[here], t[here], jumps.rows(here), which=which[rows])[1][:-1]
        x = process.changed(x, jumps, torch.where(chosen, jumps.given, jumps.here(x)))
    rows = moving.nonzero()[:, 0]
    if not len(rows):
        return models
    asked = Replaced.anywhere(process, x_s)

    def replaced(some: Tensor, times: Tensor) -> Tensor:
        here = rows[some].to(device)
        return evaluate.ask(x_s[here], times, asked.rows(here), which=which[rows[some]])[1][:-1]

    low, high = torch.stack([s, t]).to("cpu", torch.float64)[:, rows]
    models[:, rows.to(device)] += process.log_time_ratios(process.n_free(x_s.shape[1:]), low, high, replaced)
    return models


def _parts(seen: Evaluation) -> tuple[Tensor, ...]:
    return (*seen.predictions, seen.drift, seen.reward)


def denoise(
    evaluate: Evaluator, x: Shaped[Tensor, "rows *event"], s: float, t: float, stream: Stream
) -> Shaped[Tensor, "rows *event"]:
    """One plain step of every row from t down to s by the proposal, without a ratio.

    Costs one evaluation per row; where positions change in turn, one per turn of a row.
    """
    process, n, device = evaluate.process, len(x), x.device
    down = torch.zeros(n, dtype=torch.bool, device=device)
    to, since = (torch.full((n,), time, dtype=evaluate.real, device=device) for time in (s, t))
    if isinstance(process, Masked) and process.takes_turns:
        low, high = (torch.full((n,), time, dtype=torch.float64) for time in (s, t))
        turns = process.turns(x.cpu(), low, high, torch.zeros(n, dtype=torch.bool), stream.at("turns"))
        last, which = turns.flatten(1).amax(1), evaluate.which(n)
        for turn in range(1, int(last.max()) + 1):
            rows = (last >= turn).nonzero()[:, 0]
            here = rows.to(device)
            asked = process.asked(x, turns, turn, down, stream.at(turn)).rows(here)
            tokens, _ = evaluate.ask(x[here], since[here], asked, which=which[rows])
            x = x.index_copy(0, here, process.changed(x[here], asked, tokens))
        return x
    if isinstance(process, Discrete) and not evaluate.keeps_predictions:
        return evaluate.ask(x, since, Steps.between(process, x, to, down, stream))[0].reshape(x.shape)
    seen = evaluate(x, since, rewards=False)
    return process.step(x, seen, to, since, down, stream, evaluate.coefficients)
