"""Bad input is refused with an error that names the value, before anything long: hardly a network row is spent."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

import crepe_diffusion as cd
from checks import f64
from crepe_diffusion.processes import Euler, EulerMaruyama, Gaussian, Masked, Uniform

L = cd.ladder.karras(6, 0.05, 10.0)
UNIT = cd.ladder.linear(5, 0.0, 1.0)
PROBE = 4  # rows that may be spent on finding out


class Network:
    """A denoiser of N(0, 1) data that counts its rows, and may be told to misbehave."""

    def __init__(self, change=lambda d: d):
        self.rows, self.change = 0, change

    def __call__(self, y, t):
        self.rows += len(y)
        return self.change(y / (1 + t[:, None] ** 2))


def model(change=lambda d: d, n=2, dtype=torch.float64, process=None):
    network = Network(change)
    return cd.models.Denoiser(network, (n,), dtype=dtype, process=process)


def tokens(kind="masked"):
    return cd.models.TokenTable(f64([[0.4, 0.1], [0.2, 0.3]]), kind)


def linear(x):
    return x[:, 0]


def chain(target, levels=L, **options):
    return cd.ReplicaExchange(target, levels, **options)


def other_snapshot():
    return cd.Plain(model(process=Gaussian(variance=1.0)), L, n_chains=3).snapshot()


def tilted(function, **options):
    return model().tilt(function, **options)


def pictures(decode):
    return cd.models.from_velocity(lambda x, t: x, (3, 4, 4), noise_at=0, decode=decode)


class Language:
    """A masked language model that knows nothing, of six ids and at most eight positions."""

    config = SimpleNamespace(vocab_size=6, max_position_embeddings=8)

    def __call__(self, ids):
        return torch.zeros(*ids.shape, 6)


def language(**options):
    return cd.models.from_masked_lm(Language(), **{"mask_id": 2, **options})


CASES = {
    # ladders
    "levels that fall": (lambda: cd.ladder.of([0.1, 0.5, 0.4, 1.0]), "times must increase: entry 2 is 0.4 after 0.5"),
    "levels that repeat": (lambda: cd.ladder.of([0.1, 0.5, 0.5]), "entry 2 is 0.5 after 0.5"),
    "negative times": (lambda: cd.ladder.of([-0.1, 0.5]), "-0.1"),
    "times that are no numbers": (lambda: cd.ladder.of([0.1, math.nan, 1.0]), "nan"),
    "infinite times": (lambda: cd.ladder.of([0.1, math.inf]), "inf"),
    "one time": (lambda: cd.ladder.of([0.1]), "at least two times"),
    "times in two dimensions": (lambda: cd.ladder.of(torch.ones(2, 2)), r"shape \(2, 2\)"),
    "sub-steps that do not divide": (
        lambda: cd.ladder.of([0.1, 0.2, 0.3], substeps=3),
        "3 times do not make levels of 3",
    ),
    "no sub-steps": (lambda: cd.ladder.karras(5, substeps=0), "substeps must be a positive integer, got 0"),
    "half a sub-step": (lambda: cd.ladder.karras(5, substeps=1.5), "substeps must be a positive integer, got 1.5"),
    "one level": (lambda: cd.ladder.karras(1), "n_levels must be an integer of at least 2, got 1"),
    "half a level": (lambda: cd.ladder.karras(5.5), "n_levels must be an integer of at least 2, got 5.5"),
    "nan levels": (lambda: cd.ladder.karras(math.nan), "n_levels must be an integer of at least 2, got nan"),
    "levels in words": (lambda: cd.ladder.karras("many"), "n_levels must be an integer of at least 2, got 'many'"),
    "a sigma of zero": (lambda: cd.ladder.karras(5, sigma_min=0.0), "sigma_min must be positive, got 0.0"),
    "a negative sigma": (lambda: cd.ladder.geometric(5, sigma_max=-1.0), "sigma_max must be positive, got -1.0"),
    "sigmas the wrong way round": (lambda: cd.ladder.karras(5, 10.0, 0.1), "times must increase"),
    "linear times the wrong way round": (lambda: cd.ladder.linear(5, 1.0, 0.0), r"t_min=1.0, t_max=0.0"),
    "finish above level 0": (lambda: cd.ladder.of([0.1, 1.0], finish=[0.2]), r"finish times must fall.*\(0.2,\)"),
    "finish that rises": (lambda: cd.ladder.of([0.1, 1.0], finish=[0.01, 0.05]), "0.01, 0.05"),
    "finish that is no number": (lambda: cd.ladder.of([0.1, 1.0], finish=[math.nan]), "nan"),
    "negative finish": (lambda: cd.ladder.karras(5, n_finish=-1), "n_finish must be a non-negative integer, got -1"),
    "annealing by a negative power": (lambda: cd.anneal.power(-2.0), "exponent > 0.* got -2.0"),
    "annealing from a floor of one": (lambda: cd.anneal.power(2.0, floor=1.0), "floor < 1, got 2.0 and 1.0"),
    # targets
    "exponents that sum to zero": (lambda: chain(model() * model() ** -1.0), r"\(1.0, -1.0\) with sum 0"),
    "exponents that sum to less": (lambda: chain(model() ** -0.5), r"\(-0.5,\) with sum -0.5"),
    "an exponent that is no number": (lambda: model() ** math.nan, "exponent must be a finite number, got nan"),
    "an exponent in words": (lambda: model() ** "2", "exponent must be a finite number, got '2'"),
    "a product with a number": (lambda: model() * 2.0, "multiplies with models and targets, got 2.0"),
    "models of different shape": (lambda: model(n=2) * model(n=3), r"event shape, got \[\(2,\), \(3,\)\]"),
    "models of different dtype": (lambda: model() * model(dtype=torch.float32), "dtype, got .*float64.*float32"),
    "a target that is a function": (lambda: chain(linear), "target must be a model"),
    "a ladder that is a list": (lambda: chain(model(), [0.1, 1.0]), r"ladder must be a Ladder.* got \[0.1, 1.0\]"),
    "a model that is no function": (lambda: cd.models.Denoiser(3, (2,)), r"function of \(x, t\), got 3"),
    "no segments": (lambda: cd.stitching.Segments(model(), 0), "number of segments must be a positive integer, got 0"),
    "two rewards of one name": (
        lambda: tilted(linear, name="r").tilt(linear, name="r"),
        r"different names, got \['r', 'r'\]",
    ),
    "removing a reward that is not there": (
        lambda: tilted(linear).without("other"),
        r"'other'; there are \['reward'\]",
    ),
    "a scale that is no number": (lambda: tilted(linear, scale=math.nan), "scale of a reward must be finite, got nan"),
    "guidance by no known name": (lambda: tilted(linear, guidance="grad"), "'gradient', 'jacobian-free', got 'grad'"),
    "a reward on no known thing": (lambda: tilted(linear, on="x0"), "on must be one of .* got 'x0'"),
    "a reward that is no function": (lambda: tilted(3.0), "a reward is a function of a batch, got 3.0"),
    "annealing that is no function": (lambda: tilted(linear, anneal=5), r"anneal.power\(5\), got 5"),
    # what models and rewards return
    "a reward of one number": (lambda: chain(tilted(lambda x: x.sum())), r"'reward' must return .* got shape \(\)"),
    "a reward of two columns": (
        lambda: chain(tilted(lambda x: x, name="r2")),
        r"'r2' must return one number per row.*\(\d, 2\)",
    ),
    "a reward that is a list of words": (
        lambda: chain(tilted(lambda x: ["good"] * len(x))),
        "one number per row.* got 'list'",
    ),
    "a reward of too few numbers": (lambda: chain(tilted(lambda x: [0.0])), r"one number per row.* got shape \(1,\)"),
    "a decoder that is none": (lambda: tilted(lambda x: x[:, 0], decode=3), "decode must be a function .* got 3"),
    "a batch of nothing": (lambda: tilted(lambda x: x[:, 0], batch_size=0), "positive number of rows, got 0"),
    "all of it negligible": (lambda: tilted(lambda x: x[:, 0], negligible=1.0), "negligible must be .* got 1.0"),
    "a denoiser of another dtype": (
        lambda: chain(model(lambda d: d.float())),
        "returned torch.float32 for a state of torch.float64",
    ),
    "a denoiser of another shape": (
        lambda: chain(model(lambda d: d[:, :1])),
        r"returned shape \(\d, 1\) for states \(\d, 2\)",
    ),
    "tokens without a vocabulary": (
        lambda: chain(cd.models.TokenModel(lambda x, t: x.float(), (2,), 3), UNIT),
        r"log-probabilities of shape .*'V'",
    ),
    "integer log-probabilities": (
        lambda: chain(cd.models.TokenModel(lambda x, t: x[..., None].expand(-1, -1, 3), (2,), 3), UNIT),
        "returned torch.int64",
    ),
    # samplers
    "a seed that is no integer": (lambda: chain(model(), seed=0.5), "seed must be a non-negative integer, got 0.5"),
    "no chains": (lambda: chain(model(), n_chains=0), "n_chains must be a positive integer, got 0"),
    "half a chain": (lambda: chain(model(), n_chains=1.5), "n_chains must be a positive integer, got 1.5"),
    "no micro-batch": (lambda: chain(model(), micro_batch=0), "micro_batch must be a positive number of rows, got 0"),
    "nonfinite by no known name": (lambda: chain(model(), nonfinite="ignore"), "'raise', 'reject', got 'ignore'"),
    "too few samples to fit": (lambda: chain(model(), fit_samples=3), "at least 16 samples, got 3"),
    "a Gaussian ladder to zero": (lambda: chain(model(), UNIT), "above sigma = 0"),
    "a discrete ladder beyond one": (lambda: chain(tokens(), L), "ends at t = 1.* got 10"),
    "a proposal by no known name": (lambda: cd.Proposal("best"), "'balanced', 'paper', got 'best'"),
    "a proposal of three numbers": (lambda: cd.Proposal((1, 2, 3)), r"k must be \(k_up, k_down\), got \(1, 2, 3\)"),
    "clipping at zero": (lambda: cd.Proposal(clip=0.0), "clip must be a positive norm, got 0.0"),
    "too many proposal exponents": (
        lambda: chain(model(), proposal=cd.Proposal(exponents=(1.0, 2.0))),
        r"2 exponents for 1 models: \(1.0, 2.0\)",
    ),
    "gradients of tokens": (
        lambda: chain(tokens().tilt(linear, guidance="gradient"), UNIT),
        "'gradient' needs a Gaussian",
    ),
    "the mode of a Gaussian": (lambda: chain(tilted(linear, on="mode")), "on='mode' is for discrete models"),
    "Langevin without gradients": (lambda: chain(tilted(linear), explorer=cd.Langevin()), 'guidance="gradient"'),
    "Langevin on tokens": (
        lambda: chain(tokens(), UNIT, explorer=cd.Langevin()),
        "Langevin exploration is for Gaussian",
    ),
    "SingleToken on a Gaussian": (
        lambda: chain(model(), explorer=cd.SingleToken()),
        "SingleToken exploration is for discrete",
    ),
    "a bounce of two steps on one": (
        lambda: chain(model(), explorer=cd.Bounce(2)),
        "between 1 and the ladder's 1 sub-steps, got 2",
    ),
    "draws that are none": (
        lambda: chain(model(process=Gaussian(variance=1.0))).sample(0),
        "n must be a positive integer, got 0",
    ),
    "thinning by nothing": (
        lambda: chain(model(process=Gaussian(variance=1.0))).sample(1, thin=0),
        "thin must be a positive integer, got 0",
    ),
    "adapting before running": (
        lambda: chain(model(process=Gaussian(variance=1.0))).adapt(),
        "no acceptance has been recorded",
    ),
    "a weight by name": (lambda: cd.SMC(model(), L, weight="rne"), r"cd\.PathWork\(\), .* got 'rne'"),
    "a resampling rule by name": (
        lambda: cd.SMC(model(), L, resampling="systematic"),
        r"cd\.Systematic\(\), .* got 'systematic'",
    ),
    "a weight that is a class": (lambda: cd.SMC(model(), L, weight=cd.PathWork), "an object such as .* got <class"),
    "a resampling rule that is a class": (
        lambda: cd.SMC(model(), L, resampling=cd.Systematic),
        "an object such as .* got <class",
    ),
    "a share above one": (lambda: cd.Partial(1.2), "share must be between 0 and 1, got 1.2"),
    "a snapshot of other events": (
        lambda: cd.Plain(model(process=Gaussian(variance=1.0)), L, n_chains=2, start=other_snapshot()),
        r"the snapshot holds draws \(3, 2\), not \(2, 2\)",
    ),
    "an output before the first step": (
        lambda: cd.Plain(model(process=Gaussian(variance=1.0)), L).output(),
        "call step\\(\\) first",
    ),
    "no particles": (lambda: cd.SMC(model(), L, n_particles=0), "n_particles must be a positive integer, got 0"),
    "a threshold above one": (
        lambda: cd.SMC(model(), L, ess_threshold=1.5),
        "ess_threshold must be between 0 and 1, got 1.5",
    ),
    "discrete weights for a Gaussian": (
        lambda: cd.SMC(model(process=Gaussian(variance=1.0)), L, weight=cd.DiscreteGuidance()),
        "needs discrete models",
    ),
    "a prompt of another length": (
        lambda: cd.models.TokenTable(torch.ones(2, 2, 2), prompt=torch.tensor([0, 1])),
        r"shape of the event \(3,\), got \(2,\)",
    ),
    "correctors with a clipped gradient": (
        lambda: cd.SMC(
            model(process=Gaussian(variance=1.0)).tilt(linear, guidance="gradient"),
            L,
            weight=cd.FeynmanKac(),
            proposal=cd.Proposal(clip=1.0),
        ),
        'guidance="gradient" and no clip',
    ),
    "correctors with half a gradient": (
        lambda: cd.SMC(
            model(process=Gaussian(variance=1.0)).tilt(linear, guidance="jacobian-free"), L, weight=cd.FeynmanKac()
        ),
        'guidance="gradient" and no clip',
    ),
    "correctors without gradients": (
        lambda: cd.SMC(model(process=Gaussian(variance=1.0)).tilt(linear), L, weight=cd.FeynmanKac()),
        'guidance="gradient"',
    ),
    # processes and analytic models
    "a negative scale of data": (lambda: Gaussian(variance=-1.0), "rho must be a scale >= 0.* got -1.0"),
    "a variance by no known name": (lambda: Gaussian(variance="fischer"), "got 'fischer'"),
    "a basis that is not orthonormal": (
        lambda: Gaussian(basis=torch.ones(2, 2)),
        "must be orthonormal; they are off by 2",
    ),
    "a basis with too many rows": (lambda: Gaussian(basis=torch.eye(3)[:, :2]), r"shape \(3, 2\)"),
    "a diagonal on zero mean": (lambda: Gaussian(variance="fisher-diagonal", zero_mean=0), "needs a basis"),
    "a negative reference": (lambda: EulerMaruyama(reference=-2.0), "got -2.0"),
    "one token": (lambda: Masked(1), "vocab_size must be an integer of at least 2, got 1"),
    "a prompt outside the vocabulary": (lambda: Uniform(3, torch.tensor([-1, 3])), "token 3, but vocab_size is 3"),
    "a table that is not square": (lambda: cd.models.TokenTable(torch.ones(2, 3)), r"shape \(2, 3\)"),
    "a table of no known kind": (
        lambda: cd.models.TokenTable(torch.ones(2), "mask"),
        "'masked', 'uniform', got 'mask'",
    ),
    "negative mixture weights": (
        lambda: cd.models.GaussianMixture([-1.0, 2.0], [[0.0], [1.0]], [1.0, 1.0]),
        r"\[-1.0, 2.0\]",
    ),
    "too few mixture means": (
        lambda: cd.models.GaussianMixture([1.0, 2.0], [[0.0]], [1.0, 1.0]),
        r"2 components, got shape \(1, 1\)",
    ),
    # what strangers bring
    "a sigma range of one number": (
        lambda: cd.models.Denoiser(Network(), (2,), sigma_range=80.0),
        "sigma_range must be two noise levels, 0 < low < high, got 80.0",
    ),
    "a sigma range the wrong way round": (
        lambda: cd.models.Denoiser(Network(), (2,), sigma_range=(80.0, 0.002)),
        r"0 < low < high, got \(80.0, 0.002\)",
    ),
    "an infinite sigma range": (
        lambda: cd.models.Denoiser(Network(), (2,), sigma_range=(0.1, math.inf)),
        r"0 < low < high, got \(0.1, inf\)",
    ),
    "a function of the state alone": (
        lambda: cd.models.Denoiser(lambda y: y, (2,)),
        r"called with \(x, t\), but its function takes \(y\)",
    ),
    "a condition that the function does not take": (
        lambda: cd.models.Denoiser(lambda y, t: y, (2,), condition=torch.ones(1)),
        r"called with \(x, t, condition\), but its function takes \(y, t\)",
    ),
    "a velocity of the state alone": (
        lambda: cd.models.from_velocity(lambda x: x, (2,), noise_at=0),
        r"called with \(x, t\), but its function takes \(x\)",
    ),
    "a model that returns nothing": (lambda: chain(model(lambda d: None)), "type 'NoneType' instead of a tensor"),
    "a model that returns a pair": (lambda: chain(model(lambda d: (d, d))), r"'tuple' .*: return its entry \[0\]"),
    "a decoder that returns nothing": (
        lambda: chain(tilted(linear, decode=lambda z: None)),
        "decode of reward 'reward' must return a tensor .* got an object of type 'NoneType'",
    ),
    "a decoder that loses rows": (
        lambda: chain(tilted(linear, decode=lambda z: z.sum(0, keepdim=True))),
        r"with a row for each of \d+, got shape \(1, 2\)",
    ),
    "pictures that are none": (
        lambda: pictures(lambda x: x[:, 0]).images(torch.ones(2, 3, 4, 4)),
        r"images \(2, 1 or 3, height, width\) from 0 to 1, got \(2, 4, 4\)",
    ),
    "pictures of one draw without its axis": (
        lambda: pictures(lambda x: x).images(torch.ones(3, 4, 4)),
        r"draws \(n, 3, 4, 4\), got \(3, 4, 4\)",
    ),
    "logits in place of log-probabilities": (
        lambda: chain(cd.models.TokenModel(lambda x, t: torch.ones(*x.shape, 3), (2,), 3), UNIT),
        "exponentials sum to 8.15 over the tokens",
    ),
    "a vocabulary with the mask in it": (
        lambda: chain(cd.models.TokenModel(lambda x, t: torch.zeros(*x.shape, 4), (2,), 3), UNIT),
        "model 0 returned 4 log-probabilities per position, but vocab_size is 3",
    ),
    "a negative mask": (lambda: Masked(3, mask_id=-1), "mask_id must be an integer from 0 to vocab_size = 3, got -1"),
    "a mask outside of the vocabulary": (lambda: Masked(3, mask_id=4), "from 0 to vocab_size = 3, got 4"),
    "a prompt of real numbers": (
        lambda: cd.models.TokenTable(torch.ones(2, 2), prompt=torch.tensor([0.0, -1.0])),
        "a prompt is a tensor of integers.* got a tensor of torch.float32",
    ),
    "a prompt that is a list": (
        lambda: cd.models.TokenTable(torch.ones(2, 2), prompt=[0, -1]),
        r"a prompt is a tensor of integers.* got \[0, -1\]",
    ),
    "a prompt with labels to ignore": (lambda: Masked(3, torch.tensor([0, -100])), "prompt holds -100: free .* are -1"),
    "a prompt in words": (
        lambda: language(prompt="the cat"),
        r"tokenizer\(text\)\['input_ids'\] gives, got 'the cat'",
    ),
    "a prompt longer than the network": (
        lambda: language(length=9),
        "the network takes at most 8 tokens, got a prompt or length of 9",
    ),
    "a mask that the tokenizer does not have": (
        lambda: language(length=4, mask_id=None),
        r"mask_id must be one of the network's ids 0 \.\. 5, got None",
    ),
    "one forbidden id": (lambda: language(length=4, forbidden=3), "forbidden is a list of ids.* got 3"),
    "a forbidden id that is none": (
        lambda: language(length=4, forbidden=[None]),
        "forbidden must be one of .* got None",
    ),
    "padding by the mask": (lambda: language(length=4, pad_id=2), "pad_id must not be the mask, 2"),
    "each of a text": (lambda: cd.models.Each("a cat"), "Each takes a list of conditions.* got 'a cat'"),
    "each of nothing": (lambda: cd.models.Each([]), r"Each takes a list of conditions.* got \[\]"),
    "neither scales nor covariances": (lambda: cd.models.GaussianMixture([1.0], [[0.0]]), "stds or covariances"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_by_name(name):
    call, message = CASES[name]
    with pytest.raises(cd.InputError, match=message):
        call()


@pytest.fixture
def spent(monkeypatch):
    """How many rows networks have seen since the test began."""
    total = {"rows": 0}
    original = Network.__call__

    def counted(self, y, t):
        total["rows"] += len(y)
        return original(self, y, t)

    monkeypatch.setattr(Network, "__call__", counted)
    return total


EARLY = [
    name for name in CASES if name not in ("draws that are none", "thinning by nothing", "adapting before running")
]


@pytest.mark.parametrize("name", EARLY)
def test_bad_input_is_refused_before_anything_long(name, spent):
    with pytest.raises(cd.InputError):
        CASES[name][0]()
    assert spent["rows"] <= PROBE, f"{spent['rows']} network rows were spent first"


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sampler", [cd.ReplicaExchange, cd.SMC])
def test_a_reward_that_is_no_number_stops_the_run_at_once_and_names_the_level(sampler, bad, spent):
    target = tilted(lambda x: torch.full((len(x),), bad))
    with pytest.raises(
        cd.NonFiniteError, match=r"prediction or reward that is NaN or infinite, first at level 0 \(t = 0.05\)"
    ):
        sampler(target, L)
    assert spent["rows"] <= PROBE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cd.models.from_diffusers(object()), r"from_diffusers needs diffusers: pip install '.*\[diffusers\]'"),
        (lambda: cd.rewards.ClipScore("a cat"), r"ClipScore by name needs transformers: .*\[rewards\]'"),
        (lambda: cd.rewards.Classifier(3), r"Classifier by name needs transformers: .*\[rewards\]'"),
    ],
)
def test_a_dependency_that_is_not_installed_is_named(call, message, monkeypatch):
    for package in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(cd.InputError, match=message):
        call()


def test_an_error_of_the_users_code_says_where_it_came_from():
    """Its type and traceback are the user's; a note adds the part and the shapes that it was called with."""
    layer = torch.nn.Linear(5, 2, dtype=torch.float64)
    broken = cd.models.Denoiser(lambda y, t: layer(y), (2,), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        chain(broken)
    assert any("raised by model 0, which was called with float64 (" in note for note in raised.value.__notes__)
    with pytest.raises(KeyError) as raised:
        chain(tilted(lambda x: {}["score"]))
    assert any("raised by reward 'reward'" in note for note in raised.value.__notes__)


def test_a_refused_refinement_leaves_the_chain_as_it_was():
    run, untouched = (chain(model(process=Gaussian(variance=1.0)) ** 1.5, seed=1) for _ in range(2))
    before = run.target
    for bad in (run.target.tilt(lambda x: x), run.target**-1.0, "target"):
        with pytest.raises(cd.InputError):
            run.target = bad
        assert run.target is before
    with pytest.raises(cd.InputError, match="4 levels for 6 replicas"):
        run.ladder = cd.ladder.karras(4, 0.05, 10.0)
    assert torch.equal(run.sample(5).x, untouched.sample(5).x)


def test_metropolis_on_euler_kernels_is_refused_at_once():
    with pytest.raises(cd.InputError, match="single-token moves, which Euler does not have"):
        chain(tokens(), cd.ladder.linear(4, 0.0, 0.9), process=Euler(base=Masked(2)), explorer=cd.SingleToken())


def test_a_refinement_keeps_the_process_that_was_asked_for():
    run = chain(model() ** 2.0, process=EulerMaruyama(reference=1.0))
    run.target = model() * model()
    assert run.evaluate.process == EulerMaruyama(reference=1.0)
