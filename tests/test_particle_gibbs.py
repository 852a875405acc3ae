"""Particle Gibbs: the law by enumeration of the shipped sweep, broken twins, cost, and going on.

max |pi P - pi| <= 1e-12        for any number of particles, with and without resampling
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.samplers import particle_gibbs, smc
from crepe_diffusion.samplers.resampling import Systematic
from enumeration import Leaves, Script, UnwrittenError
from finite import TASKS, Line, Toy, line, tokens

TOLERANCE = 1e-12
MIXTURE = cd.models.GaussianMixture([0.3, 0.7], [[-2.0, 0.5], [1.5, -1.0]], [0.5, 0.4])
LADDER = cd.ladder.karras(9, 0.05, 12.0)
FAST = {"process": Gaussian(variance=0.8)}


def gibbs(toy: Toy, n_particles: int, ess_threshold: float) -> cd.ParticleGibbs:
    """Particle Gibbs on the target, ladder and proposal of a toy."""
    e = toy.chain.evaluate
    process = e.process
    if isinstance(process, Line):  # the noise law has no reward in it; weights have
        process = replace(process, log_top=sum(c * model.marginals[-1].log() for model, c in e.target.factors))
    return cd.ParticleGibbs(
        e.target,
        e.ladder,
        n_particles=n_particles,
        ess_threshold=ess_threshold,
        process=process,
        proposal=e.proposal,
    )


def violations(toy: Toy, n_particles: int, ess_threshold: float = 1.0) -> tuple[float, float]:
    """`max |pi P - pi|` of the kept point, and of the weighted particles of a sweep."""
    chain, pi = gibbs(toy, n_particles, ess_threshold), torch.softmax(toy.log_pi[0], 0)
    possible = pi.nonzero()[:, 0]
    leaves = Leaves(possible, [], pi[possible])
    while True:
        chain.n_chains, chain.stream = len(leaves.source), Script(leaves.outcomes)
        chain.replica = chain.born = torch.zeros(chain.n_chains, dtype=torch.long)
        chain.x = toy.states[leaves.source]
        chain.seen = chain.evaluate(chain.x, chain.ladder.times[:1].expand(chain.n_chains))
        try:
            chain.step()
        except UnwrittenError as missing:
            leaves = leaves.extended(missing.probabilities)
            continue
        break
    assert abs(float(leaves.weight.sum()) - 1) < 1e-12
    x, log_w = chain.particles
    number = (x[:, None] == toy.states).flatten(2).all(2).long().argmax(1)
    every = (log_w.exp() * leaves.weight[:, None]).flatten()
    kept = (chain.x[:, None] == toy.states).flatten(2).all(2).long().argmax(1)
    after, weighted = torch.zeros_like(pi), torch.zeros_like(pi)
    after.index_add_(0, kept, leaves.weight)
    weighted.index_add_(0, number, every)
    return float((after - pi).abs().max()), float((weighted - pi).abs().max())


# -- the law, exactly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("threshold", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "toy", [lambda t: tokens("masked", t, vocab=2), lambda t: line(t, n=2)], ids=["masked", "line"]
)
def test_a_sweep_leaves_the_target_invariant(toy, threshold, task):
    assert max(violations(toy(task), 2, threshold)) <= TOLERANCE


@pytest.mark.parametrize("threshold", [0.8, 1.0])
def test_three_particles(threshold):
    assert max(violations(tokens("masked", "everything", vocab=2), 3, threshold)) <= TOLERANCE


def test_uniform_tokens_substeps_and_other_ladders():
    assert max(violations(tokens("uniform", "everything", vocab=2), 2)) <= TOLERANCE
    assert max(violations(tokens("masked", "everything", vocab=2, n_levels=2, substeps=2), 3)) <= TOLERANCE
    assert max(violations(tokens("masked", "everything", vocab=2, n_levels=4), 2)) <= TOLERANCE


def check_exact():
    assert max(violations(tokens("masked", "everything", vocab=2), 2)) <= TOLERANCE


def lost(log_w, stream):
    """Systematic with an offset that knows nothing of the reference."""
    b, n = log_w.shape
    u = stream.categorical(torch.zeros(b, 20, dtype=torch.float64))[:, None]
    return particle_gibbs.ancestors(log_w.exp(), (torch.arange(n) + (u + 0.5) / 20) / n), log_w * 0 - math.log(n)


def not_tilted(log_w, stream):
    """The reference goes on, but the offset does not know it."""
    index, equal = lost(log_w, stream)
    index[:, 0] = 0
    return index, equal


@pytest.mark.parametrize("rule", [lost, not_tilted], ids=lambda f: f.__name__)
def test_broken_resampling_is_caught(rule, monkeypatch):
    check_exact()
    monkeypatch.setattr(particle_gibbs, "conditional_systematic", rule)
    refuted(check_exact)


def test_broken_works_are_caught(monkeypatch):
    """The reference with the works of the opposite sign, or of other paths than its own."""
    original = cd.ParticleGibbs._walk_up

    def other(work):
        def walk_up(self, stream):
            reference, sound = original(self, stream)
            return smc.Reference(reference.x, reference.seen, [work(w) for w in reference.work]), sound

        return walk_up

    for work in (lambda w: -w, lambda w: 0 * w, lambda w: w + 0.1):
        monkeypatch.setattr(cd.ParticleGibbs, "_walk_up", other(work))
        refuted(check_exact)


def test_an_upper_part_of_another_path_is_caught(monkeypatch):
    """Without the walk up from x_0: points above it from a walk down that ends elsewhere."""
    original = cd.ParticleGibbs._walk_up

    def walk_up(self, stream):
        here, seen = self.x, self.seen
        self.x = self.x.roll(1, 0)
        self.seen = self.evaluate(self.x, self.ladder.times[:1].expand(self.n_chains))
        reference, sound = original(self, stream)
        self.x, self.seen = here, seen
        return smc.Reference([here, *reference.x[1:]], [seen, *reference.seen[1:]], reference.work), sound

    monkeypatch.setattr(cd.ParticleGibbs, "_walk_up", walk_up)
    refuted(check_exact)


def test_conditional_systematic_is_systematic_given_the_reference():
    """Drawn with a slot at random, kept where the slot holds particle 0: the same law of the copies."""
    log_w = f64([0.37, 0.05, 0.33, 0.25]).log()
    n, b = 4, 400_000
    index, _ = Systematic()(log_w.expand(b, n), cd.Stream(1))
    slot = cd.Stream(2).categorical(torch.zeros(b, n))
    index = index[(index.gather(1, slot[:, None])[:, 0] == 0)]
    ours, _ = particle_gibbs.conditional_systematic(log_w.expand(len(index), n), cd.Stream(3))
    assert (ours[:, 0] == 0).all()

    def shares(rows):
        copies = torch.stack([(rows == i).sum(1) for i in range(n)], 1)
        code = (copies * torch.tensor([125, 25, 5, 1])).sum(1)
        return torch.bincount(code, minlength=625).double() / len(rows)

    error = (2 * shares(index) / len(index)).sqrt()
    assert bool(((shares(index) - shares(ours)).abs() <= 5 * error + 1e-12).all())
    unconditional, _ = Systematic()(log_w.expand(len(index), n), cd.Stream(4))
    assert bool(((shares(index) - shares(unconditional)).abs() > 5 * error + 1e-12).any())
