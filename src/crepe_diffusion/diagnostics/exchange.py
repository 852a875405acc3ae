"""Whether to trust a chain: acceptance, barrier, round trips, free energies, effective sample size.

    r_m = 1 - E[min(1, alpha_m)]              rejection between levels m and m + 1
    Lambda = sum_m r_m                        communication barrier; about 2 Lambda + 1 levels are enough
    rate = 1 / (2 + 2 sum_m r_m / (1 - r_m))  predicted round trips per iteration (Syed et al. 2022)
    E_down[exp(W)] = Z_m / Z_{m+1},  E_up[exp(-W)] = Z_{m+1} / Z_m

Memory does not grow with the run: series are thinned by two whenever they fill their buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from crepe_diffusion.diagnostics.estimates import Estimate, effective_sizes, mean_of
from crepe_diffusion.errors import InputError

# A jackknife needs a few groups, and gains nothing from more than this many.
LEAST_ENTRIES, MOST_GROUPS = 4, 32
# Works within a chain are correlated for a few trips, on few levels for more of them.
PIECE_TRIPS = 10

__all__ = ["Diagnostics", "RoundTrips", "accept_probability", "enough_levels"]


class RoundTrips:
    """The index process: which replica has been where, counted and never guessed.

    A round trip leads from the noise end to the data end and back. A restart is an arrival at the data end of a
    replica that was at the noise end before, or drawn again on the way: as many fresh samples have reached the target.
    """

    def __init__(self, level: Tensor):
        self.top = level.shape[1] - 1
        self.n_trips = torch.zeros_like(level)
        self.n_restarts = torch.zeros_like(level)
        self.born = torch.zeros_like(level)
        # 0: neither at the noise end nor renewed, 1: at the noise end last, 2: at the data end since, 3: renewed.
        self.phase = torch.zeros_like(level)
        self.record(level, 0)

    def record(self, level: Tensor, iteration: int, renewed: Tensor | None = None) -> None:
        at_top, at_bottom = level == self.top, level == 0
        if renewed is not None:
            self.phase = torch.where(renewed, 3, self.phase)
            self.born = torch.where(renewed, iteration, self.born)
        self.n_trips += at_top & (self.phase == 2)
        self.n_restarts += at_bottom & (self.phase % 2 == 1)
        arrived = torch.where(self.phase == 1, 2, torch.where(self.phase == 3, 0, self.phase))
        self.phase = torch.where(at_top, 1, torch.where(at_bottom, arrived, self.phase))
        self.born = torch.where(at_top, iteration, self.born)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("n_trips", "n_restarts", "born", "phase")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in ("n_trips", "n_restarts", "born", "phase"):
            setattr(self, name, state[name].clone())


class Diagnostics:
    """What is recorded of the exchange between levels: `record` once per iteration, read at any time.

    `approximate`: whether the log-works multiply conditionals of tokens as if they were independent.
    """

    def __init__(self, level: Tensor, capacity: int = 4096, *, approximate: bool = False):
        self.approximate = approximate
        self.n_chains, self.n_levels = level.shape
        self.n_pairs = self.n_levels - 1
        self.n_iterations = 0
        self.tries = torch.zeros(self.n_pairs, dtype=torch.long)
        self.accepts = torch.zeros(self.n_chains, self.n_pairs, dtype=torch.long)
        self.explored = torch.zeros(self.n_levels, dtype=torch.float64)
        self.n_explored = 0
        self.trips = RoundTrips(level)
        self.capacity, self.stride, self._first = capacity, 1, 0
        self._down = torch.full((0, self.n_chains, self.n_pairs), math.nan, dtype=torch.float32)
        self._up = self._down.clone()

    def record(
        self,
        iteration: int,
        level: Tensor,
        log_work: Tensor,
        accepted: Tensor,
        active: Tensor,
        explored: Tensor | None = None,
        renewed: Tensor | None = None,
    ) -> None:
        """`log_work` and `explored` are (chains, levels), `accepted` (chains, pairs), `active` (pairs,), `renewed`
        (chains, replicas): those that the explorer drew again, whatever they were before.
        """
        if self.n_iterations == 0:
            self._first = iteration
        self.n_iterations += 1
        self.tries += active
        self.accepts += accepted
        if explored is not None:
            self.explored += explored.to(torch.float64).mean(0)
            self.n_explored += 1
        self.trips.record(level, iteration, renewed)
        # Each pair meets every second iteration: two iterations make one entry of the series.
        cycle = (iteration - self._first) // 2
        if cycle % self.stride:
            return
        row = cycle // self.stride
        if row >= self.capacity:
            self._down, self._up, self.stride = (
                self._down[::2].clone(),
                self._up[::2].clone(),
                2 * self.stride,
            )
            if cycle % self.stride:
                return
            row = cycle // self.stride
        if row >= len(self._down):
            grown = torch.full((max(64, len(self._down)), self.n_chains, self.n_pairs), math.nan, dtype=torch.float32)
            self._down, self._up = torch.cat([self._down, grown]), torch.cat([self._up, grown])
        # A work that is no number was rejected; from here on NaN means that a pair has not met.
        down, up = log_work[:, 1:][:, active], log_work[:, :-1][:, active]
        self._down[row][:, active] = down.where(~down.isnan(), -math.inf).to(torch.float32)
        self._up[row][:, active] = up.where(~up.isnan(), math.inf).to(torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """All that was recorded, as tensors."""
        numbers = (self.n_iterations, self.n_explored, self.capacity, self.stride, self._first, self.approximate)
        state = {name: getattr(self, name).clone() for name in ("tries", "accepts", "explored", "_down", "_up")}
        trips = {f"trips.{name}": value for name, value in self.trips.state_dict().items()}
        return {**state, **trips, "numbers": torch.tensor(numbers)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Diagnostics:
        """The diagnostics whose `state_dict` this is; they go on recording as if nothing had happened."""
        born = state["trips.born"]
        diagnostics = cls(torch.zeros_like(born))
        for name in ("tries", "accepts", "explored", "_down", "_up"):
            setattr(diagnostics, name, state[name].clone())
        diagnostics.trips.load_state_dict({k: state[f"trips.{k}"] for k in diagnostics.trips.state_dict()})
        n_iterations, n_explored, capacity, stride, first, *approximate = state["numbers"].tolist()
        diagnostics.approximate = any(approximate)  # snapshots of earlier versions have none
        diagnostics.n_iterations, diagnostics.n_explored = n_iterations, n_explored
        diagnostics.capacity, diagnostics.stride, diagnostics._first = capacity, stride, first
        return diagnostics

    def of_chains(self, chains: Sequence[int]) -> Diagnostics:
        """What was recorded of these chains; the explorer's acceptance stays the mean over all."""
        state, index = self.state_dict(), list(chains)
        for name in ("accepts", *(key for key in state if key.startswith("trips."))):
            state[name] = state[name][index]
        state["_down"], state["_up"] = state["_down"][:, index], state["_up"][:, index]
        return Diagnostics.from_state_dict(state)

    @classmethod
    def joined(cls, runs: Sequence[Diagnostics]) -> Diagnostics:
        """Chains of several runs on the same levels, side by side; iterations are the mean over chains.

        Of the log-works as many are kept as all runs have, of the meetings that all have kept.
        """
        n_chains = sum(d.n_chains for d in runs)
        out = cls(torch.zeros(n_chains, runs[0].n_levels, dtype=torch.long))
        for name in ("n_trips", "n_restarts", "born", "phase"):
            setattr(out.trips, name, torch.cat([getattr(d.trips, name) for d in runs]))
        out.approximate = any(d.approximate for d in runs)
        out.accepts = torch.cat([d.accepts for d in runs])
        out.tries = sum(d.tries * d.n_chains for d in runs) // n_chains  # type: ignore[assignment]
        out.explored = torch.stack([d.explored * d.n_chains for d in runs]).sum(0) / n_chains
        for name in ("n_iterations", "n_explored"):
            setattr(out, name, round(sum(getattr(d, name) * d.n_chains for d in runs) / n_chains))
        out.stride = max(d.stride for d in runs)
        works = [tuple(w[:: out.stride // d.stride] for w in (d._down, d._up)) for d in runs]
        n = min(len(down) for down, _ in works)
        out._down, out._up = (torch.cat([w[i][:n] for w in works], 1) for i in range(2))
        return out

    # -- communication -----------------------------------------------------------------------------------

    def works(self) -> tuple[Tensor, Tensor]:
        """Log-works down and up, (entries, chains, pairs), of the entries in which every pair met."""
        complete = ~self._down.isnan().any(2).any(1)
        return self._down[complete].to(torch.float64), self._up[complete].to(torch.float64)

    def acceptance_series(self) -> Tensor:
        """min(1, alpha) of each meeting, (entries, chains, pairs): smoother than counting acceptances."""
        down, up = self.works()
        return accept_probability(down, up)

    def acceptance(self) -> Tensor:
        """Mean acceptance of each pair."""
        series = self.acceptance_series()
        return series.mean((0, 1)) if len(series) else torch.full((self.n_pairs,), math.nan, dtype=torch.float64)

    def acceptance_interval(self, z: float = 1.96) -> Tensor:
        """Wilson intervals (pairs, 2), with the number of meetings replaced by their effective number."""
        series = self.acceptance_series()
        p, meetings = series.mean((0, 1)), series.shape[0] * series.shape[1]
        n = torch.full_like(p, max(1.0, meetings))
        if len(series) >= 4:
            effective = torch.from_numpy(effective_sizes(series.permute(2, 1, 0).numpy())).clamp(1.0, meetings)
            varies = (series != series[0, 0]).any(0).any(0)
            n = torch.where(varies, effective, n)
        centre, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)).sqrt()
        return torch.stack([centre - half, centre + half], dim=1) / (1 + z * z / n)[:, None]

    def barrier(self) -> Estimate:
        """Lambda, the sum of all rejections."""
        return mean_of((1 - self.acceptance_series()).sum(-1))

    def suggested_levels(self) -> int:
        """The number of levels at which a pair rejects about half of its swaps: `2 Lambda + 1`, once it is known."""
        return enough_levels(self.barrier().value, self.n_levels)

    def round_trips(self) -> int:
        return int(self.trips.n_trips.sum())

    def restarts(self) -> int:
        return int(self.trips.n_restarts.sum())

    def predicted_round_trips(self) -> float:
        """What this acceptance should give over the iterations so far, in all chains, once stationary."""
        r = 1 - self.acceptance()
        rate = 1 / (2 + 2 * float((r / (1 - r).clamp(min=1e-12)).sum()))
        return rate * self.n_iterations * self.n_chains

    # -- free energy -------------------------------------------------------------------------------------

    def log_z(self, method: str = "bar") -> Estimate:
        """log Z_0 / Z_M by `"down"` (paths down), `"up"` (paths up) or `"bar"` (both, Bennett).

        The error is a jackknife over chains, or over pieces of chains that last for ten trips. Reward tilting has
        Z_M = 1, so this is log E_p[exp(r)].
        """
        estimators = {"down": _down, "up": _up, "bar": _bar}
        if method not in estimators:
            raise InputError(f"method must be one of {', '.join(estimators)}, got {method!r}")
        down, up = self.works()
        if len(down) < LEAST_ENTRIES:
            return Estimate(math.nan, math.nan)
        groups = [self._groups(works) for works in (down, up)]
        n = len(groups[0])
        totals = estimators[method](*groups).sum(1)
        left_out = totals[1:]
        # Without a finite path in some group there is no error that could be given.
        finite = bool(left_out.isfinite().all())
        error = math.sqrt((n - 1) * float(left_out.var(correction=0))) if finite else math.nan
        return Estimate(float(totals[0]), error, n - 1)

    def trip(self) -> float:
        """How many iterations a replica takes from the noise end to the data end and back, as counted so far."""
        n = self.round_trips()
        return self.n_levels * self.n_iterations * self.n_chains / n if n else math.inf

    def _groups(self, works: Tensor) -> list[Tensor]:
        """Works (entries, chains, pairs) in nearly independent groups (paths, pairs), for a jackknife.

        Works within a chain are correlated over the time of several trips, so a group is a chain, or a piece of one
        that lasts for ten trips, or several chains where there are many. There are at least four groups.
        """
        chains = works.shape[1]
        pieces = min(int(self.n_iterations / (PIECE_TRIPS * self.trip())), MOST_GROUPS // chains)
        pieces = max(pieces, -(-LEAST_ENTRIES // chains), 1)
        parts = [
            part.flatten(0, 1)
            for c in works.tensor_split(min(chains, MOST_GROUPS), 1)
            for part in c.tensor_split(pieces)
        ]
        return parts

    def summary(self) -> dict[str, object]:
        """The numbers a person looks at first."""
        return {
            "iterations": self.n_iterations,
            "acceptance (min, mean)": (float(self.acceptance().min()), float(self.acceptance().mean())),
            "barrier": self.barrier(),
            "levels": self.n_levels,
            "suggested levels": self.suggested_levels(),
            "round trips": self.round_trips(),
            "predicted round trips": self.predicted_round_trips(),
            "restarts": self.restarts(),
            "log Z": self.log_z(),
            "log Z (down, up)": (self.log_z("down"), self.log_z("up")),
            **({"log-work": "approximate, several tokens change at once"} if self.approximate else {}),
        }


def enough_levels(barrier: float, n_levels: int) -> int:
    """`2 Lambda + 1`, at least 2; as many as there are while the barrier is not known.

    >>> enough_levels(2.3, n_levels=9), enough_levels(math.nan, n_levels=9)
    (6, 9)
    """
    return n_levels if math.isnan(barrier) else max(2, math.ceil(2 * barrier) + 1)


def accept_probability(down: Tensor, up: Tensor) -> Tensor:
    """min(1, alpha) from the log-works of a pair; a proposal that met something not finite is never accepted."""
    return (down - up).nan_to_num(nan=-math.inf).clamp(max=0).exp()


# Each of these takes log-works as blocks of (paths, pairs) and gives log Z_s / Z_t of each pair, (1 + blocks, pairs):
# from all blocks first, then with each of them left out.


def _leave_one_out(n: int) -> list[list[int]]:
    return [list(range(n)), *([i for i in range(n) if i != b] for b in range(n))]


def _log_mean_exp(blocks: Sequence[Tensor]) -> Tensor:
    parts = torch.stack([w.logsumexp(0) for w in blocks])
    sizes = torch.tensor([len(w) for w in blocks])
    sets = _leave_one_out(len(blocks))
    return torch.stack([parts[chosen].logsumexp(0) - math.log(int(sizes[chosen].sum())) for chosen in sets])


def _down(down: Sequence[Tensor], up: Sequence[Tensor]) -> Tensor:
    return _log_mean_exp(down)


def _up(down: Sequence[Tensor], up: Sequence[Tensor]) -> Tensor:
    return -_log_mean_exp([-w for w in up])


def _bar(down: Sequence[Tensor], up: Sequence[Tensor]) -> Tensor:
    """The c at which `E_down[f(c - W)] = E_up[f(W - c)]`, with `f(x) = 1 / (1 + exp(x))` (Bennett 1976).

    For any c, `exp(c) E_down[f(c - W)] / E_up[f(W - c)]` equals Z_s / Z_t, and with as many paths down as up the best
    c is that value itself. The difference falls in c: Newton's step where it stays in the bracket, halving elsewhere.
    A pair none of whose paths down (up) is possible has c = -inf (inf).
    """
    low = torch.stack([w.amin(0) for w in (*down, *up)]).amin(0).clamp(min=-1e6) - 10
    high = torch.stack([w.amax(0) for w in (*down, *up)]).amax(0).clamp(max=1e6) + 10
    possible_down = torch.stack([(w > -math.inf).any(0) for w in down])
    possible_up = torch.stack([(w < math.inf).any(0) for w in up])
    everything, *others = _leave_one_out(len(down))

    def sums(c: Tensor, chosen: Sequence[int]) -> Tensor:
        """Difference and slope of these blocks, (blocks, 2, pairs)."""
        out = []
        for i in chosen:
            a, b = (down[i] - c).sigmoid_(), (c - up[i]).sigmoid_()
            total_a, total_b = a.sum(0), b.sum(0)
            slope = total_a - a.square_().sum(0) + total_b - b.square_().sum(0)
            out.append(torch.stack([total_a - total_b, slope]))
        return torch.stack(out)

    def solve(c: Tensor, known: Tensor, chosen: Sequence[int]) -> Tensor:
        """From c, where the sums are known."""
        left, right = low, high
        for _ in range(80):
            difference, slope = known.sum(0)
            left, right = torch.where(difference > 0, c, left), torch.where(difference > 0, right, c)
            step = c + difference / slope.clamp(min=1e-300)
            newton = (left <= step) & (step <= right)
            before, c = c, torch.where(newton, step, (left + right) / 2)
            # A step of h changes the slope by less than h of it, so that after Newton's the error is below h^2.
            moved = (c - before).abs()
            if bool(((moved < 1e-10) | (newton & (moved < 1e-6))).all()):
                break
            known = sums(c, chosen)
        c = c.where(possible_down[chosen].any(0), -math.inf)
        return c.where(possible_up[chosen].any(0), c + math.inf)

    n = sum(len(w) for w in (*down, *up))
    guess = torch.stack([w.clamp(low, high).sum(0) for w in (*down, *up)]).sum(0) / n  # right for Gaussian works
    full = solve(guess, sums(guess, everything), everything)
    start = full.clamp(low, high)
    known = sums(start, everything)
    return torch.stack([full, *(solve(start, known[chosen], chosen) for chosen in others)])
