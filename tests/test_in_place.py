"""Functions of the user's that write into what they are given are refused by name: the replicas would be spoilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import crepe_diffusion as cd
from checks import f64

LADDER = cd.ladder.karras(4, 0.1, 5.0)
P = cd.models.GaussianMixture([1.0], [[1.0]], [1.0])


def shifted(x: Tensor) -> Tensor:
    x += 1
    return x[:, 0]


def numpy_shifted(x: Tensor) -> Tensor:
    x.detach().numpy()[:] += 1
    return x[:, 0]


def scaled(y: Tensor, t: Tensor) -> Tensor:
    return y.mul_(1 / (1 + t[:, None] ** 2))


def with_time(y: Tensor, t: Tensor) -> Tensor:
    t.square_()
    return y / (1 + t[:, None])


def zeroed(x: Tensor) -> Tensor:
    return x.zero_()[:, 0]


def chain(target: cd.Target | cd.models.Model) -> cd.ReplicaExchange:
    return cd.ReplicaExchange(target, LADDER, process=cd.processes.Gaussian(variance=1.0))


@pytest.mark.parametrize("function", [shifted, numpy_shifted])
@pytest.mark.parametrize("options", [{}, {"on": "state"}, {"guidance": "gradient"}, {"guidance": "jacobian-free"}])
def test_a_reward_that_works_in_place(function: Callable[[Tensor], Tensor], options: dict[str, str]) -> None:
    with pytest.raises(cd.InputError, match=r"reward 'up' changed its input in place.* x = x\.clone\(\)"):
        chain(P.tilt(function, name="up", **options)).step()
    chain(P.tilt(lambda x: function(x.detach().clone()) + 0 * x[:, 0], name="up", **options)).step()


@pytest.mark.parametrize("function", [scaled, with_time])
def test_a_model_that_works_in_place(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(cd.InputError, match="model 0 changed its input in place"):
        chain(cd.models.Denoiser(function, (1,), dtype=torch.float64))
    copies = cd.models.Denoiser(lambda y, t: function(y.clone(), t.clone()), (1,), dtype=torch.float64)
    chain(copies).step()


def test_an_annealing_that_works_in_place() -> None:
    fading = cd.anneal.of_time(lambda t: t.neg_().exp())
    before = LADDER.times.clone()
    with pytest.raises(cd.InputError, match="the annealing of reward 'up' changed its input"):
        chain(P.tilt(lambda x: x[:, 0], name="up", anneal=fading))
    assert torch.equal(LADDER.times, before)


@pytest.mark.parametrize("function", [zeroed, numpy_shifted])
def test_a_scalar_that_works_in_place(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    with (
        cd.Run(tmp_path / "run", chain(P), scalars={"zero": function}) as run,
        pytest.raises(cd.InputError, match="scalar 'zero' changed its input in place"),
    ):
        run.run(iterations=2)
    draws = chain(P).sample(3)
    before = draws.x.clone()
    with pytest.raises(cd.InputError, match="a scalar of the draws changed its input"):
        draws.mean(function)
    assert torch.equal(draws.x, before)


def test_what_is_not_finite_is_not_called_a_change() -> None:
    reward = chain(P.tilt(lambda x: x[:, 0])).evaluate.rewards
    x = f64([[float("nan")], [1.0]])
    value = reward.value(reward.blind, x, LADDER.times[:2], (x,))
    assert value.isnan().tolist() == [True, False]
