"""Small promises that large tests pass over: defaults, what is just allowed, words, and numbers of a progress bar."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import crepe_diffusion as cd
from checks import f64
from crepe_diffusion.diagnostics.verdict import FEW_CLUSTERS
from crepe_diffusion.kernels.explore import explore
from crepe_diffusion.processes import (
    Coefficients,
    Counted,
    Euler,
    EulerMaruyama,
    FisherTable,
    Gaussian,
    Masked,
    Uniform,
)
from crepe_diffusion.processes.quadrature import _enough
from crepe_diffusion.samplers import choose
from crepe_diffusion.samplers.discretisation import Doubling
from crepe_diffusion.samplers.plan import Cut, Plan
from crepe_diffusion.samplers.setup import positive

pilots = importlib.import_module("crepe_diffusion.samplers.pilot")  # `samplers.pilot` is the function
MODEL = cd.models.GaussianMixture([0.7, 0.3], [[-1.5, 0.0], [1.5, 0.0]], [0.30, 0.20])
OTHER = cd.models.GaussianMixture([1.0], [[0.5, 0.0]], [0.8])
TARGET = MODEL**2.0
LADDER = cd.ladder.karras(9, 0.02, 10.0)
SUBSTEPS = cd.ladder.karras(3, 0.02, 10.0, substeps=2)
FAST = {"process": Gaussian(variance=0.3)}
TABLE = f64([[0.4, 0.1], [0.2, 0.3]])
EXACT = Gaussian(variance=0.3, log_probs=(MODEL.log_prob,))


@pytest.fixture(scope="module")
def found() -> cd.Pilot:
    return cd.pilot(TARGET, LADDER, n=16, seed=8, process=EXACT)


# -- defaults ------------------------------------------------------------------------------------------------

COMMON = {"seed": 0, "nonfinite": "raise"}
CHAIN = {**COMMON, "n_chains": 1, "fit_samples": 256}
DEFAULTS = {
    cd.ReplicaExchange: {**CHAIN, "accept": cd.kernels.metropolis},
    cd.ReplicaExchange.sample: {"burn_in": 0, "thin": 1},
    cd.ParticleGibbs: {**CHAIN, "n_particles": 32, "ess_threshold": 0.5},
    cd.ParticleGibbs.sample: {"burn_in": 0},
    cd.SMC: {**COMMON, "n_particles": 64, "n_batches": 1, "ess_threshold": 0.5, "pool": "z", "fit_samples": 256},
    cd.SMC.sample: {"n": 1},
    cd.Plain: CHAIN,
    cd.pilot: {**COMMON, "n": 64},
    cd.sample: {**COMMON, "n_effective": 100, "budget": 200_000},
    cd.Langevin: {"scale": 1.0},
    cd.Bounce: {"n_steps": 1, "accept": cd.kernels.metropolis},
    cd.SingleToken: {"n_moves": 1, "accept": cd.kernels.metropolis},
    cd.Partial: {"share": 0.8},
    cd.FeynmanKac: {"cooled": False},
    Masked: {"at_once": "auto"},
    Uniform: {"at_once": "auto", "nodes": 3},
    Gaussian: {"variance": "auto"},
    EulerMaruyama: {},
}


@pytest.mark.parametrize("call", DEFAULTS, ids=lambda call: call.__qualname__)
def test_defaults(call):
    parameters = inspect.signature(call).parameters.values()
    found = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    assert found == DEFAULTS[call]
    assert [type(v) for v in found.values()] == [type(DEFAULTS[call][name]) for name in found]
    by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if "explore" in call.__module__ and "accept" not in call.__qualname__:
        assert call.by_rows is True
    assert {"seed", "log_probs", "mask"} & {p.name for p in parameters} <= by_name or call is cd.pilot


# -- what is just allowed, and just refused ------------------------------------------------------------------

BASIS = torch.eye(3, dtype=torch.float64)
PADDED = torch.tensor([True, False])
OTHERWISE = cd.Proposal(exponents=(0.5,))
TILTED = MODEL.tilt(lambda x: x[:, 0], guidance="gradient")
ALLOWED = {
    "a guided walk of correctors": lambda: cd.SMC(TILTED, LADDER, weight=cd.FeynmanKac(), **FAST),
    "correctors that are told what they do": lambda: cd.SMC(
        MODEL.tilt(lambda x: x[:, 0]),
        LADDER,
        weight=cd.FeynmanKac(),
        proposal=cd.Proposal(guidance="gradient"),
        **FAST,
    ),
    "a share of nothing": lambda: cd.Partial(0.0),
    "a share of all": lambda: cd.Partial(1),
    "no resampling": lambda: cd.SMC(TARGET, LADDER, ess_threshold=0, **FAST),
    "resampling always": lambda: cd.SMC(TARGET, LADDER, ess_threshold=1, n_particles=1, **FAST),
    "no resampling of kept paths": lambda: cd.ParticleGibbs(TARGET, LADDER, ess_threshold=0, n_particles=2, **FAST),
    "kept paths resampled always": lambda: cd.ParticleGibbs(TARGET, LADDER, ess_threshold=1, n_particles=2, **FAST),
    "data of no width": lambda: Gaussian(variance=0.0),
    "a reference of no width": lambda: EulerMaruyama(reference=0.0),
    "a whole basis": lambda: Gaussian(basis=BASIS),
    "a part of a basis": lambda: Gaussian(basis=BASIS[:1]),
    "a basis in single precision": lambda: Gaussian(basis=(1 + 4e-5) * BASIS),
    "a diagonal variance in a basis": lambda: Gaussian(variance="fisher-diagonal", basis=BASIS),
    "one variance on a zero mean": lambda: Gaussian(variance="fisher", zero_mean=0),
    "two tokens": lambda: Masked(2, torch.tensor([-1, 1]), at_once=1, mask_id=0),
    "the mask behind all tokens": lambda: Masked(2, torch.tensor([-1, 0]), at_once=2, mask_id=2),
    "two nodes": lambda: Uniform(2, nodes=2, at_once=None),
    "a ladder of tokens up to 1": lambda: Masked(2).check_times(f64([0.0, 1.0])),
    "a fit of 16 samples": lambda: cd.Plain(MODEL, LADDER, fit_samples=16),
    "a bounce of all sub-steps": lambda: cd.ReplicaExchange(TARGET, SUBSTEPS, explorer=cd.Bounce(2), **FAST),
    "a pilot of two": lambda: cd.pilot(MODEL, LADDER, 2, **FAST),
    "burn-in of nothing": lambda: positive("burn_in", 0, 0),
    "prompts of one kind": lambda: Masked(3, torch.tensor([[-1, 1], [-1, 2]])).check_event(torch.Size([2])),
    "two prompts for four rows": lambda: Masked(3, torch.tensor([[-1, 1], [-1, 2]])).with_prompt(
        torch.zeros(4, 2, dtype=torch.long)
    ),
    "a mask of the event": lambda: Gaussian(mask=PADDED).check_event(torch.Size([2])),
    "an event of two pieces": lambda: Gaussian(basis=BASIS).check_event(torch.Size([2, 3])),
}
REFUSED = {
    "a negative share": (lambda: cd.Partial(-0.1), "share must be between 0 and 1, got -0.1"),
    "a negative threshold": (lambda: cd.SMC(TARGET, LADDER, ess_threshold=-0.1, **FAST), "between 0 and 1, got -0.1"),
    "a negative threshold of kept paths": (
        lambda: cd.ParticleGibbs(TARGET, LADDER, ess_threshold=-0.1, **FAST),
        "between 0 and 1, got -0.1",
    ),
    "no number for data": (lambda: Gaussian(variance=float("nan")), "got nan"),
    "a basis that is off": (lambda: Gaussian(basis=(1 + 2e-4) * BASIS), "orthonormal; they are off by 0.0004"),
    "a basis of one row without its axis": (lambda: Gaussian(basis=BASIS[0]), r"shape \(3,\)"),
    "a basis and a zero mean": (lambda: Gaussian(basis=BASIS, zero_mean=0), "either basis or zero_mean"),
    "a basis and a mask": (lambda: Gaussian(basis=BASIS, mask=PADDED), "either basis or mask"),
    "a mask of numbers": (lambda: Gaussian(mask=PADDED.long()), "mask must hold booleans"),
    "nothing but padding": (lambda: Gaussian(mask=PADDED & False), "mask must hold booleans"),
    "no position at once": (lambda: Masked(3, at_once=0), "at_once must be .* got 0"),
    "a true number of positions": (lambda: Masked(3, at_once=True), "at_once must be .* got True"),
    "positions by another name": (lambda: Uniform(3, at_once="all"), "at_once must be .* got 'all'"),
    "a true mask": (lambda: Masked(3, mask_id=True), "mask_id must be .* got True"),
    "a prompt of the mask": (lambda: Masked(3, torch.tensor([-1, 2]), mask_id=2), "prompt freezes the mask, 2"),
    "one node": (lambda: Uniform(3, nodes=1), "nodes must be .* got 1"),
    "true nodes": (lambda: Uniform(3, nodes=True), "nodes must be .* got True"),
    "counted masks at once": (lambda: Counted(3, at_once=None), "where masks are counted, got None"),
    "no base": (lambda: Euler(), "base must be a Masked or Uniform process, got None"),
    "a ladder of tokens beyond 1": (lambda: Masked(2).check_times(f64([0.0, 1.01])), "got 1.01"),
    "a fit of 15 samples": (lambda: cd.Plain(MODEL, LADDER, fit_samples=15), "at least 16 samples, got 15"),
    "half a sample": (
        lambda: cd.Plain(MODEL, LADDER, fit_samples=16.5),
        "fit_samples must be a positive integer, got 16.5",
    ),
    "no bounce": (
        lambda: cd.ReplicaExchange(TARGET, SUBSTEPS, explorer=cd.Bounce(0), **FAST),
        "between 1 and the ladder's 2 sub-steps, got 0",
    ),
    "a truth": (lambda: positive("n", True), "n must be a positive integer, got True"),
    "less than the least": (lambda: positive("n", 1, 2), "n must be an integer of at least 2, got 1"),
    "prompts that freeze other positions": (
        lambda: Masked(3, torch.tensor([[-1, 1], [0, -1]])).check_event(torch.Size([2])),
        "freeze the same positions",
    ),
    "prompts of another shape": (
        lambda: Masked(3, torch.tensor([[-1, 1], [0, -1]])).check_event(torch.Size([3])),
        r"shape of the event \(3,\), got \(2, 2\)",
    ),
    "two prompts for three rows": (
        lambda: Masked(3, torch.tensor([[-1, 1], [-1, 2]])).with_prompt(torch.zeros(3, 2, dtype=torch.long)),
        "2 prompts need .* got 3 rows",
    ),
    "a mask of another event": (
        lambda: Gaussian(mask=PADDED).check_event(torch.Size([3])),
        r"shape of the event \(3,\), got \(2,\)",
    ),
    "Langevin along another score": (
        lambda: cd.ReplicaExchange(MODEL, LADDER, explorer=cd.Langevin(), proposal=OTHERWISE, **FAST),
        "but the proposal has other exponents",
    ),
    "correctors along another score": (
        lambda: cd.SMC(MODEL, LADDER, weight=cd.FeynmanKac(), proposal=OTHERWISE, **FAST),
        "leave the proposal's exponents unset",
    ),
    "correctors of unguided walks": (
        lambda: cd.SMC(TILTED, LADDER, weight=cd.FeynmanKac(), proposal=cd.Proposal(guidance="none"), **FAST),
        'guidance="gradient" and no clip',
    ),
    "correctors of tokens": (
        lambda: cd.SMC(cd.models.TokenTable(TABLE), cd.ladder.linear(3), weight=cd.FeynmanKac()),
        "FeynmanKac is for Gaussian diffusions",
    ),
    "a starter of another weight": (
        lambda: cd.SMC(MODEL, LADDER, weight=cd.Steering(), starter=object(), **FAST),
        r"use PathWork\(\), not Steering",
    ),
    "an output before the first pass": (lambda: cd.SMC(MODEL, LADDER, **FAST).output(), r"call step\(\) first"),
    "batches pooled by another name": (lambda: cd.SMC(MODEL, LADDER, pool="equally", **FAST), "pool must be one of"),
    "log Z by another name": (lambda: cd.pilot(MODEL, LADDER, 2, **FAST).log_z("both"), "method must be one of"),
    "an information that is not needed": (
        lambda: cd.samplers.information.information_from_data(
            MODEL, torch.zeros(4, 2), f64([1.0]), FAST["process"], cd.Stream(0)
        ),
        "nothing is to be measured",
    ),
    "an information that has not been measured": (
        lambda: Gaussian().model_variance(0, f64([0.1]), f64([0.2])),
        "has not been measured yet",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_just_allowed(name):
    ALLOWED[name]()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_just_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(cd.InputError, match=message):
        call()


def test_counted_masks_round_to_the_last_position():
    """.95 of four positions are all of them; one more than half of the gap is missing at .85."""
    like = torch.zeros(1, 4, dtype=torch.long)
    coefficients = Coefficients((1.0,), (1.0,), 0.0, 1.0)
    assert Counted(3).noise(cd.Stream(0), like, 0.95, coefficients).tolist() == [[3] * 4]
    with pytest.raises(cd.InputError, match="unmasked"):
        Counted(3).noise(cd.Stream(0), like, 0.85, coefficients)


@pytest.mark.parametrize("ends", [[0], [0, 0], [2, 1], [-1, 3], [0, 9], []])
def test_times_of_levels_that_cannot_be(found, ends):
    with pytest.raises(cd.InputError, match="increasing times between 0 and 8"):
        found.acceptance(ends)
    assert found.acceptance([0, 8]).shape == (1,)


def test_a_share_of_nothing_still_resamples_two():
    """The lightest and the heaviest, with half of their weight each; the others stay as they are."""
    log_w = f64([[0.1, 0.2, 0.7]]).log()
    index, new = cd.Partial(0.0)(log_w, cd.Stream(1))
    assert index[0, 1] == 1
    assert set(index[0, [0, 2]].tolist()) <= {0, 2}
    torch.testing.assert_close(new.exp(), f64([[0.4, 0.2, 0.4]]))
    index, new = cd.Partial(0.5)(torch.zeros(1, 1, dtype=torch.float64), cd.Stream(1))
    assert (index.tolist(), new.tolist()) == ([[0]], [[0.0]])


# -- words ---------------------------------------------------------------------------------------------------


HIDDEN = {"target", "given", "x", "end", "log_weights", "eve", "down", "up", "up_log_weights", "up_eve", "features"}
HIDDEN |= {"log_first", "steps"}


def test_what_is_printed_has_no_tensors_and_no_functions(found):
    assert repr(cd.Bounce()) == "Bounce(n_steps=1)"
    assert repr(cd.SingleToken(2)) == "SingleToken(n_moves=2)"
    assert "log_probs" not in repr(EXACT)
    assert repr(found).startswith("Pilot(ladder=")
    names = [part.split("=")[0].split(" ")[-1] for part in repr(replace(found, process=None, ladder=None)).split(",")]
    assert not HIDDEN & set(names)


def test_the_table_of_a_plan():
    cuts = (Cut(2, 4, 0.5, 1.25, 3.0, 2.0), Cut(16, 1, 1.0, 10.0, 0.25, 0.5))
    assert str(Plan(LADDER, cuts[0], cuts)).splitlines() == [
        "     pairs x sub-steps   sum r   sum r/(1-r)   arrivals   effective, per 1,000 rows",
        "  ->     2 x 4            0.50          1.25       3.00        2.00",
        "        16 x 1            1.00         10.00       0.25        0.50",
    ]


def test_the_words_of_a_pilot(found):
    text, least = str(found).splitlines(), float(found.ess.min())
    assert text[0] == "pilot of 16 particles over 8 steps: 272 network rows"
    down, up = found.log_z("down"), found.log_z("up")
    assert text[1] == f"  log Z            {found.log_z()}   (down {down}, up {up})"
    assert text[2] == "  step size        0 ± 0 of log Z" or text[2].startswith("  step size        ")
    assert text[3] == f"  effective        {float(found.ess[0]):.1f} particles at the data end, {least:.1f} at least"
    assert "\n".join(text[4:]) == str(found.plan())


def test_the_words_of_a_choice(found):
    """What was chosen and why, what it cost, and whether that was enough."""
    forecasts = (
        choose.Forecast("SMC", "batches of 16 particles, pooled by Z", 0.6149),
        choose.Forecast("particle Gibbs", "16 particles", 334.2),
        choose.Forecast("replica exchange", "1 pair", 12.6),
    )
    assert str(forecasts[1]) == "particle Gibbs (16 particles): 330"
    draws = SimpleNamespace(evaluations=SimpleNamespace(rows=12_500))
    out = choose.Sampled(None, draws.evaluations, draws, found, forecasts, 50.0, 50, 20_000, {}, None)
    words = (
        "SMC was chosen (batches of 16 particles, pooled by Z). A pilot of 16 particles predicts 0.61 effective draws"
        " per 1,000 network rows for it, 330 for particle Gibbs (16 particles) and 13 for replica exchange (1 pair). It"
        " cost 12,500 of 20,000 rows, of which 272 are the pilot's, and gave 50 effective draws for the scalar that is"
        " known worst ({}): 4 per 1,000 rows, pilot included. The size of the steps moves log Z by about"
        f" {found.discretisation['bar']}."
    )
    assert out.choice == words.format("as many as were asked for")
    assert replace(out, wanted=51).choice == words.format("51 were asked for")
    assert "pilot" not in repr(replace(out, draws=None))


# -- progress ------------------------------------------------------------------------------------------------


def seen_by(call) -> list[tuple[int, int, str]]:
    calls: list[cd.progress.Progress] = []
    call(lambda now: calls.append(now) and False)
    return [(now.done, now.total, now.unit) for now in calls]


@pytest.mark.parametrize(("target", "n_steps", "fitted"), [(MODEL, 20, 17), (MODEL * OTHER, 8, 18), (MODEL, 8, 0)])
def test_progress_of_a_pilot_counts_its_fit(target, n_steps, fitted):
    """A time of a fit of each model, at most 17 of them, then all steps down and up."""
    process = None if fitted else FAST["process"]
    steps = cd.ladder.karras(n_steps + 1, 0.02, 10.0)
    calls = seen_by(lambda callback: cd.pilot(target, steps, 2, process=process, fit_samples=16, callback=callback))
    total = fitted + 2 * n_steps
    assert calls == [(i, total, "steps") for i in range(1, total + 1)]
    stop_at_the_end = cd.pilot(
        target, steps, 2, process=process, fit_samples=16, callback=lambda now: now.done == total
    )
    assert stop_at_the_end.n == 2


def test_progress_of_sweeps_counts_burn_in():
    chain = cd.ParticleGibbs(TARGET, LADDER, n_particles=2, **FAST)
    assert seen_by(lambda callback: chain.sample(2, burn_in=3, callback=callback)) == [
        (i, 5, "sweeps") for i in range(1, 6)
    ]


def test_progress_of_passes_counts_levels():
    smc = cd.SMC(TARGET, LADDER, n_particles=2, **FAST)
    assert seen_by(lambda callback: smc.sample(2, callback=callback)) == [(i, 16, "levels") for i in range(1, 17)]


def test_progress_of_a_choice_counts_rows():
    """First the shares of a pilot whose cost is guessed, then from what it has cost."""
    options = {"n_effective": 10_000, "budget": 6_000, "process": EXACT}
    calls: list[cd.progress.Progress] = []

    def callback(now):
        calls.append(now)
        return now.done > 5_000

    out = cd.sample(TARGET, LADDER, callback=callback, **options)
    n, steps = 28, 16
    guessed = n * (8 + 8 + 4 + 1) // steps
    assert {(now.total, now.unit) for now in calls} == {(6_000, "rows")}
    assert [now.done for now in calls[:steps]] == [guessed * i for i in range(1, steps + 1)]
    assert out.pilot.rows == n * (2 * 8 + 1)
    left = 6_000 - out.pilot.rows
    passes = int(left / out.method.least_rows)
    each = int(left / (8 * passes))
    assert [now.done - out.pilot.rows for now in calls[steps:]] == [each * i for i in range(1, len(calls) - steps + 1)]
    after: list[int] = []
    out.go_on(20_000, 12_000, callback=lambda now: after.append(now.done) or True)
    assert out.evaluations.rows < after[0] < out.evaluations.rows + 12_000


def test_what_a_choice_runs_shows_no_bars_of_its_own(found, capsys):
    for method in (
        choose._Smc(found, 2_000, 10, dict(COMMON)),
        choose._ReplicaExchange(found, 2_000, dict(COMMON)),
        choose._ParticleGibbs(found, 2_000, dict(COMMON)),
    ):
        method.more(300, lambda now: False)
    cd.sample(TARGET, LADDER, budget=2_000, process=EXACT, progress=False)
    assert capsys.readouterr().err == ""


# -- how a choice goes on ------------------------------------------------------------------------------------


class Given:
    """A method whose calls cost and give what is written here."""

    rate, least_rows = 50.0, 300.0

    def __init__(self, *calls: tuple[int, float]):
        self.calls, self.asked = list(calls), []

    def more(self, rows, callback):
        self.asked.append(rows)
        callback(cd.progress.Progress(1, 4, "passes", 0.0))
        spent, size = self.calls.pop(0)
        return SimpleNamespace(
            x=None, evaluations=SimpleNamespace(rows=spent), ess=lambda f: size, values=lambda f: torch.arange(2)
        )


def run(
    method: Given, wanted: int, budget: int, stop_at: float = 1e9, draws: object = None, seen: list[int] | None = None
) -> choose.Sampled:
    def callback(now: cd.progress.Progress) -> bool:
        if seen is not None:
            seen.append(now.done)
        return now.done >= stop_at

    track = cd.progress.Track(budget, "rows", False, callback)
    pilot = SimpleNamespace(rows=1_000)
    return choose._run(method, pilot, (), wanted, budget, {"first": None}, track, draws)


def test_rows_are_planned_by_the_rate_so_far():
    """First by the forecast; then by what was reached, a tenth more, and at most as much again."""
    method = Given((3_000, 50.0), (5_300, 80.0), (7_000, 99.0), (7_100, 100.0))
    out = run(method, 100, 20_000)
    assert method.asked == [
        pytest.approx(1_000 * 100 / 50),
        pytest.approx(2_000),  # 2,200 would be enough
        pytest.approx(1.1 * 4_300 * (100 / 80 - 1)),
        pytest.approx(1.1 * 6_000 * (100 / 99 - 1)),
    ]
    assert (out.n_effective, out.evaluations.rows) == (100.0, 7_100)


def test_a_choice_ends_where_no_step_is_left():
    method = Given((3_000, 0.0), (4_700, 0.5), (4_990, 1.0), (4_991, 1.0))
    assert run(method, 100, 5_000).evaluations.rows == 4_990, "300 rows are what a step costs"
    assert method.asked == [2_000, 2_000, 300]
    method, done = Given((3_000, 0.5), (3_300, 1.0)), []
    run(method, 1, 5_000, seen=done)
    assert method.asked == [20, 0], "an effective size below one is taken for one"
    assert done == [20 // 4, 3_000 + 1], "a quarter of what is planned, at least one row"
    method = Given((4_000, 1.0), (4_701, 1.0), (4_999, 1.0))
    assert run(method, 100, 5_000).evaluations.rows == 4_701
    assert method.asked == [2_000, 1_000], "no more than are left"
    method = Given((2_500, 1.0), (3_000, 1.0))
    assert run(method, 100, 5_000, stop_at=500).evaluations.rows == 2_500, "stopped by the callback"
    before = SimpleNamespace(evaluations=SimpleNamespace(rows=4_500))
    method = Given((4_900, 1.0))
    run(method, 100, 5_000, draws=before)
    assert method.asked == [500]


def test_the_worst_scalar_that_changes_counts():
    x = torch.arange(4.0)
    draws = SimpleNamespace(values=lambda f: f(x), ess=lambda f: float(f(x).sum()))
    scalars = {"a": lambda x: x, "b": lambda x: x + 1, "constant": lambda x: 0 * x}
    assert choose._least(draws, scalars) == 6.0
    assert choose._least(draws, {"constant": scalars["constant"]}) == 0.0


def test_default_ladders_have_what_all_models_were_trained_on():
    def model(low, high):
        return cd.models.Denoiser(lambda y, sigma: y, (2,), sigma_range=(low, high))

    found = choose.default_ladder(model(0.02, 80.0) * model(0.01, 10.0))
    assert torch.equal(found.times, cd.ladder.karras(65, 0.02, 10.0).times)
    assert torch.equal(choose.default_ladder(cd.models.TokenTable(TABLE) ** 2.0).times, cd.ladder.linear(9).times)


@pytest.mark.parametrize(("budget", "steps", "n"), [(3_000, 8, 16), (6_000, 9, 26), (100_000, 8, 64)])
def test_a_pilot_takes_a_tenth_of_the_budget(budget, steps, n, monkeypatch):
    """Nine steps down, nine up, four of double size and the start: 23 rows of each particle."""
    asked = []

    def noted(target, ladder, n, seed, **options):
        asked.append((n, seed, len(ladder.times), options["progress"]))
        raise cd.StoppedError("enough")

    monkeypatch.setattr(choose, "pilot", noted)
    with pytest.raises(cd.StoppedError):
        cd.sample(TARGET, cd.ladder.karras(steps + 1, 0.02, 10.0), budget=budget, seed=3)
    assert asked == [(n, 6, steps + 1, False)]


def test_batches_of_a_pass_are_whole(found, monkeypatch):
    """73 batches of 28 particles: 36 of them are 1,024 particles, so three passes of 24."""
    monkeypatch.setattr(choose, "_repeated", lambda pilot: 1 / 28)
    smc = choose._Smc(replace(found, x=found.x[:, :1].expand(-1, 28, -1)), 9 * 28 * 73, 10**6, dict(COMMON))
    assert (smc.n_particles, smc.n_batches) == (28, 24)


def test_a_first_pass_that_is_stopped_has_no_result(found, monkeypatch):
    monkeypatch.setattr(choose, "_repeated", lambda pilot: 0.5)
    smc = choose._Smc(found, 20_000, 100, dict(COMMON))
    assert smc.n_particles > found.n
    with pytest.raises(cd.StoppedError):
        smc.more(300, lambda now: True)
    smc.parts.append(found.particles)
    assert torch.equal(smc.more(300, lambda now: True).x, found.end)


def test_what_was_chosen_is_handed_through(found):
    draws = cd.SMC(TARGET, LADDER, n_particles=8, **FAST).sample()
    out = choose.Sampled(draws.x, draws.evaluations, draws, found, (), 1.0, 1, 1, {"a": lambda x: x[:, 1]}, None)
    assert torch.equal(out.weights, draws.weights)
    assert out.log_z == draws.log_z
    assert out.mean(lambda x: x[:, 0]) == draws.mean(lambda x: x[:, 0])
    assert set(out.diagnostics) == set(draws.diagnostics)
    judged: list[object] = []
    out = replace(out, draws=SimpleNamespace(verdict=judged.append))
    other = {"b": lambda x: x[:, 0]}
    out.verdict(), out.verdict(other)
    assert judged == [out.scalars, other]


def test_relatives_are_taken_for_three_quarters_at_most():
    def pilot(*eves):
        return SimpleNamespace(
            n=4, eve=torch.tensor([eves, (0, 1, 2, 3)]), log_weights=f64([weights, [0.25] * 4]).log()
        )

    weights = [0.1, 0.2, 0.3, 0.4]
    assert choose._repeated(pilot(0, 1, 1, 3)) == pytest.approx(0.1**2 + 0.5**2 + 0.4**2)
    assert choose._repeated(pilot(0, 0, 0, 3)) == pytest.approx(0.6**2 + 0.4**2)
    assert choose._repeated(pilot(0, 0, 0, 0)) == 0.75
    assert choose._ReplicaExchange.margin == 3.0
    assert choose.Method.margin == 1.0


def test_a_sweep_of_an_earlier_version_goes_on():
    """Its snapshot does not say whether a path is kept: it is."""
    chain = cd.ParticleGibbs(TARGET, LADDER, n_particles=2, **FAST)
    start = chain.snapshot()
    del start["keeps"]
    assert cd.ParticleGibbs(TARGET, LADDER, n_particles=2, start=start, **FAST).keeps is True


# -- results -------------------------------------------------------------------------------------------------


def first(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def test_a_result_of_no_sweeps_is_not_trusted():
    chain = cd.ParticleGibbs(TARGET, LADDER, n_particles=2, n_chains=3, **FAST)
    out = chain.sample(2, burn_in=2, callback=lambda now: True)
    assert (out.n_chains, out.x.shape, out.weights.shape) == (3, (0, 2), (0,))
    assert (out.survivors.shape, out.level_ess.shape) == ((0, 9, 3), (0, 9, 3))
    verdict = out.verdict()
    assert (verdict.level, verdict.reasons, verdict.advice) == ("do not trust", ["there are no draws"], ["run longer"])
    assert out.log_z.value != out.log_z.value


def test_a_chain_can_be_iterated():
    chain, twin = (cd.ReplicaExchange(TARGET, LADDER, n_chains=2, **FAST) for _ in range(2))
    draws = [(x, info.iteration) for (x, info), _ in zip(chain, range(3), strict=False)]
    assert [n for _, n in draws] == [1, 2, 3]
    twin.step()
    assert torch.equal(draws[0][0], twin.output())


def test_one_cluster_gives_no_error_and_equal_values_no_size():
    out = cd.SMC(TARGET, LADDER, n_particles=4, **FAST).sample()
    one = replace(out, eve=torch.zeros_like(out.eve)).mean(first)
    assert (one.error, one.dof) == (float("inf"), 1.0)
    assert out.ess(lambda x: 0 * x[:, 0]) == 0.0
    sweeps = cd.ParticleGibbs(TARGET, LADDER, n_particles=4, **FAST).sample(3)
    assert sweeps.ess(lambda x: 0 * x[:, 0]) == 0.0
    draws = cd.Plain(TARGET, LADDER, **FAST).sample(1)
    assert draws.mean(first).error != draws.mean(first).error, "one draw shows no spread"
    assert draws.ess(first) == 1.0


def test_few_large_batches_have_the_errors_of_their_eves():
    """Batches of 16 particles or more, unless there are many of them; one batch always."""
    out = cd.SMC(TARGET, LADDER, n_particles=16, n_batches=FEW_CLUSTERS, **FAST).sample()
    assert out.clusters.tolist() == [b for b in range(FEW_CLUSTERS) for _ in range(16)]
    few = out.of_batches(range(FEW_CLUSTERS - 1))
    assert len(few.clusters.unique()) == len(few.eve.unique()) > FEW_CLUSTERS
    small = cd.SMC(TARGET, LADDER, n_particles=15, n_batches=2, **FAST).sample()
    assert small.clusters.tolist() == [0] * 15 + [1] * 15
    one = small.of_batches([1])
    assert len(one.clusters.unique()) == len(one.eve.unique()) > 1


def test_a_kept_path_of_no_weight_goes_on():
    """Its weight is too small for a number; the others share the places that are left."""
    log_w = f64([[-800.0, -0.7, -0.7], [-0.7, -800.0, -0.7]]).log_softmax(1)
    for seed in range(8):
        parents, new = cd.samplers.particle_gibbs.conditional_systematic(log_w, cd.Stream(seed))
        assert parents[:, 0].tolist() == [0, 0]
        assert set(parents[0, 1:].tolist()) <= {1, 2}
        assert 1 not in parents[1].tolist()
        torch.testing.assert_close(new.exp(), torch.full_like(new, 1 / 3))


def test_effective_sizes_are_those_of_the_weights():
    out = cd.SMC(MODEL**4.0, LADDER, n_particles=4, n_batches=3, **FAST).sample()
    w = out.log_weights.exp()
    torch.testing.assert_close(out.batch_ess, 1 / w.square().sum(1))
    torch.testing.assert_close(out.diagnostics["ess"], out.level_ess[0])
    assert out.diagnostics["eves"].tolist() == [len(set(e.tolist())) for e in out.by_batch(out.eve)]


def test_a_trace_of_passes_is_what_happened():
    smc = cd.SMC(MODEL**4.0, LADDER, n_particles=4, n_batches=3, **FAST)
    infos = [smc.step() for _ in range(5)]
    assert {bool(a) for i in infos for a in i.accepted} == {True, False}
    trace, row = smc.trace_rows(infos), smc.draw_row(infos[-1])
    assert trace["accepted"].tolist() == pytest.approx([float(i.accepted.double().mean()) for i in infos])
    assert trace["log_z"].tolist() == [i.log_z.tolist() for i in infos]
    assert trace["ess"].tolist() == [pytest.approx(i.level_ess.mean(1).tolist()) for i in infos]
    assert row["log_z"].tolist() == smc.log_z.tolist()
    assert (row["replica"].tolist(), row["born"].tolist()) == (smc.replica.tolist(), smc.born.tolist())
    for rows, columns, lead in ((trace, smc.trace_columns, (5,)), (row, smc.draw_columns, ())):
        assert {name: v.shape for name, v in rows.items()} == {n: (*lead, *c.shape) for n, c in columns.items()}
        assert all(len(c.names) == len(c.shape) for c in columns.values())


def test_few_levels_are_traced_and_many_are_not(monkeypatch):
    chain = cd.ReplicaExchange(TARGET, LADDER, n_chains=2, **FAST)
    monkeypatch.setattr(cd.samplers.replica_exchange, "MOST_LEVELS_TRACED", 18)
    assert "level" in chain.trace_columns
    monkeypatch.setattr(cd.samplers.replica_exchange, "MOST_LEVELS_TRACED", 17)
    assert set(chain.trace_rows([chain.step()])) == set(chain.trace_columns) == {"acceptance"}


# -- snapshots, pilots and new targets -----------------------------------------------------------------------

SAMPLERS = {
    "exchange": lambda target, **options: cd.ReplicaExchange(target, LADDER, n_chains=2, **options),
    "passes": lambda target, **options: cd.SMC(target, LADDER, n_particles=3, n_batches=2, **options),
    "sweeps": lambda target, **options: cd.ParticleGibbs(target, LADDER, n_particles=3, n_chains=2, **options),
    "plain": lambda target, **options: cd.Plain(target, LADDER, n_chains=2, **options),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_snapshot_and_its_sampler_do_not_share_memory(name):
    sampler = SAMPLERS[name](TARGET, **FAST)
    sampler.step()
    start, before = sampler.snapshot(), sampler.output().clone()
    again = SAMPLERS[name](TARGET, start=start, **FAST)
    for key in start:
        if "." not in key or key.startswith("seen."):
            start[key].zero_()
    for one in (sampler, again):
        assert torch.equal(one.output(), before)
    sampler.step(), again.step()
    assert torch.equal(sampler.output(), again.output())


@pytest.mark.parametrize("name", SAMPLERS)
def test_other_models_are_measured_again_and_the_same_ones_are_not(name):
    sampler = SAMPLERS[name](TARGET, fit_samples=20)
    sampler.step()
    rows, measured = sampler.evaluate.counts.rows, sampler.evaluate.process
    sampler.target = MODEL**3.0
    assert sampler.evaluate.process is measured
    known = {"exchange": 2 * 9, "sweeps": 2}.get(name, 0)  # what is kept is evaluated again
    assert sampler.evaluate.counts.rows == rows + known
    sampler.target = OTHER**1.0
    assert sampler.evaluate.counts.rows == rows + 2 * known + 2 + 20 * 9
    assert not torch.equal(sampler.evaluate.process.information.values, measured.information.values)
    assert sampler.target.models == (OTHER,)


@pytest.mark.parametrize("name", ["passes", "sweeps", "plain", "exchange"])
@pytest.mark.parametrize("change", ["points", "event", "models"])
def test_snapshots_of_other_problems_are_refused(name, change):
    start = SAMPLERS[name](TARGET, **FAST)
    start.step()
    start = start.snapshot()
    if change == "points":
        start["x"] = start["x"][:1]
    elif change == "event":
        start["x"] = start["x"][:, :1]
    elif name in ("passes", "plain"):
        return  # they keep no predictions
    else:
        del start["seen.prediction.0"]
    with pytest.raises(cd.InputError, match="the snapshot holds"):
        SAMPLERS[name](TARGET, start=start, **FAST)


def test_an_exchange_of_other_chains_is_refused():
    start = SAMPLERS["exchange"](TARGET, **FAST).snapshot()
    with pytest.raises(cd.InputError, match=r"holds 2 chains of 1 models on events .* but 3 chains of 1 models"):
        cd.ReplicaExchange(TARGET, LADDER, n_chains=3, start=start, **FAST)


@pytest.mark.parametrize("make", [cd.ReplicaExchange, cd.SMC])
def test_what_is_given_comes_before_what_the_pilot_has(found, make):
    other, process, proposal = cd.ladder.karras(4, 0.05, 8.0), Gaussian(variance=0.5), cd.Proposal("paper")
    sampler = make(TARGET, pilot=found)
    assert (sampler.evaluate.process, sampler.evaluate.proposal) == (found.process, found.proposal)
    assert sampler.process is found.given is EXACT
    assert torch.equal(sampler.started_from.x, found.end)
    rows = found.rows if make is cd.SMC else found.rows + sampler.ladder.n_levels
    assert sampler.evaluate.counts.rows == rows
    assert found.counts.rows == found.rows == 272, "its own counts are left alone"
    given = make(TARGET, other, pilot=found, process=process, proposal=proposal)
    assert (given.ladder, given.process, given.evaluate.process) == (other, process, process)
    assert given.evaluate.proposal == proposal
    if make is cd.SMC:
        assert torch.equal(sampler.ladder.times, LADDER.times)
        assert given.started_from is None, "of other steps the pilot has measured nothing"
        steered = make(TARGET, pilot=found, weight=cd.Steering())
        assert steered.started_from is None
        again = make(TARGET, LADDER, process=EXACT, start=sampler.snapshot())
        assert torch.equal(again.started_from.x, found.end)
        sampler.target = MODEL**3.0
        assert sampler.started_from is None


def test_a_pilot_is_read_as_it_was_written():
    process = Masked(2, at_once=2)
    target = cd.models.TokenTable(f64([[[0.3, 0.1], [0.1, 0.1]], [[0.1, 0.1], [0.1, 0.1]]])) ** 1.5
    proposal = cd.Proposal(exponents=(1.2,))
    one = cd.pilot(target, cd.ladder.linear(6), n=4, process=process, proposal=proposal)
    two = cd.Pilot.from_state_dict(one.state_dict(), target, process=process, proposal=proposal)
    assert (two.walk_rows, two.state_rows, two.in_turn) == (one.walk_rows, 1, True)
    assert (two.process, two.given, two.proposal) == (process, process, proposal)
    assert two.discretisation == one.discretisation
    assert two.discretisation["down"] != two.discretisation["up"]
    assert two.counts == one.counts
    assert type(two.state_rows) is int
    for name in ("x", "end", "log_weights", "eve", "down", "up", "up_log_weights", "up_eve", "features", "steps"):
        assert torch.equal(getattr(two, name), getattr(one, name))
    plain = cd.Pilot.from_state_dict(one.state_dict(), target)
    assert (plain.process, plain.given, plain.proposal) == (target.models[0].process(), None, cd.Proposal())
    fitted = cd.pilot(TARGET, LADDER, n=4)
    again = cd.Pilot.from_state_dict(fitted.state_dict(), TARGET).process
    assert torch.equal(again.information.values, fitted.process.information.values)


def test_samples_of_a_fit_are_a_multiple_of_the_conditions():
    """Three conditions: 16 samples become 18, and two rows of each are tried first."""
    rows: list[int] = []

    def network(y, sigma, condition):
        rows.append(len(y))
        return y / (1 + sigma[:, None] ** 2) + 0 * condition

    each = cd.models.Each([f64([c]) for c in (0.0, 1.0, 2.0)])
    model = cd.models.Denoiser(network, (2,), condition=each, dtype=torch.float64)
    cd.Plain(model, LADDER, n_chains=3, fit_samples=16)
    assert sum(rows) == 2 * 3 + 18 * 9


# -- where weights vanish ------------------------------------------------------------------------------------


class Deadly(cd.samplers.weights.Weight):
    """No particle of the second batch survives the way from level 3 to level 2."""

    def descend(self, evaluate, x, seen, m, stream):
        x, seen, gained = super().descend(evaluate, x, seen, m, stream)
        return x, seen, gained.where((torch.arange(len(x)) < len(x) // 2) | (m != 3), -torch.inf)


def test_the_level_where_weights_vanish_is_named(monkeypatch):
    smc = cd.SMC(TARGET, LADDER, n_particles=3, n_batches=2, weight=Deadly(), **FAST)
    with pytest.raises(
        cd.NonFiniteError, match="all weights of 1 of 2 batches vanished at level 2: use more particles"
    ):
        smc.sample()
    calls = []

    def nothing(path, coefficients):
        calls.append(1)
        return torch.full((len(path.x),), -torch.inf if len(calls) == 3 else 0.0, dtype=torch.float64)

    monkeypatch.setattr(pilots, "log_work", nothing)
    with pytest.raises(cd.NonFiniteError, match="all weights of the pilot vanished at time 5: use more particles"):
        cd.pilot(TARGET, LADDER, 4, **FAST)
    monkeypatch.undo()
    none = TARGET.tilt(lambda x: torch.full((len(x),), -torch.inf), on="state", anneal=cd.anneal.constant())
    for call in (lambda: cd.pilot(none, LADDER, 4, **FAST), lambda: cd.SMC(none, LADDER, **FAST).sample()):
        with pytest.raises(cd.NonFiniteError, match=r"vanished at (time|level) 0"):
            call()


# -- what a pilot keeps --------------------------------------------------------------------------------------


def test_features_are_predictions_at_their_times():
    """Of uniform tokens they depend on the time: at 0 they are the tokens themselves, whatever the model says."""
    law = f64([[0.6, 0.4], [0.1, 0.9]])
    model = cd.models.TokenModel(lambda x, t: law.log().expand(len(x), 2, 2), (2,), 2, "uniform", dtype=torch.float64)
    found = cd.pilot(model, cd.ladder.linear(5), n=6)
    tokens = torch.nn.functional.one_hot(found.x[0], 2).flatten(1).float()
    assert torch.equal(found.features[0, 0], tokens)
    assert set(found.features[1, 0].flatten().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(found.features[:, 1:], law.flatten().float().expand(2, 4, 6, 4))


@pytest.mark.parametrize(("n", "directions"), [(31, 31), (32, 32), (33, 32)])
def test_features_of_large_events_are_seen_in_few_directions(n, directions):
    model = cd.models.GaussianMixture([1.0], [[0.0] * n], [1.0])
    found = cd.pilot(model, cd.ladder.karras(3, 0.1, 10.0), 4, process=Gaussian(variance=1.0))
    assert found.features.shape == (2, 3, 4, directions)
    t, x = found.ladder.times[:, None, None], found.x
    predicted = (x / (1 + t**2)).float()
    if n == 33:
        predicted = predicted @ cd.Stream(0).at("features").normal((n, 32), dtype=torch.float32)
    torch.testing.assert_close(found.features[0], predicted)


@pytest.mark.parametrize(
    ("process", "n", "samples"),
    [
        (Gaussian(variance="fisher"), 4, 256),
        (Gaussian(variance="fisher"), 20, 103),
        (Gaussian(variance="fisher"), 200, 16),
        (Gaussian(), 20, 128),
        (Gaussian(), 10, 205),
        (Gaussian(variance="fisher", zero_mean=0), 9, 256),
        (Gaussian(variance="fisher", zero_mean=0), 11, 205),
        (Gaussian(variance=1.0), 4, 16),
        (Masked(2), 4, 16),
    ],
)
def test_samples_of_a_fit_give_one_number_to_three_per_cent(process, n, samples):
    """2,048 squares in all, or 128 of each coordinate; 256 samples at most and 16 at least."""
    model = cd.models.GaussianMixture([1.0], [[0.0] * n], [1.0])
    assert pilots._enough(process, model.as_target()) == samples


def test_errors_of_a_pilot_have_the_freedom_of_its_eves():
    w, eve = f64([0.5, 0.25, 0.25]), torch.tensor([0, 1, 1])
    assert pilots._dof(w, torch.arange(3)) == pytest.approx(1 / 0.375 - 1)
    assert pilots._dof(w, eve) == 1.0
    assert pilots._dof(f64([1 / 8] * 8), torch.arange(8)) == pytest.approx(7.0)


def test_a_pilot_is_a_batch_of_its_size():
    found = cd.pilot(MODEL**8.0, LADDER, n=16, seed=1, process=EXACT)
    batch = found.particles
    assert torch.equal(batch.x, found.end)
    resampled = [bool((w - w[0]).abs().max() < 1e-12) for w in found.log_weights[1:-1]]
    assert batch.n_resamplings.tolist() == [sum(resampled)]
    assert 0 < sum(resampled) < 7
    torch.testing.assert_close(batch.level_ess, found.ess[:, None])
    grown = (found.log_weights[1:] + found.down).softmax(1)
    torch.testing.assert_close(found.ess, torch.cat([1 / grown.square().sum(1), f64([16.0])]))
    assert batch.log_weights.shape == (1, 16)
    assert float(batch.batch_log_z) == pytest.approx(found.log_z("down").value)
    tilted = TARGET.tilt(lambda x: x[:, 0] + 3.0, on="state", anneal=cd.anneal.constant())
    other = cd.pilot(tilted, LADDER, n=16, **FAST)
    top = other.x[-1, :, 0] + 3.0
    assert float(other.log_first) == pytest.approx(float(top.exp().mean().log()))
    assert float(other.particles.batch_log_z) == pytest.approx(other.log_z("down").value + float(other.log_first))


# -- two steps against one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [-1, 1])
def test_double_steps_are_compared_by_the_mean_of_their_weights(direction, monkeypatch):
    """Without A it is `E exp(double) / E exp(fine) - 1`; A itself has a mean that is known, and so no part in it."""
    n, log_w = 4, f64([0.1, 0.2, 0.3, 0.4]).log()
    evaluate = cd.Plain(TARGET, LADDER, **FAST).evaluate
    w_1, w_2, w, a = (cd.Stream(i).normal((n,)) for i in range(4))
    reward = cd.Stream(5).normal((2, n))
    zero = torch.zeros(n, dtype=torch.float64)

    def found(w_1, w_2, w, a, log_w=log_w):
        answers = iter([(w_1, 0.3 * a), (w_2, 0.5 * a), (w, 1.8 * a)])
        monkeypatch.setattr(Doubling, "_ratios", lambda *args: next(answers))
        doubling = Doubling(evaluate, n)
        seen = [SimpleNamespace(reward=r) for r in (reward[0], zero, reward[1])]
        doubling.add(tuple((None, s) for s in seen), log_w, torch.tensor([0, 1, 1, 3]), 4, direction)
        return doubling._value[direction], doubling._change[direction], doubling._value[-direction]

    gain = reward[1] - reward[0]
    fine, double = ((gain - direction * works).exp() for works in (w_1 + w_2, w))
    p = log_w.exp()
    value, change, other = found(w_1, w_2, w, zero)
    assert value == pytest.approx(float(-direction * (p @ double / (p @ fine) - 1)))
    assert other == 0.0
    by_particle = -direction * p * ((double - fine) / (p @ fine) - -direction * value)
    torch.testing.assert_close(change, torch.stack([by_particle[0], by_particle[1:3].sum(), zero[0], by_particle[3]]))
    # Equal weights of the double step: its mean over the kernel is known, whatever A is.
    equal = direction * (gain - (p @ fine).log())
    assert found(w_1, w_2, equal, a)[0] == pytest.approx(0.0, abs=1e-12)
    assert abs(found(w_1, w_2, equal + 1.0, a)[0]) > 1e-3
    # What has no weight, or is not finite, does not count.
    nothing = log_w.where(torch.arange(n) < 3, -torch.inf)
    nothing = nothing - nothing.logsumexp(0)
    lost = w.where(torch.arange(n) < 3, torch.nan)
    assert found(w_1, w_2, lost, zero, nothing)[0] == found(w_1, w_2, w, zero, nothing)[0]


# -- what survived a fresh draw of mutants -------------------------------------------------------------------


def test_rows_that_have_not_been_swapped_are_explored():
    chain = cd.ReplicaExchange(TARGET, LADDER, n_chains=2, **FAST)
    assert chain.state.share is None
    moved, which = explore(cd.Langevin(), chain.state, chain.evaluate, cd.Stream(1))
    alone, _ = cd.Langevin()(chain.state, chain.evaluate, cd.Stream(1))
    assert torch.equal(moved.x, alone.x)
    assert which.all()


def test_log_z_of_one_batch_has_the_freedom_of_its_eves():
    out = cd.SMC(TARGET, LADDER, n_particles=16, **FAST).sample()
    shares = torch.zeros(16, dtype=torch.float64).index_add(0, out.eve, out.weights)
    assert out.log_z.dof == pytest.approx(1 / float(shares.square().sum()) - 1)
    assert out.log_z.dof > 1.5
    assert replace(out, eve=torch.zeros_like(out.eve)).log_z.dof == 1.0


@pytest.mark.parametrize(("variance", "n"), [(0.249, 16), (0.251, 32)])
def test_batches_grow_where_z_is_unsure(found, variance, n, monkeypatch):
    monkeypatch.setattr(choose, "_repeated", lambda pilot: (1 + 15 * variance) / 16)
    assert choose._Smc(found, 80_000, 100, dict(COMMON)).n_particles == n


def test_a_short_panel_has_one_node():
    assert _enough(f64([1e-3, 0.5, 2.302585092994046]), 3).tolist() == [1, 2, 3]


def test_tokens_at_two_places_do_not_cancel():
    """Of tokens 0 to 3 at two positions, any two states are apart."""
    x = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    features = pilots._token_features(x, cd.Stream(0))
    apart = torch.cdist(features, features) + 99 * torch.eye(16)
    assert float(apart.min()) > 2


def test_a_table_of_one_model_serves_three_of_segments():
    one = FisherTable(f64([1.0]), f64([[[0.5, 0.2]]]), f64([[3.0, 4.0]])).repeated(2)
    assert one.mean.shape == (1, 4)
    assert [one.centre(model).tolist() for model in range(3)] == [[3.0, 4.0, 3.0, 4.0]] * 3
