"""How exact is the ratio of uniform tokens? Its error by nodes and steps, summed over all states of a table.

    python -m studies.battery.nodes      nothing is random; a minute of one core

The time part of a ratio has an error e(x) that depends on the cleaner end x alone. With x from the law of its level,
the sum of `E[sum_j c_j e_j]` over all steps is the error of log Z, to first order; TV is the distance of the law of
level 0 from the one that is tilted by the error of the lowest step, which is where draws would end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from crepe_diffusion import guided
from crepe_diffusion.models import TokenTable
from crepe_diffusion.processes import Uniform
from studies.battery.problems import Problem, Truth, tokens
from studies.shared.pages import markdown

__all__ = ["Errors", "ThreeEverywhere", "errors", "two_strings"]


class ThreeEverywhere(Uniform):
    """What was done before: three nodes in every step, in the clock log(t + 0.001). Too few where states are rare."""

    def log_time_ratios(self, n_free, s, t, replaced):  # type: ignore[no-untyped-def]
        low, high = (s + 0.001).log(), (t + 0.001).log()
        total = torch.zeros(())
        for z, w in zip(*leggauss(3), strict=True):
            shifted = ((low + high) / 2 + float(z) * (high - low) / 2).exp()
            time = shifted - 0.001
            k = replaced(torch.arange(len(s)), time)
            slope = k / time - (n_free - k) * (self.vocab_size - 1) / (1 + (self.vocab_size - 1) * (1 - time))
            total = total - float(w) * (high - low) / 2 * shifted * slope
        return total


@dataclass(frozen=True)
class Errors:
    """Nodes per walk (of each model, where states have the law of their level); errors of one ratio and of the law."""

    nodes: float
    largest: float
    log_z: float
    distance: float


def errors(problem: Problem, n_levels: int, process: Uniform) -> Errors:
    """Of every step of a linear ladder, by enumeration."""
    models = [m for m in problem.target.models if isinstance(m, TokenTable)]
    c = torch.tensor([c for _, c in problem.target.factors], dtype=torch.float64)
    x, free = models[0].states, process.free(models[0].states)
    times = problem.ladder(n_levels).times
    n_nodes, largest, log_z, distance = 0.0, 0.0, 0.0, 0.0
    for step, (s, t) in enumerate(zip(times[:-1].tolist(), times[1:].tolist(), strict=True)):
        log_pi = c @ torch.stack([m.log_prob(x, s) for m in models])
        law = log_pi.softmax(0)
        spent: list[Tensor] = []

        def replaced(rows: Tensor, at: Tensor, law: Tensor = law, spent: list[Tensor] = spent) -> Tensor:
            spent.append(law[rows].sum())
            return torch.stack([process.n_replaced(x[rows], m.predict(x[rows], at), free[rows]) for m in models])

        low, high = (torch.full((len(x),), v, dtype=torch.float64) for v in (s, t))
        found = process.log_time_ratios(models[0].length, low, high, replaced)
        error = found - torch.stack([m.log_prob(x, s) - m.log_prob(x, t) for m in models])
        n_nodes += float(sum(spent))
        largest = max(largest, float(error.abs().max()))
        log_z += float(law @ (c @ error))
        if step == 0:
            distance = float(((log_pi + c @ error).softmax(0) - law).abs().sum() / 2)
    return Errors(n_nodes, largest, log_z, distance)


def two_strings() -> Problem:
    """Two strings of 8 tokens that differ everywhere have all but 0.001 of one table: all other states are isolated."""
    rare = torch.full((2,) * 8, 0.001 / 2**8, dtype=torch.float64)
    rare[(0,) * 8], rare[(1,) * 8] = 0.6, 0.4
    common = torch.linspace(1, 3, 2**8, dtype=torch.float64).reshape((2,) * 8)
    target = guided(TokenTable(common, "uniform"), TokenTable(rare, "uniform"), 2.0)
    return Problem("two strings of 8", target, {}, lambda: Truth({}, {}), ends=(0.0, 1.0), spacing="linear")


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for problem in (
        tokens("uniform", 4, 3, steepness="steep"),
        tokens("uniform", 8, 2, steepness="steep"),
        tokens("uniform", 4, 3),
        two_strings(),
    ):
        vocab = problem.target.models[0].process().n_states  # type: ignore[attr-defined]
        name = problem.name.removeprefix("uniform tokens ").removesuffix(" w=2 w'=2")
        rules: dict[str, Uniform] = {"three in every step": ThreeEverywhere(vocab)}
        rules |= {f"{n} per decade": Uniform(vocab, nodes=n) for n in (2, 3, 4)}
        for n_levels in (3, 9, 33):
            for rule, process in rules.items():
                e = errors(problem, n_levels, process)
                rows.append(
                    (name, n_levels, rule, f"{e.nodes:.1f}", f"{e.largest:.4f}", f"{e.log_z:+.4f}", f"{e.distance:.4f}")
                )
    print(markdown(["tokens", "levels", "nodes", "rows of nodes", "largest error", "log Z", "TV"], rows))


if __name__ == "__main__":
    main()
