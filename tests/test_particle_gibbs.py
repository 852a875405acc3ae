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
from crepe_diffusion.diagnostics.estimates import Estimate
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.samplers import particle_gibbs
from crepe_diffusion.samplers.resampling import Systematic
from enumeration import Leaves, Script, UnwrittenError
from finite import TASKS, Line, Toy, line, tokens
from test_smc import COARSE, B, check_intervals, exact_process, law_at, product

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


def test_dependent_positions_that_change_one_by_one():
    """Exact where each turn changes one position; both at once, multiplied as if independent, are seen to be off."""
    pair = {"vocab": 2, "length": 2, "dependent": True, "n_levels": 2}
    assert max(violations(tokens("masked", "everything", **pair, at_once=1), 2)) <= TOLERANCE
    assert min(violations(tokens("masked", "everything", **pair, at_once=2), 2)) > 1e-4


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
            return replace(reference, work=[work(w) for w in reference.work]), sound

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
        return replace(reference, x=[here, *reference.x[1:]], seen=[seen, *reference.seen[1:]]), sound

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


# -- the law, in numbers -------------------------------------------------------------------------------------


def tilted_product(**options):
    """Two Gaussians, guided and tilted, with their exact kernels: exact at any step, and the noise end has a reward."""
    target = product().tilt(lambda x: B * x[:, 0], on="state", anneal=cd.anneal.power(2, floor=0.1))
    return cd.ParticleGibbs(target, COARSE, process=exact_process(COARSE), **options)


def test_means_and_log_z_of_gaussians_with_their_errors():
    out = tilted_product(n_particles=4, n_chains=400, ess_threshold=0.8, seed=1).sample(40, burn_in=5)
    log_z, mean, variance = law_at(0.3, slope=B)
    log_z -= law_at(12.0)[0]
    estimates = {
        "mean": (out.mean(lambda x: x[:, 0]), mean),
        "square": (out.mean(lambda x: (x[:, 0] - mean) ** 2), variance),
        "log z": (out.log_z, log_z),
    }
    for name, (estimate, truth) in estimates.items():
        assert abs(estimate.value - truth) < 5 * estimate.error < 0.1, name
    # The mean of log Z_n itself, and that of Z_n, are those of passes with a good particle: too large.
    assert float(out.sweep_log_z.mean()) - log_z > 5 * out.log_z.error
    assert 0.05 < float(out.diagnostics["changed"].mean()) < 0.95
    survivors = out.diagnostics["survivors"]
    assert survivors[0] == 4
    assert bool((survivors.diff() <= 0).all())
    assert survivors[-1] < 3.9


@pytest.mark.slow
def test_intervals_of_chains_cover_the_truth():
    """40 groups of two chains: means and log Z, by the larger of two errors."""
    out = tilted_product(n_particles=4, n_chains=80, ess_threshold=0.8, seed=2).sample(80, burn_in=5)
    log_z, mean, _ = law_at(0.3, slope=B)

    def group(i):
        chains = slice(2 * i, 2 * i + 2)
        fields = ("changed", "replica", "born", "sweep_log_z", "log_weights")
        x = out.x.reshape(80, 80, 4, 1)[:, chains].reshape(-1, 1)
        return replace(out, x=x, **{name: getattr(out, name)[:, chains] for name in fields})

    groups = [group(i) for i in range(40)]
    check_intervals([g.mean(lambda x: x[:, 0]) for g in groups], mean)
    check_intervals([g.log_z for g in groups], log_z - law_at(12.0)[0])
    independent = [cd.Estimate(g.mean(lambda x: x[:, 0]).value, 0.7 / math.sqrt(len(g.x))) for g in groups]
    refuted(check_intervals, independent, mean)


def test_verdict_counts_tours():
    """One tour of one chain is no evidence, however many particles there are."""
    out = tempered(n_chains=20, n_particles=16).sample(12)
    assert out.verdict().level == "ok"
    alone = tempered(n_chains=1, n_particles=16).sample(3)
    alone = replace(alone, born=torch.zeros_like(alone.born), replica=torch.zeros_like(alone.replica))
    assert alone.verdict().level == "do not trust"
    assert "1.0 of 1 tours count" in str(alone.verdict())


def test_control_off_weighs_nothing():
    gibbs, smc = cd.ParticleGibbs(MIXTURE, LADDER, n_particles=5, n_chains=3, **FAST), cd.SMC(MIXTURE, LADDER, **FAST)
    assert (gibbs.ess_threshold, gibbs.seed) == (smc.ess_threshold, smc.seed) == (0.5, 0)
    out = gibbs.sample(4)
    assert (out.log_weights + math.log(5)).abs().max() <= 1e-10
    assert out.sweep_log_z.abs().max() <= 1e-10
    tempered = cd.ParticleGibbs(MIXTURE**1.1, LADDER, n_particles=5, n_chains=3, **FAST).sample(4)
    assert (tempered.log_weights + math.log(5)).abs().max() > 1e-3


def test_two_particles_without_resampling_choose_by_the_works_of_whole_paths():
    """`log alpha = sum of works down - sum of works up`, as a swap over the whole ladder."""
    chain = cd.ParticleGibbs(MIXTURE**1.8, LADDER, n_particles=2, n_chains=50, ess_threshold=0.0, **FAST)
    reference, _ = chain._walk_up(chain.stream.at(1, "up"))
    chain.step()
    up = torch.stack(reference.work).sum(0)
    alone = cd.SMC(MIXTURE**1.8, LADDER, n_particles=1, n_batches=50, ess_threshold=0.0, **FAST)
    alone.stream = chain.stream.at(1, "down")
    down = alone.sample().batch_log_z
    log_w = chain.particles[1]
    torch.testing.assert_close(log_w[:, 1] - log_w[:, 0], down - up, atol=1e-9, rtol=0)
    refuted(torch.testing.assert_close, log_w[:, 1] - log_w[:, 0], down + up, atol=1e-9, rtol=0)


# -- cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "chains", "substeps", "finishing"), [(2, 1, 1, 0), (5, 3, 2, 0), (4, 2, 1, 2)])
def test_rows_of_a_sweep(n, chains, substeps, finishing):
    levels = cd.ladder.karras(5, 0.05, 12.0, substeps=substeps, n_finish=finishing)
    target = cd.guided(MIXTURE, cd.models.GaussianMixture([1.0], [[0.3, 0.1]], [1.0]), 1.4)
    chain = cd.ParticleGibbs(target, levels, n_particles=n, n_chains=chains, **FAST)
    steps, models = 4 * substeps, 2
    assert chain.evaluate.counts.rows == models * chains * n * (steps + 1)
    before = chain.evaluate.counts.rows
    chain.step()
    sweep = models * chains * ((n - 1) * (steps + 1) + steps)
    assert chain.evaluate.counts.rows - before == sweep
    chain.output()
    assert chain.evaluate.counts.rows - before == sweep + models * chains * finishing
    before = chain.evaluate.counts.rows
    out = chain.sample(3, burn_in=1)
    assert out.evaluations.rows - before == 4 * sweep + 3 * models * chains * n * finishing


# -- going on ------------------------------------------------------------------------------------------------


def tempered(**options):
    return cd.ParticleGibbs(MIXTURE**1.8, LADDER, **{"n_particles": 6, "n_chains": 3, "seed": 4, **FAST, **options})


def test_a_snapshot_goes_on_bit_for_bit():
    chain = tempered()
    chain.sample(3)
    saved = chain.snapshot()
    once, again = chain.sample(3), tempered(start=saved).sample(3)
    for name in ("x", "log_weights", "born", "replica", "sweep_log_z"):
        assert torch.equal(getattr(once, name), getattr(again, name)), name
    assert once.evaluations.rows == again.evaluations.rows
    with pytest.raises(cd.InputError, match=r"the snapshot holds points \(3, 2\) of 1 models, not \(4, 2\) of 1"):
        tempered(start=saved, n_chains=4)


def test_chains_are_independent_of_one_another():
    few, many = (tempered(n_chains=c, ess_threshold=0.9).sample(4) for c in (2, 5))
    assert torch.equal(few.log_weights, many.log_weights[:, :2])
    assert torch.equal(few.x.reshape(4, 2, 6, 2), many.x.reshape(4, 5, 6, 2)[:, :2])


def test_the_target_may_change_while_it_runs():
    """Refined to the same target as a chain of its own, means agree; a target that fails leaves all as it was."""
    chain = tempered(n_chains=100, n_particles=4)
    before = chain.sample(10, burn_in=10).mean(lambda x: x[:, 0])
    chain.target = (MIXTURE**1.8).tilt(lambda x: -2.0 * x[:, 0], on="state", anneal=cd.anneal.linear())
    after = chain.sample(10, burn_in=10).mean(lambda x: x[:, 0])
    fresh = cd.ParticleGibbs(chain.target, LADDER, n_particles=4, n_chains=100, seed=8, **FAST)
    wanted = fresh.sample(10, burn_in=10).mean(lambda x: x[:, 0])
    assert abs(after.value - wanted.value) < 5 * math.hypot(after.error, wanted.error)
    assert abs(after.value - before.value) > 5 * math.hypot(after.error, before.error)
    x, target = chain.x.clone(), chain.target
    with pytest.raises(cd.InputError):
        chain.target = MIXTURE**-1.0
    assert chain.target is target
    assert torch.equal(chain.x, x)


def test_stopped_at_any_time_the_sweeps_so_far_are_the_result():
    whole, cut = tempered().sample(5), tempered().sample(5, callback=lambda p: p.done == 2)
    assert torch.equal(cut.x, whole.x[: len(cut.x)])
    assert cut.log_weights.shape[0] == 2
    none = tempered().sample(5, burn_in=3, callback=lambda p: p.done == 2)
    assert none.x.shape == (0, 2)
    assert none.weights.shape == (0,)


def test_what_is_not_finite_on_the_way_up_leaves_the_chain_where_it_is():
    class Torn(cd.models.GaussianMixture):
        """Not finite at the noisy levels, where torn."""

        torn = False

        def predict(self, x, t):
            bad = (t > 5.0) & self.torn
            return super().predict(x, t).masked_fill(bad[:, None], math.nan)

    model = Torn([0.3, 0.7], [[-2.0, 0.5], [1.5, -1.0]], [0.5, 0.4])
    chain = cd.ParticleGibbs(model**1.5, LADDER, n_particles=4, n_chains=3, nonfinite="reject", **FAST)
    chain.step()
    x = chain.x.clone()
    model.torn = True
    out = chain.sample(2)
    assert torch.equal(chain.x, x)
    assert not out.changed.any()
    assert (out.weights.reshape(2, 3, 4)[..., 0] == 1 / 6).all()
    assert math.isnan(out.log_z.value)


def test_bad_settings_are_refused():
    with pytest.raises(cd.InputError, match="n_particles must be an integer of at least 2, got 1"):
        tempered(n_particles=1)
    with pytest.raises(cd.InputError, match="ess_threshold must be between 0 and 1, got 2"):
        tempered(ess_threshold=2)


# -- runs in folders, of both samplers that are made of passes -----------------------------------------------

KINDS = {"smc": {"n_particles": 8, "n_batches": 3}, "particle-gibbs": {"n_particles": 4, "n_chains": 3}}


def config(kind):
    return {
        "experiment": "mixture-tilt",
        "ladder": {"kind": "karras", "n_levels": 6, "sigma_min": 0.05, "sigma_max": 20.0},
        "sampler": {"kind": kind, "seed": 3, "fit_samples": 16, **KINDS[kind]},
        "output": {"checkpoint_iterations": 2},
        "stop": {"iterations": 18},
    }


@pytest.mark.parametrize("kind", ["particle-gibbs", pytest.param("smc", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit_and_has_a_report(kind, tmp_path):
    with cd.Run.start(tmp_path / "whole", config(kind)) as run:
        run.run()
    with cd.Run.start(tmp_path / "parts", config(kind)) as run:
        run.run(iterations=7)
    with cd.Run.resume(tmp_path / "parts") as run:
        run.run(iterations=18)
    whole, parts = cd.read_run(tmp_path / "whole"), cd.read_run(tmp_path / "parts")
    assert whole.x.shape[:2] == (18, 3)
    assert (whole.x == parts.x).all()
    for name in ("replica", "born"):
        assert (whole.columns[name] == parts.columns[name]).all()
    for name in set(whole.trace) - {"seconds"}:
        assert (whole.trace[name] == parts.trace[name]).all(), name
    page = cd.write_report(whole, tmp_path / "report.html").read_text()
    assert "Scalars and burn-in" in page
    assert cd.verdict(whole).level in ("ok", "look", "do not trust")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_refined_while_it_goes_on(kind, tmp_path):
    cls = {"smc": cd.SMC, "particle-gibbs": cd.ParticleGibbs}[kind]
    size = {"smc": {"n_particles": 4, "n_batches": 60}, "particle-gibbs": {"n_particles": 4, "n_chains": 60}}[kind]
    p = cd.models.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.4, 0.4])
    run = cd.Run(tmp_path / "run", cls(p, LADDER, **size, **FAST))
    run.run(iterations=20)
    run.refine(add=[cd.Reward(lambda x: 1.5 * x[:, 0], name="right", on="state")])
    run.run(iterations=40)
    data = run.data()
    assert data.target.tolist() == [0] * 20 + [1] * 20
    right = (data.x[..., 0] > 0).mean(1)
    # exp(1.5 x) weighs the modes by exp(-1.5) and exp(1.5)
    assert abs(right[:20].mean() - 0.5) < 0.05
    assert abs(right[25:].mean() - 1 / (1 + math.exp(-3.0))) < 0.03
    run.close()
    with cd.Run.resume(
        tmp_path / "run", target=p, rewards=[cd.Reward(lambda x: 1.5 * x[:, 0], name="right", on="state")]
    ) as run:
        run.run(iterations=42)
        assert run.data().x.shape[0] == 42


def test_a_pilot_gives_its_steps_and_what_it_measured_of_them():
    """The draws are those of its ladder and process; errors contain the steps, also after going on from a snapshot."""
    p = cd.models.GaussianMixture(weights=[0.3, 0.7], means=[[-4.0], [3.0]], stds=[0.5, 0.4])
    found = cd.pilot(p**3.0, cd.ladder.karras(9, 0.05, 20.0), n=32, seed=1)
    options = {"n_particles": 16, "n_chains": 2, "seed": 2}
    chain = cd.ParticleGibbs(p**3.0, pilot=found, **options)
    plain = cd.ParticleGibbs(p**3.0, found.ladder, process=found.process, proposal=found.proposal, **options)
    out, same = chain.sample(6), plain.sample(6)
    assert torch.equal(out.x, same.x)
    assert torch.equal(out.weights, same.weights)
    assert out.evaluations.rows == same.evaluations.rows + found.rows

    def f(x):
        return x[:, 0].square()

    shift, steps = found.summary.shift(f).value, found.discretisation["bar"].value
    assert abs(shift) > 1e-3
    assert out.mean(f).error == pytest.approx(math.hypot(same.mean(f).error, shift))
    assert out.log_z.error == pytest.approx(math.hypot(same.log_z.error, steps))
    assert out.ess(f) == same.ess(f), "more draws do not make steps smaller"

    again = cd.ParticleGibbs(p**3.0, found.ladder, process=found.process, start=chain.snapshot(), **options)
    more, ahead = again.sample(3), chain.sample(3)
    assert torch.equal(more.x, ahead.x)
    assert more.mean(f).error == ahead.mean(f).error
    chain.target = p**2.0
    assert chain.sample(3).started_from is None, "the pilot was made for another target"
    with pytest.raises(cd.InputError, match="or a pilot"):
        cd.ParticleGibbs(p)


def test_a_chain_that_disagrees_with_its_pilot_is_not_ok():
    """One of the two misses something: here the pilot, which is made to have met one of two modes only."""
    p = cd.models.GaussianMixture(weights=[0.4, 0.6], means=[[-3.0], [3.0]], stds=[0.5, 0.5])
    found = cd.pilot(p**1.2, cd.ladder.karras(17, 0.05, 20.0), n=64, seed=1)
    out = cd.ParticleGibbs(p**1.2, pilot=found, n_particles=32, n_chains=8, seed=2).sample(12)
    scalars = {"left": lambda x: (x[:, 0] < 0).double(), "size": lambda x: x[:, 0].abs()}
    assert out.verdict(scalars).level == "ok"
    start = out.started_from
    one = replace(out, started_from=replace(start, x=start.x.abs()))
    assert one.verdict(scalars).level == "do not trust"
    assert one.verdict(scalars).reasons[0].startswith("chain and starting pass disagree about left: 0.")
    assert one.verdict(scalars).advice[0].startswith("make a pilot of about 300 particles")
    far = Estimate(start.log_z["bar"].value + 4, 0.1)
    assert "about log Z" in replace(out, started_from=replace(start, log_z={"bar": far})).verdict(scalars).reasons[0]
