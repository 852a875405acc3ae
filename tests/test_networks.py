"""Models of one network are evaluated in one call however it is wrapped, and what cannot work is refused by name."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import crepe_diffusion as cd
from checks import f64, refuted
from crepe_diffusion.models.networks import Networks, identity
from crepe_diffusion.processes import Gaussian
from crepe_diffusion.random import Stream

LADDER = cd.ladder.karras(4, 0.1, 5.0)
PROCESS = Gaussian(variance=1.0)
X, T = Stream(5).normal((6, 2)), 0.1 + Stream(6).uniform((6,))


class Net(nn.Module):
    """Data N(label, 1): D = (y + t^2 label) / (1 + t^2). Counts its calls and rows."""

    def __init__(self):
        super().__init__()
        self.calls = self.rows = 0

    def forward(self, y, t, label):
        self.calls, self.rows = self.calls + 1, self.rows + len(y)
        return (y + t[:, None] ** 2 * label) / (1 + t[:, None] ** 2)


class Wrapper:
    """A stranger's object around a network."""

    def __init__(self, net):
        self.net = net

    def denoise(self, y, t, label):
        return self.net(y, t, label)

    def scaled(self, scale, y, t, label):
        return self.net(y, t, label) * scale

    def __call__(self, y, t, label):
        return self.net(y, t, label)


def closure(net, scale=1.0):
    def denoise(y, t, label):
        return net(y, t, label) * scale

    return denoise


def keyword(net):
    def denoise(y, t, label, *, inner=net):
        return inner(y, t, label)

    return denoise


def recursive(net):
    def denoise(y, t, label, again=True):
        return denoise(y, t, label, False) if again else net(y, t, label)

    return denoise


def wrappings(net):
    """Pairs of functions, each made twice, as an adapter would."""
    wrapper = Wrapper(net)
    return {
        "module": (net, net),
        "callable object": (wrapper, wrapper),
        "bound method": (wrapper.denoise, wrapper.denoise),
        "bound method of a module": (net.forward, net.forward),
        "lambda": tuple((lambda y, t, c: net(y, t, c)) for _ in range(2)),
        "closure": (closure(net), closure(net)),
        "closure over a bound method": (closure(wrapper.denoise), closure(wrapper.denoise)),
        "closure with a large number": tuple(closure(net, int("1" + "0" * 9) / 10**9) for _ in range(2)),
        "defaults": tuple((lambda y, t, c, n=net: n(y, t, c)) for _ in range(2)),
        "keyword defaults": (keyword(net), keyword(net)),
        "recursive": (recursive(net), recursive(net)),
        "partial": tuple(functools.partial(Wrapper.denoise, wrapper) for _ in range(2)),
        "partial of a method": tuple(functools.partial(wrapper.scaled, 1.0) for _ in range(2)),
    }


def pair(functions, **options):
    return [
        cd.models.Denoiser(f, (2,), condition=f64(label), dtype=torch.float64, process=PROCESS, **options)
        for f, label in zip(functions, ([1.5, 0.0], [0.0, -1.0]), strict=True)
    ]


def exact(label, scale=1.0):
    return scale * (X + T[:, None] ** 2 * f64(label)) / (1 + T[:, None] ** 2)


@pytest.mark.parametrize("how", wrappings(Net()))
def test_a_guided_pair_of_one_network_costs_one_call(how):
    net = Net().eval()
    conditional, unconditional = pair(wrappings(net)[how])
    found = Networks([unconditional, conditional], is_discrete=False).predict(X, T)
    assert (net.calls, net.rows) == (1, 12)
    torch.testing.assert_close(found, (exact([0.0, -1.0]), exact([1.5, 0.0])))
    chain = cd.ReplicaExchange(cd.guided(conditional, unconditional, 1.5), LADDER, n_chains=2)
    net.calls, before = 0, chain.evaluate.counts.calls
    chain.step()
    assert net.calls == chain.evaluate.counts.calls - before == 1


class Stateful:
    """The same code twice, with something else inside."""

    def others(self, net):
        def counting():
            n = 0

            def denoise(y, t, label):
                nonlocal n
                n += 1
                return net(y, t, label) * n

            return denoise

        first, second = (lambda y, t, c, s=s: net(y, t, c) * s for s in (1.0, 2.0))
        return {
            "other contents of a closure": (closure(net), closure(net, 2.0)),
            "other network in a closure": (closure(net), closure(Net().eval())),
            "other object of a method": (Wrapper(net).denoise, Wrapper(net).denoise),
            "other method": (Wrapper(net).denoise, Wrapper(net).__call__),
            "other defaults": (first, second),
            "other arguments of a partial": tuple(functools.partial(Wrapper(net).scaled, s) for s in (1.0, 2.0)),
            "other callable object": (Wrapper(net), Wrapper(net)),
            "a state of its own": (counting(), counting()),
            "true is not one": (closure(net, True), closure(net, 1)),
        }


@pytest.mark.parametrize("how", Stateful().others(Net()))
def test_functions_that_may_differ_are_not_merged(how):
    net = Net().eval()
    first, second = Stateful().others(net)[how]
    models = pair((first, second))
    assert models[0].network != models[1].network
    found = Networks(models, is_discrete=False).predict(X, T)
    scale = 2.0 if how in ("other contents of a closure", "other defaults", "other arguments of a partial") else 1.0
    torch.testing.assert_close(found, (exact([1.5, 0.0]), exact([0.0, -1.0], scale)))
    torch.testing.assert_close(found[0], models[0].predict(X, T) if how != "a state of its own" else found[0])


def test_an_explicit_network_joins_what_cannot_be_recognised():
    net = Net().eval()
    functions = (Wrapper(net), Wrapper(net))
    assert Networks(pair(functions), is_discrete=False).n_calls == 2
    for key in (net, "a name", ["not", "hashable"]):
        joined = Networks(pair(functions, network=key), is_discrete=False)
        assert (joined.n_calls, joined.rows) == (1, 2)
        torch.testing.assert_close(joined.predict(X, T), (exact([1.5, 0.0]), exact([0.0, -1.0])))
    tokens = [
        cd.models.TokenModel(
            lambda x, t, c, i=i: c[:, None].expand(*x.shape, 2).log_softmax(-1),
            (3,),
            2,
            condition=f64([0.0, i]),
            network="tokens",
        )
        for i in range(2)
    ]
    assert Networks(tokens, is_discrete=True).n_calls == 1
    with pytest.raises(cd.InputError, match="give condition= as well"):
        cd.models.Denoiser(net, (2,), network=net)


def test_segments_of_a_guided_pair_share_their_calls_too():
    net = Net().eval()
    models = [cd.stitching.Segments(m, 3) for m in pair((closure(net), closure(net)))]
    networks = Networks(models, is_discrete=False)
    networks.predict(torch.stack([X, X, X], 1), T)
    assert (networks.rows, net.calls, net.rows) == (6, 1, 36)


def test_numbers_are_compared_by_value_and_kind():
    assert identity(closure(None, 10**9)) == identity(closure(None, int("1000000000")))
    assert identity(closure(None, 0.0)) != identity(closure(None, -0.0))
    assert identity(closure(None, torch.float32)) == identity(closure(None, torch.float32))


# -- conditions ------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    tokens: torch.Tensor
    weight: torch.Tensor


def by_structure(shift, weight):
    shift, weight = f64([shift, 0.0]), f64(weight)
    return {
        "tuple": ((shift, weight), lambda c: c[0] * c[1][:, None]),
        "named tuple": (Text(shift, weight), lambda c: c.tokens * c.weight[:, None]),
        "dictionary": ({"shift": shift, "weight": weight}, lambda c: c["shift"] * c["weight"][:, None]),
        "nested": ({"text": (shift, {"weight": weight})}, lambda c: c["text"][0] * c["text"][1]["weight"][:, None]),
    }


@pytest.mark.parametrize("how", by_structure(0, 0))
def test_conditions_of_any_structure_are_batched_leaf_by_leaf(how):
    calls = []
    read = by_structure(0, 0)[how][1]

    def denoise(y, t, condition):
        calls.append(len(y))
        return y + read(condition)

    models = [
        cd.models.Denoiser(denoise, (2,), condition=by_structure(*values)[how][0], dtype=torch.float64)
        for values in ((0.5, 2.0), (-1.0, 3.0))
    ]
    found = Networks(models, is_discrete=False).predict(X, T)
    assert calls == [12]
    torch.testing.assert_close(found, (X + f64([1.0, 0.0]), X + f64([-3.0, 0.0])))
    refuted(torch.testing.assert_close, found, (X + f64([-3.0, 0.0]), X + f64([1.0, 0.0])))


def test_conditions_that_do_not_fit_together_are_evaluated_apart():
    def denoise(y, t, condition):
        return y + condition.sum(1, keepdim=True)

    models = [
        cd.models.Denoiser(denoise, (2,), condition=c, dtype=torch.float64) for c in (f64([1, 2]), f64([1, 2, 3]))
    ]
    networks = Networks(models, is_discrete=False)
    torch.testing.assert_close(networks.predict(X, T), (X + 3, X + 6))
    assert networks.n_calls == 2


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (3, r"condition must be a tensor, or a tuple or dictionary of tensors.* got 3"),
        ("a cat", "got 'a cat'"),
        (np.ones(2), "got array"),
        ((f64([1.0]), [f64([1.0])]), r"condition\[1\] must be"),
        ({"text": {"mask": None}}, r"condition\['text'\]\['mask'\] must be .* got None"),
        ((), r"got \(\)"),
    ],
)
def test_conditions_of_other_kinds_are_refused_at_construction(condition, message):
    with pytest.raises(cd.InputError, match=message):
        cd.models.Denoiser(lambda y, t, c: y, (2,), condition=condition)


# -- training mode ---------------------------------------------------------------------------------------------


class Shaky(nn.Module):
    """A denoiser with a layer that behaves differently in training mode."""

    def __init__(self, layer):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), layer)

    def forward(self, y, t):
        return self.body(y)

    def denoise(self, y, t):
        return self(y, t)


class Holder:
    def __init__(self, net):
        self.parts = {"net": net}

    def __call__(self, y, t):
        return self.parts["net"](y, t)


GLOBAL = Shaky(nn.Dropout(0.1))


def through_global(y, t):
    return GLOBAL(y, t)


def reaching(net):
    return {
        "the module": net,
        "a bound method": net.denoise,
        "a partial": functools.partial(net, t=None),
        "a closure": lambda y, t: net(y, t),
        "a default": lambda y, t, n=net: n(y, t),
        "an object": Holder(net),
        "a method of an object": Holder(net).__call__,
        "preconditioning": cd.models.EDM(lambda y, c: net(y, c), 1.0),
    }


@pytest.mark.parametrize("how", reaching(GLOBAL))
def test_dropout_in_training_mode_is_refused_wherever_the_network_hides(how):
    net = Shaky(nn.Dropout(0.1))
    model = cd.models.Denoiser(reaching(net)[how], (2,), dtype=torch.float64, process=PROCESS)
    for target in (model.as_target(), cd.stitching.Segments(model, 2).as_target()):
        with pytest.raises(cd.InputError, match=r"training mode, where Shaky\.body\.1 \(Dropout\).*call \.eval\(\)"):
            cd.ReplicaExchange(target, LADDER)
    net.eval()
    Networks([model], is_discrete=False)


def test_a_network_that_a_function_finds_as_a_global_is_seen_too():
    model = cd.models.Denoiser(through_global, (2,), dtype=torch.float64, process=PROCESS)
    with pytest.raises(cd.InputError, match=r"call \.eval\(\)"):
        cd.SMC(model, LADDER)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(2), nn.AlphaDropout(0.2), nn.RReLU(), nn.MultiheadAttention(2, 1, dropout=0.1)],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_of_that_kind(layer):
    model = cd.models.Denoiser(Shaky(layer), (2,), dtype=torch.float64)
    with pytest.raises(cd.InputError, match=type(layer).__name__):
        Networks([model], is_discrete=False)
    model.function.eval()
    Networks([model], is_discrete=False)


@pytest.mark.parametrize("layer", [nn.LayerNorm(2), nn.Dropout(0.0), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)], ids=str)
def test_layers_that_do_the_same_in_both_modes_are_no_reason_to_refuse(layer):
    Networks([cd.models.Denoiser(Shaky(layer), (2,))], is_discrete=False)


# -- what models return ----------------------------------------------------------------------------------------


class Output:
    def __init__(self, **tensors):
        self.__dict__.update(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: Output(sample=d), r"'Output' instead of a tensor: return its attribute \.sample"),
        (lambda d: Output(logits=d), r"attribute \.logits"),
        (lambda d: (d, d), r"'tuple' instead of a tensor: return its entry \[0\]"),
        (lambda d: {"eps": d}, r"'dict' instead of a tensor: return one of its entries \['eps'\]"),
        (lambda d: d.numpy(), "'ndarray' instead of a tensor: return a tensor"),
        (lambda d: None, "'NoneType' instead of a tensor"),
    ],
)
@pytest.mark.parametrize("conditional", [False, True])
def test_a_model_that_returns_no_tensor_is_refused_by_its_type(change, message, conditional):
    model = cd.models.Denoiser(
        lambda y, t, c=None: change(y), (2,), condition=f64([1.0]) if conditional else None, process=PROCESS
    )
    with pytest.raises(cd.InputError, match=message):
        cd.ReplicaExchange(model, LADDER)


class Own(cd.models.Model):
    """A stranger's model, without the wrapper."""

    event_shape, dtype = (2,), torch.float64

    def __init__(self, change=lambda d: d):
        self.change = change

    def predict(self, x, t):
        return self.change(x / (1 + t[:, None] ** 2))

    def process(self):
        return PROCESS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d,), r"model 0 returned .*'tuple'.*\[0\]"),
        (lambda d: d.float(), "model 0 returned torch.float32 for a state of torch.float64"),
        (lambda d: d.to("meta"), "model 0 returned a tensor on meta for states on cpu"),
        (lambda d: d[:1], r"model 0 returned shape \(1, 2\) for states \(2, 2\)"),
    ],
)
def test_a_model_of_ones_own_is_checked_too(change, message):
    with pytest.raises(cd.InputError, match=message):
        cd.ReplicaExchange(Own(change), LADDER, n_chains=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"event_shape": {"image": (3, 8), "text": (4,)}}, r"dictionary with keys \['image', 'text'\]"),
        ({"event_shape": 3}, "tuple of positive integers.* got 3"),
        ({"event_shape": (3, 0)}, r"got \(3, 0\)"),
        ({"event_shape": (2.5,)}, r"got \(2.5,\)"),
        ({"event_shape": "32"}, "got '32'"),
        ({"event_shape": ()}, r"got \(\)"),
        ({"dtype": torch.float16}, "torch.float32 or torch.float64, got torch.float16"),
        ({"dtype": torch.long}, "got torch.int64"),
        ({"dtype": "float32"}, "got 'float32'"),
    ],
)
def test_events_and_dtypes_that_cannot_be_are_refused_at_construction(options, message):
    with pytest.raises(cd.InputError, match=message):
        cd.models.Denoiser(lambda y, t: y, **{"event_shape": (2,), **options})


# -- rewards that have no gradient -----------------------------------------------------------------------------

NOT_DIFFERENTIABLE = {
    "numpy": lambda x: torch.from_numpy(np.sin(x[:, 0].numpy())),
    "detached": lambda x: x.detach()[:, 0],
    "detached numpy": lambda x: torch.tensor(np.sin(x[:, 0].detach().numpy())),
    "rounded": lambda x: (x[:, 0] * 10).round() / 10,
    "counted": lambda x: (x > 0).sum(1).double(),
    "a sign": lambda x: x[:, 0].sign() + x[:, 1].floor(),
    "no_grad": torch.no_grad()(lambda x: x[:, 0]),
}
DIFFERENTIABLE = {
    "flat at times": lambda x: x[:, 0].clamp(min=100.0),
    "partly rounded": lambda x: x[:, 0].round() + x[:, 1],
    "an absolute value by its sign": lambda x: x[:, 0] * x[:, 0].sign(),
}


@pytest.mark.parametrize("on", ["prediction", "state"])
@pytest.mark.parametrize("guidance", ["gradient", "jacobian-free"])
@pytest.mark.parametrize("kind", NOT_DIFFERENTIABLE)
def test_rewards_without_a_gradient_are_refused_by_name(kind, guidance, on):
    function = NOT_DIFFERENTIABLE[kind]
    target = Own().tilt(function, guidance=guidance, on=on, name=kind)
    with pytest.raises(cd.InputError, match=rf"'{kind}' cannot be differentiated.*guidance=\"none\""):
        cd.ReplicaExchange(target, LADDER)
    cd.ReplicaExchange(Own().tilt(function, on=on), LADDER).step()


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_rewards_with_some_gradient_are_not(kind):
    cd.ReplicaExchange(Own().tilt(DIFFERENTIABLE[kind], guidance="gradient"), LADDER).step()


def test_an_error_of_the_reward_itself_is_not_hidden():
    def broken(x):
        raise RuntimeError("no such protein")

    with pytest.raises(RuntimeError, match="no such protein"):
        cd.ReplicaExchange(Own().tilt(broken, guidance="gradient"), LADDER)


def test_gradients_through_a_model_that_has_none_are_refused():
    target = Own(lambda d: d.detach()).tilt(lambda x: x[:, 0], guidance="gradient")
    with pytest.raises(cd.InputError, match=r"prediction of model 0 has no gradient.*jacobian-free"):
        cd.ReplicaExchange(target, LADDER)
    cd.ReplicaExchange(target, LADDER, proposal=cd.Proposal(guidance="jacobian-free")).step()


# -- annealing in time -----------------------------------------------------------------------------------------


def test_a_reward_annealed_by_ones_own_function_of_time():
    """A stranger's annealing, as a decorated function and as a class: r_t = gamma(t) r(D), whatever the ladder."""

    @cd.anneal.of_time
    def fading(t):
        return 1 / (1 + t**3)

    class Fading:
        of_time = True

        def __call__(self, t):
            return 1 / (1 + t**3)

    def check(gamma, ladder):
        evaluate = cd.ReplicaExchange(Own().tilt(lambda x: x[:, 0], anneal=gamma, scale=2.0), ladder).evaluate
        expected = 2 / (1 + T**3) * X[:, 0] / (1 + T**2)
        torch.testing.assert_close(evaluate(X, T).reward, expected)

    for ladder in (LADDER, cd.ladder.geometric(9, 0.05, 20.0)):
        check(fading, ladder)
        check(Fading(), ladder)
        refuted(check, lambda u: 1 / (1 + u**3), ladder)


@pytest.mark.parametrize(
    ("gamma", "message"),
    [
        (lambda u: u[:2], r"'r': anneal must return a tensor with one number per time, got shape \(2,\)"),
        (lambda u: None, "one number per time, got None"),
        (cd.anneal.of_time(lambda t: (t - 1).log()), r"'r': anneal must be finite on the ladder.* t = 0.1"),
    ],
)
def test_annealings_that_do_not_fit_are_refused(gamma, message):
    with pytest.raises(cd.InputError, match=message):
        cd.ReplicaExchange(Own().tilt(lambda x: x[:, 0], anneal=gamma, name="r"), LADDER)


def test_of_time_marks_functions_only():
    with pytest.raises(cd.InputError, match=r"function of the time, got 3"):
        cd.anneal.of_time(3)
