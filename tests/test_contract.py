"""One contract for every process and explorer that is exported, and for those of `examples/`.

    control off (target = model = proposal)      |log_work| <= 1e-10
    ratios                                       the same in both directions; at one time, antisymmetric
    rows                                         in any order, in any micro-batch
    snapshot and restore                         the chain goes on bit for bit

Each check also runs on a broken twin, which it must refute.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from full_covariance import Full
from mala import Mala, RandomBounce

import crepe_diffusion as cd
from checks import refuted
from crepe_diffusion.processes import Counted, Euler, EulerMaruyama, Gaussian, Masked, Process, TokenMoves, Uniform
from crepe_diffusion.targets import Target

MIXTURE = cd.models.GaussianMixture(
    [0.3, 0.7], [[-1.0, 0.5, 0.2], [1.5, -0.3, 1.0]], [[0.4, 0.6, 1.1], [0.3, 0.8, 0.5]]
)
SIGMAS, SURVIVAL = cd.ladder.karras(5, 0.05, 5.0, substeps=2), cd.ladder.linear(5, substeps=2, t_max=0.95)
MASKED, UNIFORM = (
    cd.models.TokenTable(cd.Stream(1).uniform((3, 3, 3)) + 0.1, kind)  # three positions of three tokens
    for kind in ("masked", "uniform")
)


def twin(of, **methods):
    """A copy with some methods replaced."""
    broken = copy.copy(of)
    object.__setattr__(broken, "__class__", type("Twin", (type(of),), methods))
    return broken


@dataclass(frozen=True)
class Case:
    """A model with a process and, for explorers, what explores."""

    model: cd.models.Model
    process: Process
    explorer: object = None
    target: Target | None = None

    @property
    def ladder(self):
        return SURVIVAL if self.process.is_discrete else SIGMAS

    def chain(self, target=None, **options):
        options = {"n_chains": 2, "seed": 3, "process": self.process, "explorer": self.explorer, **options}
        return cd.ReplicaExchange(target or self.target or self.model**1.3, self.ladder, fit_samples=32, **options)


PROCESSES = {
    "Gaussian, rho": Case(MIXTURE, Gaussian(variance=0.7)),
    "Gaussian, isotropic": Case(MIXTURE, Gaussian(variance="fisher")),
    "Gaussian, adaptive": Case(MIXTURE, Gaussian()),
    "Gaussian, diagonal": Case(MIXTURE, Gaussian(variance="fisher-diagonal")),
    "Gaussian, full (example)": Case(MIXTURE, Gaussian(variance=Full)),
    "Gaussian, known densities": Case(MIXTURE, Gaussian(log_probs=(MIXTURE.log_prob,))),
    "EulerMaruyama": Case(MIXTURE, EulerMaruyama(reference=0.8)),
    "Masked": Case(MASKED, Masked(3)),
    "Counted": Case(MASKED, Counted(3)),
    "Masked, all at once": Case(MASKED, Masked(3, at_once=None)),
    "Uniform": Case(UNIFORM, Uniform(3, at_once=None)),
    "Euler, masked": Case(MASKED, Euler(base=Masked(3))),
    "Euler, uniform": Case(UNIFORM, Euler(base=Uniform(3))),
}
EXPLORERS = {
    "Bounce": Case(MIXTURE, Gaussian(), cd.Bounce()),
    "Bounce of tokens": Case(MASKED, Masked(3), cd.Bounce(2)),
    "Bounce of counted masks": Case(MASKED, Counted(3), cd.Bounce(2)),
    "Langevin": Case(MIXTURE, Gaussian(), cd.Langevin(0.5)),
    "SingleToken, masked": Case(MASKED, Masked(3), cd.SingleToken(2)),
    "SingleToken, uniform": Case(UNIFORM, Uniform(3), cd.SingleToken()),
    "Mala (example)": Case(MIXTURE, Gaussian(), Mala()),
    "RandomBounce (example)": Case(MIXTURE, Gaussian(variance=Full), RandomBounce(2)),
}


def exported(*packages):
    found = (getattr(package, name) for package in packages for name in package.__all__)
    return {value for value in found if inspect.isclass(value)}


def test_every_exported_process_has_a_case():
    concrete = {c for c in exported(cd.processes) if issubclass(c, Process) and not inspect.isabstract(c)}
    assert len(concrete) >= 5
    assert concrete <= {type(case.process) for case in PROCESSES.values()}


def test_every_exported_explorer_has_a_case():
    """Restitch draws whole plans and has exact tests of its own, in test_restitch.py."""
    moves = {c for c in exported(cd, cd.kernels, cd.stitching) if hasattr(c, "check") and "__call__" in vars(c)}
    moves = {c for c in moves if not getattr(c, "_is_protocol", False)} - {cd.stitching.Restitch}
    assert len(moves) >= 3
    assert moves <= {type(case.explorer) for case in EXPLORERS.values()}


@pytest.fixture(params=PROCESSES)
def case(request):
    return PROCESSES[request.param]


@pytest.fixture(params=EXPLORERS)
def moved(request):
    return EXPLORERS[request.param]


# -- processes ------------------------------------------------------------------------------------------------


def replaced(case, **methods):
    return Case(case.model, twin(case.process, **methods), case.explorer, case.target)


def check_control_off(case):
    chain = case.chain(case.model)
    if case.process.log_probs is not None:  # known densities are not the proposal's kernels
        chain.evaluate.process = replace(chain.evaluate.process, log_probs=None)
    for _ in range(3):
        assert chain.step().swaps.log_work.nan_to_num().abs().max() <= 1e-10


def test_control_off(case):
    check_control_off(case)
    right = type(case.process).kernel_ratios

    def kernel_ratios(self, *arguments):
        models, proposal = right(self, *arguments)
        return 1.001 * models, proposal

    def log_conditionals(self, *arguments):
        each = Masked.log_conditionals(self, *arguments)
        each[:-1] *= 1.001
        return each

    refuted(check_control_off, replaced(case, kernel_ratios=kernel_ratios, log_conditionals=log_conditionals))


def steps(case, n=24):
    """Rows at mixed times, one step up from each, and what is known of both ends."""
    chain = case.chain()
    evaluate, times = chain.evaluate, case.ladder.times
    index = torch.arange(n) % (len(times) - 1)
    x = chain.state.x[torch.arange(n) % len(chain.state.x)]
    seen, s, t = evaluate(x, times[index]), times[index], times[index + 1]
    y = evaluate.process.step(x, seen, s, t, torch.ones(n, dtype=torch.bool), cd.Stream(4), evaluate.coefficients)
    return evaluate, x, y, seen, evaluate(y, t), s, t


def check_directions(case):
    evaluate, x, y, at_x, at_y, s, t = steps(case)
    up = torch.ones(len(x), dtype=torch.bool)
    rising = evaluate.process.step_ratios(x, y, at_x, at_y, s, t, up, evaluate.coefficients)
    falling = evaluate.process.step_ratios(y, x, at_y, at_x, s, t, ~up, evaluate.coefficients)
    assert all(torch.equal(a, b) for a, b in zip(rising, falling, strict=True))


def test_ratios_do_not_depend_on_the_direction(case):
    check_directions(case)
    right = type(case.process).step_ratios

    def step_ratios(self, x, x_new, seen, seen_new, s, t, up, coefficients):
        return right(self, x, x_new, seen, seen_new, s, t, torch.ones_like(up), coefficients)

    refuted(check_directions, replaced(case, step_ratios=step_ratios))


def check_antisymmetric(case):
    evaluate, _, x, _, at_x, _, t = steps(case)
    process = evaluate.process
    if process.is_discrete:
        mover = process if isinstance(process, TokenMoves) else process.base
        y = mover.local_move(x, torch.log_softmax(at_x.predictions[0], -1), cd.Stream(5))
    else:
        y = x + 0.1 * cd.Stream(5).normal(tuple(x.shape))
    at_y = evaluate(y, t)
    there, back = (process.log_density_ratios(*way, t) for way in ((x, y, at_x, at_y), (y, x, at_y, at_x)))
    assert there.abs().max() > 1e-3
    torch.testing.assert_close(there, -back, atol=1e-10, rtol=0)


def test_density_ratios_are_antisymmetric(case):
    check_antisymmetric(case)
    right = type(case.process).log_density_ratios

    def log_density_ratios(self, *arguments):
        return right(self, *arguments) + 1e-6

    refuted(check_antisymmetric, replaced(case, log_density_ratios=log_density_ratios))


def check_row_order(case):
    evaluate, x, y, at_x, at_y, s, t = steps(case)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    plain = evaluate.process.log_ratios(x, y, at_x, at_y, s, t, evaluate.coefficients)
    shuffled = evaluate.process.log_ratios(
        x[order], y[order], at_x.rows(order), at_y.rows(order), s[order], t[order], evaluate.coefficients
    )
    for a, b in zip(plain, shuffled, strict=True):
        torch.testing.assert_close(a[..., order], b, atol=1e-10, rtol=0)


def test_rows_come_in_any_order(case):
    check_row_order(case)
    right = type(case.process).log_ratios

    def log_ratios(self, *arguments):
        models, proposal = right(self, *arguments)
        return models + 1e-6 * torch.arange(models.shape[1]), proposal

    refuted(check_row_order, replaced(case, log_ratios=log_ratios))


def check_micro_batch(case, **options):
    whole, parts = case.chain(**options), case.chain(micro_batch=3, **options)
    for _ in range(3):
        whole.step(), parts.step()
    assert torch.equal(whole.state.level, parts.state.level)
    torch.testing.assert_close(whole.state.x, parts.state.x, atol=1e-10, rtol=0)
    torch.testing.assert_close(whole.state.seen.drift, parts.state.seen.drift, atol=1e-8, rtol=1e-10, equal_nan=True)


def test_any_micro_batch(case):
    check_micro_batch(case)
    right = type(case.process).drift

    def drift(self, x, *others):
        return right(self, x, *others) * (1 + 1e-3 * len(x))

    refuted(check_micro_batch, replaced(case, drift=drift))


def check_restored(case, change=lambda state: state):
    chain = case.chain()
    chain.step(), chain.step()
    again = case.chain(start=change(chain.snapshot()))
    for _ in range(3):
        chain.step(), again.step()
    now, then = chain.snapshot(), again.snapshot()
    assert now.keys() == then.keys()
    for name in now:
        assert torch.equal(now[name].nan_to_num(), then[name].nan_to_num()), name


def forgotten(state):
    """A snapshot that lacks one iteration."""
    return {**state, "iteration": state["iteration"] - 1}


def test_restored_chains_go_on(case):
    check_restored(case)
    refuted(check_restored, case, forgotten)


@pytest.mark.parametrize("name", [name for name, case in PROCESSES.items() if case.process.needs_fit()])
def test_what_was_measured_is_restored(name):
    case = PROCESSES[name]
    state = case.chain().evaluate.process.state_dict()
    assert state
    information = case.process.restored(state).information
    assert type(information) is case.process.to_measure()

    def check(state):
        check_restored(case, lambda snapshot: {**snapshot, **{f"process.{k}": v for k, v in state.items()}})

    check(state)
    refuted(check, {**state, "values": 0.9 * state["values"]})


# -- explorers ------------------------------------------------------------------------------------------------


def check_fresh(case):
    """What is stored about every replica is what an evaluation of it returns, and its level is untouched."""
    chain = case.chain()
    before = chain.state.level.clone()
    state, changed = case.explorer(chain.state, chain.evaluate, cd.Stream(6))
    assert torch.equal(state.level, before)
    assert changed.any()
    fresh = chain.evaluate(state.x, case.ladder.levels[state.level.flatten()])
    for a, b in zip((fresh.drift, *fresh.predictions), (state.seen.drift, *state.seen.predictions), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_explorers_store_what_belongs_to_the_point(moved):
    check_fresh(moved)
    right = type(moved.explorer).__call__

    def stale(self, state, evaluate, stream):
        seen = copy.deepcopy(state.seen)
        new, changed = right(self, state, evaluate, stream)
        return cd.kernels.State(new.x, seen, new.level), changed

    refuted(check_fresh, Case(moved.model, moved.process, twin(moved.explorer, __call__=stale)))


def test_explorers_in_any_micro_batch(moved):
    check_micro_batch(moved)
    right = type(moved.explorer).__call__

    def unequal(self, state, evaluate, stream):
        return right(self, state, evaluate, stream.at(str(evaluate.micro_batch)))

    refuted(check_micro_batch, Case(moved.model, moved.process, twin(moved.explorer, __call__=unequal)))


def test_chains_with_explorers_go_on(moved):
    check_restored(moved)
    refuted(check_restored, moved, forgotten)


@pytest.mark.parametrize("name", [name for name, case in EXPLORERS.items() if isinstance(case.explorer, cd.Bounce)])
def test_control_off_accepts_every_bounce(name):
    case = EXPLORERS[name]

    def check(power):
        chain = case.chain(case.model**power, proposal=cd.Proposal(k=(0.0, 1.0)))
        seen = []

        def accept(log_alpha, stream):
            seen.append(log_alpha[log_alpha > -torch.inf])
            return cd.kernels.metropolis(log_alpha, stream)

        explorer = copy.copy(case.explorer)
        object.__setattr__(explorer, "accept", accept)
        explorer(chain.state, chain.evaluate, cd.Stream(8))
        assert torch.cat(seen).abs().max() <= 1e-10

    check(1.0)
    refuted(check, 1.3)
