"""The twin: exact posteriors by enumeration, a fit that finds what was put in, and a sweep on a tiny bank."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import refuted
from studies.sentences import markov, sweep, tables
from studies.shared.results import Results

LENGTH, VOCAB = 3, 4


def random_bank(seed=0, n_models=3, hidden=2, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)

    def table(*shape):
        p = torch.rand(shape, generator=generator, dtype=torch.float64) ** 2 + 0.05
        return p / p.sum(-1, keepdim=True)

    return markov.Bank(table(n_models, hidden), table(n_models, hidden, hidden), table(n_models, hidden, vocab))


BANK = random_bank()
ALL = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)


def joint(bank, k):
    """`p(x)` of all sentences of one model, by summing over all classes."""
    hidden = torch.cartesian_prod(*[torch.arange(bank.n_hidden)] * LENGTH)
    p = bank.first[k][hidden[:, 0]]
    for i in range(1, LENGTH):
        p = p * bank.steps[k][hidden[:, i - 1], hidden[:, i]]
    words = torch.stack([bank.words[k][hidden[:, i]][:, ALL[:, i]] for i in range(LENGTH)]).prod(0)
    return p @ words


def check_posterior(bank, model, p):
    """Predictions under every mask, against the joint law."""
    for mask in range(1, 2**LENGTH):
        hidden = torch.tensor([bool(mask >> i & 1) for i in range(LENGTH)])
        x = torch.unique(ALL.masked_fill(hidden, VOCAB), dim=0)
        found = model.predict(x, torch.ones(len(x))).exp()
        for row, predicted in zip(x, found, strict=True):
            fits = ((row == ALL) | hidden).all(1)
            for i in hidden.nonzero()[:, 0]:
                wanted = torch.zeros(VOCAB, dtype=torch.float64).index_add_(0, ALL[fits, i], p[fits])
                assert_close(predicted[i], wanted / wanted.sum(), atol=1e-12, rtol=0)


def test_predictions_are_exact_under_every_mask():
    mixture = markov.MarkovModel(BANK, [0.3, 0.7, 0.0], LENGTH)
    p = 0.3 * joint(BANK, 0) + 0.7 * joint(BANK, 1)
    assert abs(float(p.sum()) - 1) < 1e-12
    check_posterior(BANK, mixture, p)
    refuted(check_posterior, BANK, mixture, joint(BANK, 1))
    assert_close(mixture.log_prob(ALL), p.log(), atol=1e-12, rtol=0)


def test_draws_have_the_law_and_a_fit_finds_it():
    x = BANK.sample(20_000, 1, LENGTH, torch.Generator().manual_seed(0))
    p = joint(BANK, 1)
    index = (x * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    share = torch.bincount(index, minlength=len(ALL)) / len(x)
    assert float((share - p).abs().sum()) / 2 < 0.03
    fitted = markov.fit(x, VOCAB, 2, 60)
    entropy = -float((p * p.log()).sum())
    found = -float(fitted.log_evidence(x).mean())
    alone = -float(markov.fit(x, VOCAB, 1, 1).log_evidence(x).mean())
    assert found < entropy + 0.01 < alone


def test_the_truth_is_the_guided_law():
    for unconditional, other in (("mixture", 0.5 * (joint(BANK, 0) + joint(BANK, 1))), ("own", joint(BANK, 2))):
        problem = markov.Guided(BANK, 1.8, unconditional, length=LENGTH)
        log_pi = 1.8 * joint(BANK, 1).log() - 0.8 * other.log()
        truth = problem.truth(50_000)
        assert abs(truth.log_z - float(log_pi.logsumexp(0))) < 0.02
        accuracy = joint(BANK, 1) / (joint(BANK, 0) + joint(BANK, 1))
        found = truth.weights @ problem.statistics(truth.x)["accuracy"][:, 0]
        assert abs(float(found) - float(log_pi.softmax(0) @ accuracy)) < 0.01


def test_the_sweep_on_a_tiny_bank(tmp_path, monkeypatch):
    """Corrected methods are near the truth, plain walks by another strength are not, and the page gets its tables."""
    monkeypatch.setattr(sweep, "N_GROUPS", 2)
    cell, results = sweep.Cell("own", 1.8, 1.0), Results(tmp_path)
    truth = sweep.known(markov.Guided(BANK, cell.target, cell.unconditional, length=LENGTH), 20_000)
    floor = sweep.floors(truth, 1_500, LENGTH)
    found = {m: sweep.measure(BANK, cell, m, truth, rows=1_500, length=LENGTH) for m in sweep.METHODS}
    for method, record in found.items():
        error = abs(math.fsum(record["accuracy"]) / len(record["accuracy"]))
        if method == "plain":
            assert error > 4 * floor["accuracy"]
        else:
            assert error < 3 * floor["accuracy"], (method, record)
            assert record["rows"] <= 1_600, (method, record["rows"])
            assert record["verdicts"][0] in ("ok", "look", "do not trust")
    cell = sweep.cells()[0]
    results.save(f"twin {cell.name} truth", {"accuracy": 0.8, "nats": 3.0, "floors": floor})
    results.save(f"twin {cell.name} SMC", found["SMC"])
    assert "| 1.4, 1 | SMC |" in tables.twin(results, cell.unconditional)
    assert tables.paper(results) is None


def test_the_papers_setting_runs():
    bank = random_bank(vocab=6)
    found = sweep.paper(bank, sweep.Cell("own", 1.4, 1.0), n_chains=2, n_levels=5, n=20, burn_in=5)
    assert len(found["accuracy"]) == len(found["verdicts"]) == len(found["tours"]) == 2
    assert len(found["running"]["nats"]) == 2
    assert 0 < found["acceptance"] <= 1


def test_the_shipped_twin_and_bad_input(tmp_path):
    bank, words = markov.load_twin()
    assert len(words) == bank.n_words == markov.N_WORDS
    assert words[0] == markov.OTHER
    with pytest.raises(cd.InputError, match="2 weights do not fit a bank of 3 models"):
        markov.MarkovModel(BANK, [0.5, 0.5], LENGTH)
    with pytest.raises(cd.InputError, match="label must be 0"):
        markov.Guided(BANK, 1.4, label=2)
    with pytest.raises(cd.InputError, match="no weights"):
        markov.load_twin(tmp_path / "twin.safetensors")


def test_a_twin_from_sentences(tmp_path):
    corpus = [("a good film and " * 4, 1), ("a bad plot but " * 4, 0)] * 20
    found = markov.make_twin(corpus, tmp_path / "twin.safetensors", n_rounds=3, n_words=6)
    bank, words = markov.load_twin(tmp_path / "twin.safetensors")
    assert found["sentences"] == 40
    assert bank.n_models == 3
    assert set(words) <= {markov.OTHER, "a", "good", "film", "and", "bad", "plot", "but"}
