"""One contract for every exported model and reward: rows are independent, in any order and any micro-batch.

A new model or reward is added to `MODELS` or `REWARDS`.
"""

from __future__ import annotations

import pytest
import torch

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.evaluate import Evaluator
from crepe_diffusion.models.networks import Networks
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream
from crepe_diffusion.stitching import Junctions, Reach, Segments, WayPoint

STREAM = Stream(71)
N = 7


def shifted(y, t, label=None):
    shift = 0.0 if label is None else label[:, None]
    return (y + t[:, None] ** 2 * shift) / (1 + t[:, None] ** 2)


def tokens(x, t, label=None):
    shift = torch.zeros(len(x), dtype=torch.float64) if label is None else label
    scores = torch.stack([torch.sin(x + 1.3 * v + shift[:, None]) + t[:, None] for v in range(3)], -1)
    return scores.to(torch.float64).log_softmax(-1)


def denoiser(label=None, dtype=torch.float64):
    return cd.models.Denoiser(shifted, (3,), condition=label, dtype=dtype, process=Gaussian(variance=1.0))


def token_model(label=None, kind="masked"):
    return cd.models.TokenModel(tokens, (4,), 3, kind, condition=label, dtype=torch.float64)


MIXTURE = cd.models.GaussianMixture([0.3, 0.7], [[-1.0, 0.5, 0.0], [1.0, 0.2, 2.0]], [0.5, 0.8])
TABLE = STREAM.at("table").uniform((3, 3)) + 0.1
MODELS = {
    "mixture": MIXTURE,
    "mixture in single precision": cd.models.GaussianMixture(
        [0.3, 0.7], [[-1.0, 0.5, 0.0], [1.0, 0.2, 2.0]], [0.5, 0.8], dtype=torch.float32
    ),
    "denoiser": denoiser(),
    "conditional denoiser": denoiser(f64(0.7)),
    "single precision": denoiser(dtype=torch.float32),
    "preconditioned": cd.models.Denoiser(cd.models.EDM(lambda z, c: torch.tanh(z) + c[:, None], 0.7), (3,)),
    "flow": cd.models.from_velocity(lambda x, t: torch.tanh(x) * t[:, None], (3,), noise_at=0, dtype=torch.float64),
    "segments": Segments(MIXTURE, 2),
    "segments of a conditional one": Segments(denoiser(f64(0.7)), 2),
    "masked table": cd.models.TokenTable(TABLE, "masked"),
    "uniform table": cd.models.TokenTable(TABLE, "uniform"),
    "masked tokens": token_model(),
    "uniform tokens": token_model(kind="uniform"),
    "conditional tokens": token_model(f64(0.4)),
    "language model": cd.models.from_masked_lm(
        lambda ids: tokens(ids, torch.zeros(len(ids))), mask_id=1, length=4, vocab_size=3
    ),
}


def batch(model):
    """States and times, one time per row."""
    if model.process().is_discrete:
        n = model.process().n_states
        x = (n * STREAM.at("tokens").uniform((N, *model.event_shape))).long()
        return x, 0.1 + 0.8 * STREAM.at("t").uniform((N,))
    x = 2 * STREAM.at("x").normal((N, *model.event_shape), dtype=model.dtype)
    return x, 0.1 + 3 * STREAM.at("t").uniform((N,))


def close(found, expected):
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def rows_are_independent(predict, x, t):
    """Each row alone, all rows in another order, and the same rows twice: the same predictions."""
    together, order = predict(x, t), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    close(predict(x[order], t[order]), together[order])
    close(torch.cat([predict(x[i : i + 1], t[i : i + 1]) for i in range(N)]), together)
    close(predict(x.repeat(2, *[1] * (x.ndim - 1)), t.repeat(2))[N:], together)
    close(predict(x, t), together)


@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_depends_on_its_own_row_alone(name):
    model = MODELS[name]
    x, t = batch(model)
    rows_are_independent(model.predict, x, t)

    def broken(x, t):  # subtracts the mean of the batch, as batch normalisation does
        out = model.predict(x, t)
        return out - 0.1 * out.mean(0)

    refuted(rows_are_independent, broken, x, t)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_have_the_promised_shape_dtype_and_device(name):
    model = MODELS[name]
    x, t = batch(model)
    discrete = model.process().is_discrete
    (found,) = Networks([model], discrete).predict(x, t)
    close(found, model.predict(x, t))
    assert found.shape == ((*x.shape, 3) if discrete else x.shape)
    assert found.dtype == (torch.float64 if discrete else model.dtype)
    if discrete:
        close(found.exp().sum(-1), torch.ones_like(x, dtype=found.dtype))


LADDERS = {True: cd.ladder.linear(4, 0.05, 0.95), False: cd.ladder.karras(4, 0.1, 5.0)}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_any_micro_batch_gives_the_same_evaluation(name, size):
    model = MODELS[name]
    process = model.process() if model.process().is_discrete else Gaussian(variance=1.0)
    target = model.tilt(lambda z: z.to(torch.float64).flatten(1).sin().sum(1), negligible=0.0)
    x, t = batch(model)

    def evaluation(micro_batch):
        evaluate = Evaluator(target, LADDERS[process.is_discrete], process, cd.Proposal(), micro_batch=micro_batch)
        return evaluate(x, t), evaluate.counts

    (whole, counts), (parts, split) = evaluation(None), evaluation(size)
    close(parts.predictions[0], whole.predictions[0])
    close(parts.drift, whole.drift)
    torch.testing.assert_close(parts.reward, whole.reward, atol=1e-5, rtol=1e-5)
    assert (counts.rows, counts.rewards, split.rewards) == (N * model.network_rows, N, N)
    block = max(1, size // model.network_rows)
    assert split.calls == -(-N // block)
    # The last of several blocks is padded, so that all have one shape.
    assert split.rows == model.network_rows * (N if split.calls == 1 else block * split.calls)


@pytest.mark.parametrize(
    "make",
    [denoiser, token_model, lambda label: Segments(denoiser(label), 2)],
    ids=["denoiser", "tokens", "segments"],
)
def test_a_guided_pair_is_one_call_and_equals_two(make):
    pair = [make(f64(0.7)), make(f64(-0.4))]
    x, t = batch(pair[0])
    networks = Networks(pair, pair[0].process().is_discrete)
    assert (networks.n_calls, networks.rows) == (1, 2 * pair[0].network_rows)
    found, alone = networks.predict(x, t), [model.predict(x, t) for model in pair]
    for prediction, expected in zip(found, alone, strict=True):
        close(prediction, expected)
    refuted(close, found[0], alone[1])


# -- rewards ---------------------------------------------------------------------------------------------------

REWARDS = {
    "reach": Reach((0.3, -0.2)),
    "goal": Reach((0.3, -0.2), -1, -1),
    "junctions": Junctions(),
    "way-point": WayPoint((0.3, -0.2)),
}
PLANS = STREAM.at("plans").normal((N, 3, 4, 2))


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_depends_on_its_own_row_alone(name):
    reward = REWARDS[name]
    rows_are_independent(lambda x, t: reward(x), PLANS, torch.ones(N))
    refuted(rows_are_independent, lambda x, t: reward(x) - reward(x).mean(), PLANS, torch.ones(N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_is_one_number_per_row_with_a_finite_gradient_where_its_distance_vanishes(name, dtype):
    reward, fulfilled = REWARDS[name], torch.tensor([0.3, -0.2], dtype=dtype).expand(N, 3, 4, 2)

    def check(function):
        x = fulfilled.clone().requires_grad_()
        r = function(x)
        assert r.shape == (N,)
        assert r.dtype == dtype
        assert torch.autograd.grad(r.sum(), x)[0].isfinite().all()

    check(reward)
    refuted(check, lambda x: -(x[:, 0, 0] - fulfilled[:, 0, 0]).square().sum(-1).sqrt())


def test_every_exported_model_and_reward_is_under_contract():
    wrapped = {type(m) for m in MODELS.values()} | {type(m.model) for m in MODELS.values() if isinstance(m, Segments)}
    exported = {m for name in cd.models.__all__ if isinstance(m := getattr(cd.models, name), type)} | {Segments}
    # A protocol, what "preconditioned" wraps, and conditions.
    assert exported - wrapped == {cd.models.Model, cd.models.EDM, cd.models.Each}
    rewards = {getattr(cd.stitching, name) for name in cd.stitching.__all__}
    rewards = {r for r in rewards if callable(r) and hasattr(r, "gap")}
    assert rewards == {type(r) for r in REWARDS.values()}
