"""Masked language models of Hugging Face as diffusions: the real classes, tiny, with random or analytic weights."""

from __future__ import annotations

import itertools

import pytest
import torch

import crepe_diffusion as cd
from checks import assert_frequencies, refuted
from crepe_diffusion.models.networks import Networks
from crepe_diffusion.paths import log_work, walk
from crepe_diffusion.processes import Masked

V, MASK, CLS, SEP, PAD = 12, 4, 2, 3, 1
ALLOWED = list(range(5, V))
NEVER = [0, PAD, CLS, SEP]
PROMPT = [CLS, 7, MASK, MASK, 9, SEP]
FREE = [2, 3]
LADDER = cd.ladder.linear(3, 0.0, 1.0)


@pytest.fixture(scope="module", params=["bert", "roberta", "esm", "esm with dropped tokens"])
def network(request):
    """The real class with random weights that are large enough for dependence between positions."""
    transformers = pytest.importorskip("transformers")
    size = {
        "vocab_size": V,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
        "pad_token_id": PAD,
    }
    torch.manual_seed({"bert": 5, "roberta": 4}.get(request.param, 3))
    if request.param == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**size))
    elif request.param == "roberta":
        model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**size))
    else:
        dropped = request.param != "esm"
        config = transformers.EsmConfig(
            **size,
            mask_token_id=MASK,
            token_dropout=dropped,
            position_embedding_type="rotary",
            emb_layer_norm_before=False,
        )
        model = transformers.EsmForMaskedLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                quiet = any(part in name for part in ("query", "key", "position"))
                ends = any(part in name for part in ("word_emb", "lm_head", "cls"))
                p.copy_(torch.randn(p.shape) * (0.2 if quiet else 1.0 if ends else 2.0))
    return model.eval().requires_grad_(False)


def adapted(network, **options):
    return cd.models.from_masked_lm(network, **{"mask_id": MASK, "forbidden": NEVER, "prompt": PROMPT, **options})


def softmax_over(network, ids, position, allowed):
    """The network's own forward of one row, by hand."""
    logits = network(input_ids=torch.tensor([ids])).logits[0, position].double()
    p = torch.zeros(V, dtype=torch.float64)
    p[allowed] = logits[allowed].softmax(0)
    return p


def test_probabilities_are_those_of_the_owner_over_the_allowed_tokens(network):
    model = adapted(network)
    states = [PROMPT, [CLS, 7, 5, MASK, 9, SEP], [CLS, 7, MASK, 11, 9, SEP]]
    found = model.predict(torch.tensor(states), torch.ones(3)).exp()

    def check(allowed):
        for row, ids in enumerate(states):
            for i in FREE:
                if ids[i] == MASK:
                    expected = softmax_over(network, ids, i, allowed).float()
                    torch.testing.assert_close(found[row, i], expected, atol=2e-6, rtol=0)

    check(ALLOWED)
    refuted(check, [*ALLOWED, SEP])
    masked = [(row, i) for row, ids in enumerate(states) for i in FREE if ids[i] == MASK]
    errors = [(found[row, i] - softmax_over(network, states[row], i, ALLOWED)).abs().max() for row, i in masked]
    print(f"largest difference of a probability, {type(network).__name__}: {float(max(errors)):.1e}")


@pytest.mark.parametrize("share", [0.15, 0.95])
def test_few_and_nearly_all_positions_masked_agree_with_the_owner(network, share):
    """Also where ESM multiplies embeddings by 0.88 / (1 - share)."""
    ids = torch.tensor([[CLS, *(5 + i % 7 for i in range(12)), SEP]])
    ids[0, 1 : 1 + round(share * 12)] = MASK
    found = adapted(network, prompt=ids).predict(ids, torch.ones(1))[0, 1].exp()
    expected = softmax_over(network, ids[0].tolist(), 1, ALLOWED).float()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    assert (expected - 1 / len(ALLOWED)).abs().max() > 0.02, "weights that say something"


def random_order_law(network, orders):
    """By enumeration: the mean over orders of the product of conditionals, for the two free positions."""
    law = torch.zeros(V, V, dtype=torch.float64)
    for first, second in orders:
        p = softmax_over(network, PROMPT, first, ALLOWED)
        for v in ALLOWED:
            ids = list(PROMPT)
            ids[first] = v
            rest = p[v] * softmax_over(network, ids, second, ALLOWED)
            if first < second:
                law[v] += rest / len(orders)
            else:
                law[:, v] += rest / len(orders)
    return law


def test_the_plain_sampler_draws_the_random_order_law(network):
    both = list(itertools.permutations(FREE))
    x = cd.Plain(adapted(network), LADDER, seed=1).sample(4000).x
    frozen = torch.tensor(PROMPT)
    assert (x[:, [0, 1, 4, 5]] == frozen[[0, 1, 4, 5]]).all(), "the prompt stays"
    pair = x[:, 2] * V + x[:, 3]
    law = random_order_law(network, both)
    assert_frequencies(pair, law.flatten())
    refuted(assert_frequencies, pair, (law**1.2 / (law**1.2).sum()).flatten())
    if network.config.model_type == "esm":  # where positions depend on each other much, and the order matters
        independent = torch.outer(*(softmax_over(network, PROMPT, i, ALLOWED) for i in FREE))
        refuted(assert_frequencies, pair, independent.flatten())
        refuted(assert_frequencies, pair, random_order_law(network, both[:1]).flatten())


def test_swaps_are_all_accepted_with_control_off(network):
    chain = cd.ReplicaExchange(adapted(network), LADDER, n_chains=4, seed=2)
    evaluate, state = chain.evaluate, chain.state

    def works(coefficients):
        found = []
        for direction in (-1, 1):
            rows = torch.where(
                (state.level.flatten() + direction).clamp(0, 2) == state.level.flatten() + direction, direction, 0
            )
            path = walk(evaluate, state.x, state.seen, state.level.flatten(), rows, 1, cd.Stream(5).at(direction))
            found.append(log_work(path, coefficients))
        return torch.cat(found)

    def zero(coefficients):
        assert works(coefficients).abs().max() < 2e-6  # float32 predictions

    print(f"largest work with control off: {float(works(evaluate.coefficients).abs().max()):.1e}")
    zero(evaluate.coefficients)
    refuted(zero, cd.Proposal().coefficients(adapted(network) ** 1.5))


def test_a_prompt_guides_in_one_call_of_the_network(network):
    question = torch.tensor([False, True, False, False, True, False])
    model = adapted(network)
    apart = adapted(network, hidden=question)  # made by a second call of the adapter
    networks = Networks([model, apart], is_discrete=True)
    assert (networks.n_calls, networks.rows) == (1, 2)
    x = torch.tensor([PROMPT, [CLS, 7, 5, MASK, 9, SEP]])
    found = networks.predict(x, torch.ones(2))
    blind = x.masked_fill(question, MASK)
    torch.testing.assert_close(found[0], model.predict(x, torch.ones(2)), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], model.predict(blind, torch.ones(2)), atol=2e-6, rtol=1e-5)
    refuted(torch.testing.assert_close, found[0], found[1], atol=2e-2, rtol=0)
    words = model.hiding()  # the same positions: all of the prompt but its special tokens
    torch.testing.assert_close(words.predict(x, torch.ones(2)), found[1], atol=2e-6, rtol=1e-5)
    assert Networks([model, apart, words], is_discrete=True).n_calls == 1


def test_padding_is_left_out(network):
    """A padded text has the prediction of the same text without padding."""
    padded = [*PROMPT, PAD, PAD]
    short, long = adapted(network), adapted(network, prompt=padded, pad_id=PAD)
    expected = short.predict(torch.tensor([PROMPT]), torch.ones(1))[0, FREE]
    close = lambda model: torch.testing.assert_close(  # noqa: E731
        model.predict(torch.tensor([padded]), torch.ones(1))[0, FREE], expected, atol=1e-5, rtol=1e-5
    )
    close(long)
    refuted(close, adapted(network, prompt=padded))


def test_the_mass_of_allowed_tokens_is_what_the_owner_gives_them(network):
    x = torch.tensor([PROMPT])
    expected = network(input_ids=x).logits.double().softmax(-1)[..., ALLOWED].sum(-1)
    torch.testing.assert_close(adapted(network).mass(x, 1.0).double()[:, FREE], expected[:, FREE], atol=1e-5, rtol=0)
    all_but_mask = adapted(network, forbidden=[]).mass(x, 1.0)
    assert (all_but_mask[:, FREE].double() > expected[:, FREE]).all()


def test_analytic_weights_give_a_closed_form():
    """With a decoder of zeros and biases log p, tokens are independent draws of p, restricted to what is allowed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    network = transformers.BertForMaskedLM(config).eval()
    p = torch.linspace(1, 3, V, dtype=torch.float64) ** 2
    with torch.no_grad():
        network.cls.predictions.decoder.weight.zero_()
        network.cls.predictions.decoder.bias.copy_(p.log())
        network.cls.predictions.bias.copy_(p.log())
    model = adapted(network)
    tempered = cd.SMC(model**2.0, LADDER, n_particles=500, n_batches=8, seed=1).sample()
    law = torch.zeros(V, dtype=torch.float64)
    law[ALLOWED] = p[ALLOWED] ** 2
    mean = tempered.mean(lambda x: x[:, 2].double())
    truth = float((torch.arange(V) * law).sum() / law.sum())
    check = lambda wanted: mean.value == pytest.approx(wanted, abs=5 * mean.error)  # noqa: E731
    assert check(truth)
    assert not check(float((torch.arange(V)[ALLOWED] * p[ALLOWED]).sum() / p[ALLOWED].sum()))


def test_the_place_of_the_mask_in_the_vocabulary_does_not_matter():
    """A table with its mask last, in the middle and first: the same draws, with other names."""
    table = cd.models.TokenTable(cd.Stream(4).uniform((1, 3, 3, 3))[0] ** 2)

    def draws(model):
        chain = cd.ReplicaExchange(model**1.5, cd.ladder.linear(4, 0.0, 1.0), n_chains=3, explorer=cd.SingleToken())
        return chain.sample(10).x

    expected = draws(table)
    for mask in (0, 1, 3):
        to_table = torch.tensor([v - (v > mask) if v != mask else 3 for v in range(4)])
        keep = torch.tensor([v for v in range(4) if v != mask])

        def function(x, t, to_table=to_table, keep=keep):
            out = torch.full((*x.shape, 4), -torch.inf, dtype=torch.float64)
            out[..., keep] = table.predict(to_table[x], t)
            return out

        model = cd.models.TokenModel(function, (3,), 4, mask_id=mask, dtype=torch.float64)
        assert (to_table[draws(model)] == expected).all()


@pytest.mark.parametrize("at_once", [1, None])
@pytest.mark.parametrize("mask", [0, 2, 3])
def test_kernels_with_the_mask_inside_are_those_with_the_mask_last(mask, at_once):
    keep = torch.tensor([v for v in range(4) if v != mask])
    names = torch.cat([keep, torch.tensor([mask])])  # names[v] is the id of what the usual process calls v
    inside, usual = Masked(4, at_once=at_once, mask_id=mask), Masked(3, at_once=at_once)
    x = torch.tensor([[0, 3], [3, 3], [1, 2]])
    log_p = cd.Stream(1).uniform((3, 2, 3)).log_softmax(-1)
    wide = torch.full((3, 2, 4), -torch.inf, dtype=torch.float64)
    wide[..., keep] = log_p
    s, t = torch.full((3,), 0.3).double(), torch.full((3,), 0.7).double()
    for name in ("denoising", "log_concrete"):
        options = (s, t) if name == "denoising" else (t,)
        found = getattr(inside, name)(names[x], wide, *options)
        torch.testing.assert_close(found[..., names], getattr(usual, name)(x, log_p, *options))
    torch.testing.assert_close(inside.noising(names[x], s, t)[..., names], usual.noising(x, s, t))
    x_s = torch.where(x == 3, 1, x)
    torch.testing.assert_close(inside.log_ratio(names[x_s], names[x], wide, s, t), usual.log_ratio(x_s, x, log_p, s, t))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_id": 99}, r"mask_id must be one of the network's ids 0 \.\. 5, got 99"),
        ({"forbidden": [0, 7]}, r"forbidden must be one of the network's ids 0 \.\. 5, got 7"),
        ({"forbidden": [0, 1, 3, 4]}, "4 of 6 tokens are forbidden"),
        ({"prompt": None}, "give prompt="),
        ({"prompt": [0, 4, 4, 1]}, r"leaves no position free: write the mask \(2\)"),
        ({"prompt": [[[0, 2]]]}, r"one id per position, \(length,\), or \(chains, length\), got \(1, 1, 2\)"),
        ({"prompt": [[0, 2], [2, 1]]}, "masks at the same positions: pad the shorter ones on the left"),
        ({"hidden": torch.tensor([False, False, True, False])}, "hidden positions are frozen ones"),
        ({"vocab_size": None}, r"no config\.vocab_size: give vocab_size="),
        ({"prompt": [0, 9, 2, 1]}, "prompt holds token 9, but vocab_size is 6"),
    ],
)
def test_bad_input_gets_one_sentence(options, message):
    logits = lambda ids: torch.zeros(*ids.shape, 6)  # noqa: E731
    with pytest.raises(cd.InputError, match=message):
        cd.models.from_masked_lm(logits, **{"mask_id": 2, "prompt": [0, 4, 2, 1], "vocab_size": 6, **options})


def test_esm_with_dropped_tokens_needs_one_that_is_visible():
    def esm(ids):
        return torch.zeros(*ids.shape, 6)

    esm.config = type("Config", (), {"token_dropout": True, "vocab_size": 6})
    model = cd.models.from_masked_lm(esm, mask_id=2, prompt=[0, 4, 2, 1])
    for refused in (lambda: cd.models.from_masked_lm(esm, mask_id=2, length=3), model.hiding):
        with pytest.raises(cd.InputError, match="one must be frozen and visible"):
            refused()


def test_a_network_of_another_vocabulary_is_refused():
    model = cd.models.from_masked_lm(lambda ids: torch.zeros(*ids.shape, 5), mask_id=2, length=3, vocab_size=6)
    with pytest.raises(cd.InputError, match=r"returned \(1, 3, 5\) for tokens \(1, 3\) and vocab_size 6"):
        cd.Plain(model, LADDER).sample(1)
