"""The design of antibodies with networks that know little: enumerated laws, samplers of them, and bad input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

import crepe_diffusion as cd
from checks import refuted
from studies.antibodies import __main__ as command
from studies.antibodies import exact, humanise, tables, wheels
from studies.antibodies.antibody import ANTIBODIES, LETTERS, MASK, Antibody, decode, encode
from studies.antibodies.design import Known, enumerated, known_answers, language_model, least_likely, sequences
from studies.shared.results import Results

LITTLE = Antibody("little", "ACDEFGHIKL", ("FG",), "made up")


class Toy:
    """Logits that depend on all visible residues, so that the order of revealing matters."""

    def __init__(self, seed: int, strength: float = 4.0):
        generator = torch.Generator().manual_seed(seed)
        self.bias = torch.randn(10, 20, generator=generator)
        self.pull = strength * torch.randn(10, 21, 10, 20, generator=generator) / 4

    def __call__(self, x):
        logits = self.bias + sum(self.pull[i, x[:, i]] for i in range(x.shape[1]))
        return torch.cat([logits, torch.zeros(*x.shape, 1)], -1)


@pytest.fixture(scope="module")
def two():
    prompt = LITTLE.prompt([2, 7])
    return [known_answers(Toy(seed), prompt) for seed in (0, 1, 2)]


def check_enumeration(known: Known, network, prompt) -> None:
    """The law of the two orders, by asking the network directly."""
    first, second = (prompt == MASK).nonzero()[:, 0].tolist()
    probabilities, log_z = enumerated([(known, 2.0)])
    expected = torch.zeros(400, dtype=torch.float64)
    for row, x in enumerate(sequences(prompt)):
        for i, j in ((first, second), (second, first)):
            half = prompt.clone()
            half[i] = x[i]
            log_p = [
                network(state[None])[0, place, :20].double().log_softmax(-1)[x[place]]
                for state, place in ((prompt, i), (half, j))
            ]
            expected[row] += math.exp(2 * (log_p[0] + log_p[1])) / 2
    assert abs(log_z - math.log(expected.sum())) < 1e-5
    assert_close(probabilities, expected / expected.sum(), atol=1e-6, rtol=0)


def test_the_enumerated_law_is_that_of_random_order(two):
    prompt = LITTLE.prompt([2, 7])
    check_enumeration(two[0], Toy(0), prompt)
    refuted(check_enumeration, two[1], Toy(0), prompt)
    orders = [two[0].log_prob(o).exp() for o in itertools.permutations(range(2))]
    for law in orders:
        assert abs(float(law.sum()) - 1) < 1e-12
    assert float((orders[0] - orders[1]).abs().sum()) / 2 > 0.05  # the order counts


def test_kept_answers_are_the_networks(two):
    """A model of all ten residues and one of the free two are the same law."""
    prompt = LITTLE.prompt([2, 7])
    whole, part = language_model(Toy(0), prompt), two[0].model()
    x = prompt.repeat(3, 1)
    x[1, 2], x[2, 7] = 5, 11
    t = torch.ones(3)
    assert_close(whole.predict(x, t)[:, [2, 7]], part.predict(x[:, [2, 7]], t), atol=1e-6, rtol=0)


def test_corrected_methods_are_near_the_floor_and_the_others_are_not(two):
    """Order matters in these networks, exponents do not sum to 1, and the reward is a black box."""
    parent = LITTLE.tokens[[2, 7]]
    for law in (
        exact.tempered(two[0]),
        exact.composed(two[0], two[1]),
        exact.guided(two[0], two[2]),
        exact.human(two[0], parent, -torch.linspace(0, 3, 400)),
    ):
        rows = 6_000
        floor = exact.floor(law, rows)
        found = {method: exact.measure(law, method, rows, 0) for method in exact.METHODS}
        # With coins, particles that wait are copied if revealing lowers the weight, and have more to reveal later.
        used = {method: f["rows"] for method, f in found.items() if method != "SMC, coins"}
        assert max(used.values()) <= 1.02 * rows, (law.name, used)
        assert found["SMC"]["tv"] < 2 * floor, (law.name, floor, found)
        assert found["plain"]["tv"] > 1.8 * found["SMC"]["tv"], (law.name, found)
        assert abs(found["SMC"]["log_z"]) < 0.1


def test_cases_are_neighbours_in_a_loop():
    """Positions of every enumerated case lie in the third loop, and those that the black box is asked among them."""
    for case in exact.CASES.values():
        antibody = ANTIBODIES[case.antibody]
        first = antibody.sequence.find(antibody.loops[2])
        assert list(case.free) == list(range(case.free[0], case.free[0] + len(case.free)))
        assert first <= case.free[0] <= case.free[-1] < first + len(antibody.loops[2])
        assert set(case.asked) <= set(case.free)


def test_tables_have_a_row_per_law(two, tmp_path):
    """A law that was not measured by every method has no row."""
    results = Results(tmp_path)
    law = exact.tempered(two[0])
    results.save(f"4D5 law {law.name}", {"floors": [0.1, 0.3], "rows": 9, "log_z": 0.0, "k": 2})
    assert tables.enumerated(results, "4D5") is None
    for method in exact.METHODS:
        for seed in range(2):
            results.save(f"4D5 tv {law.name} {method} {seed}", {"tv": 0.25 + seed / 4, "rows": 9, "log_z": 0.0})
    lines = tables.enumerated(results, "4D5").splitlines()
    assert lines[2].startswith("| Sapiens^2 (k = 2) | 0.200 ± 0.100 | 0.375 ± 0.125 |")
    assert len(lines) == 3


def test_both_models_have_a_table_of_their_own(tmp_path):
    """What asks one network and what asks two can be measured one after the other."""
    numbers = ("P(human)", "log P(human)", "Sapiens", "AntiBERTy", "mutations", "apart", "different", "draws", "rows")
    record = {**dict.fromkeys((*numbers, "rewards"), 1), "best": "ACD"}
    results, page = Results(tmp_path), tmp_path / "page.md"
    for method in ("tilted, SMC", "both models, SMC"):
        results.save(f"humanise 4D5 24 {method} 0", record)
    places = ("humanised", "both", "sequences", "sequences of both")
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in places))
    parts = tables.fill_page(page, results).read_text().split("<!-- end -->")
    assert [("tilted" in part, "both models" in part) for part in parts[:4]] == [(True, False), (False, True)] * 2


def test_every_method_humanises_and_keeps_what_is_frozen():
    free = least_likely(Toy(3), LITTLE, 4)
    human = humanise.Remembered(lambda x: -(x == 3).sum(1).to(torch.float64))
    task = humanise.Task(LITTLE, free, Toy(3), Toy(4), human)
    frozen = [i for i in range(10) if i not in free]
    drawn = {name: method(task, 32, 0) for name, method in humanise.METHODS.items()}
    for name, offer in drawn.items():
        x = offer.x
        assert (x[:, frozen] == LITTLE.tokens[frozen]).all(), name
        assert (x < MASK).all(), name
        found = humanise.judge(task, offer)
        assert 0 < found["different"] <= found["draws"] == len(x)
        assert offer.rows <= 1.3 * 32 * (len(free) + 1) * (2 if "guidance" in name else 1), name
    rewards = {reward.name: reward.function for reward in task.tilted.rewards}
    two_mutations = LITTLE.tokens.clone()[None]
    two_mutations[0, :2] = 3
    assert rewards["mutations"](two_mutations).tolist() == [-2 * humanise.PRICE]
    assert rewards["human"] is task.log_human
    best = task.network(LITTLE.tokens[None])[0, :, :20].argmax(-1)
    assert (drawn["greedy, as Sapiens does"].x[0, free] == best[free]).all()


def test_pseudo_likelihoods_mask_one_residue_at_a_time():
    x = encode("ACDEFGHIKL")
    masked = x.clone()
    masked[4] = MASK
    expected = Toy(0)(masked[None])[0, 4, :20].log_softmax(-1)[x[4]]
    assert_close(humanise.pseudo_likelihood(Toy(0), x[None], [4])[0], expected)


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(cd.InputError, match="'B' at position 3 is none of the 20 residues"):
        encode("ACBD")
    with pytest.raises(cd.InputError, match="empty"):
        encode("")
    with pytest.raises(cd.InputError, match="from 0 to 9, got \\[10\\]"):
        LITTLE.prompt([10])
    with pytest.raises(cd.InputError, match="does not contain the loop 'WW'"):
        Antibody("x", "ACDE", ("WW",), "").framework  # noqa: B018 - the property raises
    with pytest.raises(cd.InputError, match="enumerate 4 at most"):
        known_answers(Toy(0), LITTLE.prompt(range(5)))
    with pytest.raises(cd.InputError, match=r"run `python -m studies.antibodies fetch"):
        wheels.load_antiberty(tmp_path)
    network = wheels.Sapiens(torch.nn.Identity(), first=4, mask=24, frame=(0, 2), longest=142)
    with pytest.raises(cd.InputError, match="Sapiens takes 142 residues at most, got 143"):
        network(torch.zeros(1, 143, dtype=torch.long))
    for token in (-1, 21):  # a negative one would be read from the end of the vocabulary
        with pytest.raises(
            cd.InputError, match=f"tokens 0 to 19, and 20 where one is to be drawn, got {token}: `encode`"
        ):
            network.framed(torch.tensor([[3, token, 20]]))


def test_the_command_says_what_to_do_in_one_sentence(tmp_path, monkeypatch, capsys):
    """Absent wheels, an unknown antibody, and more free positions than there are."""
    for arguments, sentence in (
        (["enumerate"], f"no wheel {tmp_path}/sapiens-1.0.3-py3-none-any.whl: run `python -m studies.antibodies fetch"),
        (["humanise", "--antibody", "OKT4"], "antibody must be one of 4D5, trastuzumab, OKT3, got 'OKT4'"),
    ):
        where = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
        monkeypatch.setattr("sys.argv", ["antibodies", *arguments, *where])
        with pytest.raises(SystemExit) as left:
            command.main()
        said = capsys.readouterr().err
        assert left.value.code == 2
        assert said.startswith(sentence), said
        assert said.count("\n") == 1


def test_sequences_are_what_they_should_be():
    for antibody in ANTIBODIES.values():
        assert decode(antibody.tokens) == antibody.sequence
        assert len(antibody.framework) == len(antibody.sequence) - sum(map(len, antibody.loops))
    assert "".join(sorted(set(LETTERS))) == LETTERS


@pytest.mark.slow
def test_the_real_networks_say_what_is_published():
    """Needs the wheels: P(human) and pseudo-perplexity of trastuzumab's heavy chain."""
    try:
        antiberty, sapiens = wheels.load_antiberty(), wheels.load_sapiens()
    except cd.InputError as error:
        pytest.skip(str(error))
    human, mouse = ANTIBODIES["trastuzumab"], ANTIBODIES["4D5"]
    assert abs(float(antiberty.log_human(human.tokens[None]).exp()) - 0.976) < 0.001
    assert float(antiberty.log_human(mouse.tokens[None]).exp()) < 0.001
    everywhere = range(len(human.sequence))
    assert abs(float(humanise.pseudo_likelihood(sapiens, human.tokens[None], everywhere).neg().exp()) - 2.69) < 0.02
