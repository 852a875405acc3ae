"""Ratios of uniform tokens against exact enumeration, where states are steep: `log p_s(x) - log p_t(x)` of tables.

Where a state x has the probability A_0, and its neighbours at distance k have A_k, `log p_t(x)` bends at the odds
y = A_0 / A_1 of a replaced token: the rarer x is, the nearer to t = 0.
"""

from __future__ import annotations

import math

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.paths import walk
from crepe_diffusion.processes import Uniform, quadrature
from crepe_diffusion.processes.quadrature import log_integral

STREAM = cd.Stream(3)


def polynomials(n, degree):
    """Coefficients (n, degree + 1) like those of a table: binomial ones, uneven, of which the first is much rarer."""
    stream = STREAM.at("polynomials", degree)
    binomial = f64([math.comb(degree, k) for k in range(degree + 1)])
    a = binomial * (0.2 + 0.8 * stream.uniform((n, degree + 1)))
    a[:, 0] *= 10 ** (-5 * stream.at("rare").uniform((n,)))
    return a


def growth(a, y):
    """`y d/dy log sum_k a_k y^k`."""
    terms = a * y[:, None] ** torch.arange(a.shape[1])
    return (terms * torch.arange(a.shape[1])).sum(1) / terms.sum(1)


def log_sum(a, y):
    return (a * y[:, None] ** torch.arange(a.shape[1])).sum(1).log()


@pytest.mark.parametrize("low", [0.0, 1e-7, 0.02, 0.5])
@pytest.mark.parametrize(("nodes", "error"), [(3, 0.004), (6, 2e-6), (30, 1e-10)])
def test_integrals_of_steep_polynomials(low, nodes, error):
    """Two functions at once, whose panels are shared; the first coefficient over five decades."""
    a, b = polynomials(400, 4), polynomials(400, 2)
    ends = torch.full((400,), low, dtype=torch.float64), torch.linspace(0.05, 1, 400, dtype=torch.float64) + low

    def check(deepest):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quadrature, "DEEPEST", deepest)
            found = log_integral(*ends, lambda rows, y: torch.stack([growth(a[rows], y), growth(b[rows], y)]), nodes)
        expected = torch.stack([log_sum(c, ends[1]) - log_sum(c, ends[0]) for c in (a, b)])
        assert float((found - expected).abs().max()) < error

    check(quadrature.DEEPEST)
    if low < 1e-3:
        refuted(check, 1)


def test_short_panels_with_few_nodes_are_as_exact_as_whole_ones():
    a = polynomials(400, 4)
    errors = []
    for ratio in (1.05, 1.5, 3.0, 9.9):
        top = torch.logspace(-3, 0, 400, dtype=torch.float64)
        found = log_integral(top / ratio, top, lambda rows, y: growth(a[rows], y)[None], 3)[0]
        errors.append(float((found - log_sum(a, top) + log_sum(a, top / ratio)).abs().max()))
    assert max(errors) < 0.004


def steep(length, vocab, index):
    """A table whose entries are cubes of uniforms: the rarest is 1e-6 of the most frequent one."""
    return cd.models.TokenTable(STREAM.at("table", index).uniform((vocab,) * length).clamp(min=0.01) ** 3, "uniform")


@pytest.mark.parametrize("n_levels", [3, 9])
@pytest.mark.parametrize(("length", "vocab"), [(4, 3), (6, 2)])
def test_ratios_of_steep_tables_are_those_of_enumeration(length, vocab, n_levels):
    """Walks up from all states at each time, for both models of a guided target, and what errors do to log Z."""
    target = cd.guided(steep(length, vocab, 0), steep(length, vocab, 1), 2.0)
    models, c = zip(*target.factors, strict=True)
    c, x = f64(c), models[0].states
    n = len(x)

    def check(process):
        evaluate = cd.ReplicaExchange(target, cd.ladder.linear(n_levels), process=process).evaluate
        up, shift = torch.ones(n, dtype=torch.long), 0.0
        for k in range(n_levels - 1):
            s, t = (float(v) for v in evaluate.times[k : k + 2])
            start = evaluate(x, torch.full((n,), s, dtype=torch.float64))
            path = walk(evaluate, x, start, torch.full((n,), k), up, 1, STREAM.at("up", k))
            errors = path.models - torch.stack([m.log_prob(x, s) - m.log_prob(path.x, t) for m in models])
            assert float(errors.abs().max()) < 0.01
            law = (c @ torch.stack([m.log_prob(x, s) for m in models])).softmax(0)
            shift += float(law @ (c @ errors))
        assert abs(shift) < 0.004

    check(Uniform(vocab))
    refuted(check, Uniform(vocab, at_once=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quadrature, "DEEPEST", 1)  # no more nodes in the step that touches 0 than in others
        refuted(check, Uniform(vocab))


def test_steps_that_touch_0_have_more_nodes_for_rarer_states():
    """A state like all others has one panel and the rest; one that is rare has more panels."""

    def n_nodes(rare):
        a, count = f64([[rare, 1.0, 1.0]]), []

        def k(rows, y):
            count.append(len(rows))
            return growth(a[rows], y)[None]

        log_integral(f64([0.0]), f64([0.05]), k, 3)
        return sum(count)

    assert [n_nodes(r) for r in (1.0, 0.01, 1e-4)] == [5, 8, 14]


def test_too_few_nodes_are_refused_by_name():
    with pytest.raises(cd.InputError, match="2 or more, got 1"):
        Uniform(3, nodes=1)
