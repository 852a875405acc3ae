"""Denoisers of molecules: their symmetry, what they can represent, and that training is resumable."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import refuted
from crepe_diffusion import InputError
from studies.molecules import hands, model
from studies.molecules.data import read_trajectories
from studies.molecules.geometry import alphas, bonds, fragments, methyls, wide_centres, windows
from studies.molecules.network import EGNN, LIMIT, Folded, Fragments, PairForces, Split, volumes
from studies.molecules.peptides import peptide
from studies.shared.training import Settings, load_weights, save_weights

N = 6
TINY = Path(str(files("studies.molecules") / "tiny-data"))


def networks():
    torch.manual_seed(0)
    centres = torch.tensor([[0, 1, 2, 3], [4, 2, 5, 0]])
    made = [
        PairForces(N, 0.2, n_layers=3, width=32),
        EGNN(N, n_layers=2, width=16),
        PairForces(N, 0.2, n_layers=3, width=32, centres=centres, rank=4),
    ]
    for network in made:
        for p in network.parameters():  # last layers begin at zero, where every symmetry holds
            p.data += 0.1 * torch.randn_like(p)
    return [n.double() for n in made]


def check_symmetric(network, mirrored):
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(5, N, 3, generator=generator, dtype=torch.float64)
    y = y - y.mean(1, keepdim=True)
    c_noise = torch.linspace(-1.5, 0.5, 5, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    if (torch.det(turn) < 0) != mirrored:
        turn = turn * torch.tensor([1.0, 1.0, -1.0])
    out = network(y, c_noise)
    assert (network(y @ turn, c_noise) - out @ turn).abs().max() < 1e-10 * out.abs().max()
    assert (network(y + 0.3, c_noise) - out).abs().max() < 1e-10 * out.abs().max()
    assert out.mean(1).abs().max() < 1e-12 * out.abs().max()


@pytest.mark.parametrize("network", networks(), ids=["pairs", "egnn", "pairs with volumes"])
def test_turning_and_moving(network):
    check_symmetric(network, mirrored=False)


def test_a_folded_network_is_right_in_both_hands_and_all_names():
    """Mirroring or renaming a molecule does so to the answer; where nothing is to fold, it is the bare network's."""
    handed = networks()[2]
    alphas, methyls = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[4, 2, 3, 5]])
    folded = Folded(handed, alphas, methyls)
    check_symmetric(folded, mirrored=False)
    check_symmetric(folded, mirrored=True)
    y, c = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(3)).double(), torch.zeros(64).double()
    renamed = [0, 1, 2, 5, 4, 3]

    def check_names(network):
        assert (network(y[:, renamed], c) - network(y, c)[:, renamed])[alike].abs().max() < 1e-10

    at = y[:, [0, 4]], y[:, [[1, 2, 3], [2, 3, 5]]]
    volumes = torch.linalg.det(at[1] - at[0][:, :, None])
    # Renaming moves neighbours of the alpha carbon here, as it does in no molecule: where that flips its sign, skip.
    moved = y[:, renamed]
    alike = volumes[:, 0] * torch.linalg.det(moved[:, [1, 2, 3]] - moved[:, :1]) > 0
    assert 10 < alike.sum() < 64
    check_names(folded)
    refuted(check_names, handed)
    known = (volumes > 0).all(1)
    assert 5 < known.sum() < 40
    torch.testing.assert_close(folded(y, c)[known], handed(y[known], c[known]), atol=1e-12, rtol=0)
    assert not torch.allclose(folded(y, c)[~known], handed(y[~known], c[~known]))


def test_a_folded_network_knows_all_turns_of_a_methyl_group():
    """Any renaming of the three hydrogens renames the answer; without anchors only those that trade two of them."""
    group, anchor = torch.tensor([[0, 1, 2, 3]]), torch.tensor([4])
    torch.manual_seed(0)
    inner = PairForces(N, 0.5, n_layers=2, width=16, centres=group).double()
    for p in inner.parameters():
        torch.nn.init.normal_(p, std=0.3)
    y, c = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(5)).double(), torch.zeros(64).double()
    alpha = torch.tensor([[4, 0, 5, 1]])  # any centre; its hand must not change with the names

    def worst(network, three):
        renamed = [0, *three, 4, 5]
        same = (volumes(y[:, renamed], alpha) * volumes(y, alpha) > 0)[:, 0]
        return (network(y[:, renamed], c) - network(y, c)[:, renamed])[same].abs().max()

    turning = Folded(inner, alpha, group, anchor)
    assert max(worst(turning, three) for three in permutations((1, 2, 3))) < 1e-10
    before = Folded(inner, alpha, group)
    assert worst(before, (1, 3, 2)) < 1e-10
    assert worst(before, (2, 3, 1)) > 1e-3


def test_answers_count_the_less_the_larger_they_are_where_atoms_meet():
    """Their size is `LIMIT^2 / size` beyond the limit, so never larger; any other answer is left, to the bit.

    A network in training, which could learn to vanish so, is kept at the limit instead.
    """

    class Fixed(torch.nn.Module):
        def forward(self, y: torch.Tensor, c_noise: torch.Tensor) -> torch.Tensor:
            return answer

    answer = torch.randn(8, N, 3, generator=torch.Generator().manual_seed(0))
    y = torch.randn(8, N, 3, generator=torch.Generator().manual_seed(1))
    y[:, 1:4] = torch.eye(3) + y[:, :1]  # one hand, and one sense of the names
    y[:, 5] = y[:, 4] + torch.linalg.cross(y[:, 2] - y[:, 4], y[:, 3] - y[:, 4])
    folded = Folded(Fixed(), torch.tensor([[0, 1, 2, 3]]), torch.tensor([[4, 2, 3, 5]]))
    assert torch.equal(folded(y, torch.zeros(8)), answer)
    bare = answer
    for training, factor in product((True, False), (LIMIT, 100 * LIMIT, 1e6)):
        answer = factor / bare.square().mean((1, 2), keepdim=True).sqrt() * bare
        out = folded.train(training)(y, torch.zeros(8))
        size = LIMIT if training else LIMIT**2 / factor
        assert (out.square().mean((1, 2)).sqrt() / size - 1).abs().max() < 1e-5
        assert torch.nn.functional.cosine_similarity(out.flatten(1), bare.flatten(1)).min() > 1 - 1e-5


def test_fragments_of_one_kind_share_a_network():
    """Each fragment adds what its network says of its atoms alone."""
    whole, small = networks()[2], PairForces(3, 0.2, n_layers=2, width=8).double()
    for p in small.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).double()
    atoms = torch.tensor([[0, 2, 4], [5, 4, 1]])
    both = Fragments(whole, [small], [atoms])
    check_symmetric(both, mirrored=False)
    y, c = torch.randn(4, N, 3, generator=torch.Generator().manual_seed(3)).double(), torch.linspace(-1, 1, 4).double()
    added = torch.zeros_like(y)
    for group in atoms:
        added[:, group] += small(y[:, group], c)
    torch.testing.assert_close(both(y, c) - whole(y, c), added, atol=1e-12, rtol=0)
    assert added[:, 3].abs().max() == 0 < added[:, 4].abs().min()


def test_fragments_are_methyl_groups_and_what_is_around():
    """Of a tetrapeptide: three side chains of one kind, and two ends of other kinds."""
    pairs = bonds(peptide("tetrapeptide"))
    found = fragments(pairs)
    assert sorted(atoms.shape for atoms in found) == [(1, 9), (1, 9), (3, 12)]
    groups = np.concatenate([atoms[:, :4] for atoms in found])
    assert sorted(map(tuple, groups.tolist())) == sorted(map(tuple, methyls(pairs).tolist()))
    assert all(len(set(group)) == len(group) for atoms in found for group in atoms.tolist())


def check_windows_alike(chosen, rows, centres):
    """One network serves all residues, so atoms and volumes must mean the same in each; one has the sign of -phi."""
    pairs = bonds(chosen)
    degrees = [[int((pairs == atom).sum()) for atom in row] for row in rows]
    assert all(of == degrees[0] for of in degrees)
    (at,) = np.flatnonzero((centres == [0, 1, 5, 3]).all(1))  # CA with N, C of the residue before, C
    for phi in (-150.0, -60.0, 60.0, 150.0):
        x = torch.from_numpy(chosen.build(phi, -40.0)[1])[None]
        found = [float(volumes(x[:, row], torch.from_numpy(centres))[0, at]) for row in rows]
        assert np.allclose(found, found[0], rtol=0.05)
        assert np.sign(found[0]) == -np.sign(phi)


def test_windows_are_residues_alike():
    chosen = peptide("tetrapeptide")
    rows, centres = windows(bonds(chosen))
    assert rows.shape == (3, 16)
    names = [{chosen.atoms[atom] for atom in row} for row in rows]
    assert names[1] >= {name for name in chosen.atoms if name.startswith("ALA2:")} | {"ALA1:CA", "ALA3:CA"}
    check_windows_alike(chosen, rows, centres)
    swapped = rows.copy()
    swapped[1, [1, 3]] = swapped[1, [3, 1]]  # N and C, with as many neighbours
    refuted(check_windows_alike, chosen, swapped, centres)


def test_a_methyl_group_has_one_network():
    """Beside a network of residues, those of side chains are left out, and the ends of the chain keep theirs."""
    pairs = bonds(peptide("tetrapeptide"))
    assert model.parts(pairs, methyls=False, residues=False) == {}
    assert [len(of) for of in model.parts(pairs, methyls=True, residues=False)["fragments"]] == [1, 3, 1]
    both = model.parts(pairs, methyls=True, residues=True)
    carbons = [of[0][0] for of in both["fragments"]] + [row[4] for row in both["windows"]]
    assert sorted(carbons) == sorted(methyls(pairs)[:, 0].tolist())
    network = {"kind": "pairs", "n_layers": 2, "width": 8} | both
    built = model.build(network, len(peptide("tetrapeptide").atoms), 0.2)
    assert [part.pairs.shape[0] for part in built.network.parts] == [36, 36, 120]


def test_scales_of_distances_are_those_of_all_rows():
    """They are taken a piece at a time; a bond that hardly moves keeps its spread."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9000, 4, 3, generator=generator)
    x[:, 1] = x[:, 0] + torch.tensor([0.1, 0.0, 0.0]) * (1 + 1e-4 * torch.randn(9000, 1, generator=generator))
    network = PairForces(4, 0.2, n_layers=2, width=8)
    network.fit(x)
    d = (x[:, network.pairs[:, 0]].double() - x[:, network.pairs[:, 1]].double()).norm(dim=-1)
    torch.testing.assert_close(network.mean.double(), d.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(network.std.double(), d.std(0), rtol=2e-3, atol=0)


def test_fragments_can_join_a_network_that_was_trained_without(tmp_path):
    """They begin with no force, so the model stays what it was; a step moves both."""
    x = torch.randn(64, 7, 3, generator=torch.Generator().manual_seed(0)).numpy()
    plain = {"kind": "pairs", "n_layers": 2, "width": 8} | {
        "fold": {"alphas": [[4, 0, 5, 6]], "methyls": [[0, 1, 2, 3]]}
    }
    more = plain | {"fragments": [[[0, 1, 2, 3, 4, 5, 6]]]}
    list(model.train_model((x, x), tmp_path / "a", "m", plain, Settings(n_steps=20, batch=8)))
    start, y, sigma = tmp_path / "a" / "m.safetensors", torch.from_numpy(x), torch.full((64,), 0.7)
    before = model.load_model(start).predict(y, sigma)
    for rate, moved in ((0.0, False), (1e-2, True)):
        folder = tmp_path / f"b{rate}"
        list(
            model.train_model(
                (x, x), folder, "m", more, Settings(n_steps=3, batch=8, rate=rate, warm_up=1), start=start
            )
        )
        after = model.load_model(folder / "m.safetensors")
        assert torch.allclose(after.predict(y, sigma), before, atol=1e-6) != moved
        parts = {name: v for name, v in after.function.state_dict().items() if name.endswith("parts.0.last.weight")}
        assert [bool(v.abs().max() > 0) for v in parts.values()] == [moved]


def test_only_volumes_tell_mirror_images_apart():
    pairs, egnn, handed = networks()
    check_symmetric(pairs, mirrored=True)
    check_symmetric(egnn, mirrored=True)
    refuted(check_symmetric, handed, True)


def test_a_network_on_coordinates_fails_the_same_check():
    dense = torch.nn.Linear(3 * N, 3 * N).double()
    refuted(check_symmetric, lambda y, c: dense(y.flatten(1)).reshape(y.shape), False)


def test_pair_forces_turn_nothing():
    """The score of a law that is invariant under rotation has no torque; a field may be equivariant and have one."""
    y = torch.randn(5, N, 3, dtype=torch.float64)
    y, c = y - y.mean(1, keepdim=True), torch.zeros(5, dtype=torch.float64)
    pairs, egnn, handed = networks()

    def torque(network):
        return torch.linalg.cross(y, network(y, c)).sum(1).abs().max().item()

    assert max(torque(pairs), torque(handed)) < 1e-11
    assert torque(egnn) > 1e-6


def test_distances_are_seen_in_their_own_scale():
    """A bond of spread 0.003 nm and a shape of 0.1 nm both come in with unit spread, at any noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, 3, generator=generator) * 0.1
    x[:, 1] = x[:, 0] + torch.tensor([0.15, 0.0, 0.0]) + 0.003 * torch.randn(4000, 3, generator=generator)
    network = PairForces(3, 0.1, n_layers=1, width=8)
    network.fit(x)
    seen = []
    network.first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for sigma in (1e-4, 1e-2, 1.0):
        y = x + sigma * torch.randn(x.shape, generator=generator)
        network(y / (sigma**2 + 0.01) ** 0.5, torch.full((4000,), sigma).log() / 4)
    spread = torch.stack([s.std(0) for s in seen])
    assert (spread > 0.5).all()
    assert (spread < 1.5).all()
    assert torch.stack([s.mean(0).abs() for s in seen]).max() < 0.6


def pushed(strength, y, pairs):
    """`sum_j a_ij (y_i - y_j)`: a polynomial of the coordinates if the strengths (rows, pairs) are."""
    force = strength[:, :, None] * (y[:, pairs[:, 0]] - y[:, pairs[:, 1]])
    return torch.zeros_like(y).index_add(1, pairs[:, 0], force).index_add(1, pairs[:, 1], -force)


def lengths(y, pairs):
    return (y[:, pairs[:, 0]] - y[:, pairs[:, 1]]).norm(dim=-1)


def polynomial(a, b, sigma):
    """The network whose straight path is `pushed(a + b d^2)` at this noise, with weights from its own scales."""
    torch.manual_seed(0)
    network = PairForces(4, 0.2, n_layers=2, width=8).double()
    n = len(a)
    network.mean.uniform_(0.1, 0.5)
    network.std.uniform_(0.01, 0.1)
    unit = (sigma**2 + 0.2**2) ** 0.5  # of the coordinates that a network sees
    spread = (network.mean**2 + 6 * sigma**2).sqrt()
    scale = spread * (4 * network.std**2 + 4 * sigma**2).sqrt()  # unit^2 d^2 = spread^2 + scale * what comes in
    with torch.no_grad():
        network.gains.weight.zero_()
        gain, weight = (1 + network.gains.bias).chunk(2)
        network.linear.weight[n:, n:] = spread[:, None] / unit**3 * b * scale / (weight[n:, None] * gain[n:])
        network.last.bias[n:] = spread / unit * (a + b @ spread**2 / unit**2)
    return network


@pytest.mark.parametrize("sigma", [0.01, 3.0])
def test_squares_carry_polynomials_and_lengths_do_not(sigma):
    """To first order in the data over the noise, the best denoiser is linear in the coordinates; to the next, cubic."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(40, 4, 3, generator=generator, dtype=torch.float64)
    c_noise = torch.full((40,), math.log(sigma) / 4, dtype=torch.float64)
    a = torch.randn(6, generator=generator, dtype=torch.float64)
    b = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    pairs = PairForces(4, 0.2).pairs
    d = lengths(y, pairs)

    def check(found, a, b):
        wanted = pushed(a + d**2 @ b.T, y, pairs)
        assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()

    def by_lengths(a, b):
        """The best fit by forces along `grad d`, each as strong as an affine function of all lengths."""
        inputs = torch.cat([torch.ones(40, 1), d], 1)
        columns = [pushed(f[:, None] * torch.eye(6)[p] / d, y, pairs) for p in range(6) for f in inputs.T]
        design = torch.stack([c.flatten() for c in columns], 1)
        wanted = pushed(a + d**2 @ b.T, y, pairs).flatten()
        return (design @ torch.linalg.lstsq(design, wanted).solution).reshape(y.shape)

    for given in ((a, torch.zeros_like(b)), (a, b)):
        check(polynomial(*given, sigma)(y, c_noise), *given)
        refuted(check, polynomial(*given, 1.1 * sigma)(y, c_noise), *given)  # weights for another noise
    check(by_lengths(a, torch.zeros_like(b)), a, torch.zeros_like(b))  # d_ij grad d_ij is linear: the fit is a fair one
    refuted(check, by_lengths(a, b), a, b)


class Part(torch.nn.Module):
    """Moves every row by its noise and a number of its own, and keeps what it was given."""

    def __init__(self, number):
        super().__init__()
        self.number, self.seen = number, []

    def forward(self, y, c_noise):
        self.seen.append(c_noise)
        return self.number * y + c_noise[:, None, None]


class Blended(Split):
    """Both parts on all rows: right in the end, at twice the cost."""

    def forward(self, y, c_noise):
        below = 4 * c_noise < math.log(self.split)
        return torch.where(below[:, None, None], self.low(y, c_noise), self.high(y, c_noise))


class Closed(Split):
    """The row at the split goes to the low part."""

    def forward(self, y, c_noise):
        return Split(self.low, self.high, self.split * (1 + 1e-6))(y, c_noise)


class Sorted(Split):
    """Rows come back in the order of evaluation."""

    def forward(self, y, c_noise):
        below = 4 * c_noise < math.log(self.split)
        return torch.cat([self.low(y[below], c_noise[below]), self.high(y[~below], c_noise[~below])])


def check_split(kind):
    at = math.log(0.05) / 4
    for sides in ([1.0, -1.0, 0.0, -1e-3, 1e-3, -0.5], [-0.1, -0.2], [0.2, 0.0]):
        c_noise = at + torch.tensor(sides, dtype=torch.float64)
        y = torch.randn(len(sides), N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        low, high = Part(2.0), Part(-3.0)
        below = torch.tensor([s < 0 for s in sides])
        factor = torch.where(below, 2.0, -3.0)[:, None, None]
        assert torch.equal(kind(low, high, 0.05)(y, c_noise), factor * y + c_noise[:, None, None])
        for part, rows in ((low, below), (high, ~below)):
            assert len(part.seen) == rows.any()
            assert all(torch.equal(seen, c_noise[rows]) for seen in part.seen)


def test_each_row_is_evaluated_by_its_own_part_only():
    check_split(Split)
    for broken in (Blended, Closed, Sorted):
        refuted(check_split, broken)
    refuted(check_split, lambda low, high, split: Split(high, low, split))


def test_a_split_keeps_the_symmetries_of_its_parts():
    pairs, egnn, handed = networks()  # checked at log sigma = -6, -4, ..., 2, of which two are below 0.1
    check_symmetric(Split(pairs, egnn, 0.1), mirrored=True)
    for either in (Split(pairs, handed, 0.1), Split(handed, pairs, 0.1)):
        check_symmetric(either, mirrored=False)
        refuted(check_symmetric, either, True)


CENTRES = torch.tensor([[0, 1, 2, 3], [4, 2, 5, 0]])


def saved(path, seed, network, n_atoms=N, sigma_data=0.2, **about):
    """A model with weights and scales drawn at random, as `train_model` would leave it."""
    torch.manual_seed(seed)
    made = model.build(network, n_atoms, sigma_data, CENTRES)
    for p in made.parameters():
        p.data += 0.1 * torch.randn_like(p)
    for name, buffer in made.named_buffers():
        if name in ("network.mean", "network.std"):
            buffer.uniform_(0.1, 0.3)
    about = {"temperature": "800.0", "settings": json.dumps({"seed": seed}), **about}
    about |= {"network": json.dumps(network), "n_atoms": str(n_atoms), "sigma_data": repr(sigma_data)}
    save_weights(path, made, {**about, "last": json.dumps({"step": 10 * seed})})
    return path


PARTS = ({"kind": "pairs", "n_layers": 2, "width": 8}, {"kind": "pairs", "n_layers": 3, "width": 12})


def check_joined(joined, low, high, split):
    sigma = torch.tensor([3.0, 0.002, 0.99 * split, 1.01 * split, 0.5, 0.01])
    y = torch.randn(6, N, 3, generator=torch.Generator().manual_seed(0)) * (sigma**2 + 0.04).sqrt()[:, None, None]
    below = (sigma < split)[:, None, None]
    wanted = torch.where(below, low.predict(y, sigma), high.predict(y, sigma))
    error = (joined.predict(y, sigma) - wanted).flatten(1).norm(dim=1)
    assert (error < 1e-6 * wanted.flatten(1).norm(dim=1)).all()


FOLD = {"fold": {"alphas": [[0, 1, 2, 3]], "methyls": [[4, 2, 3, 5]]}}
FOLDED = (PARTS[0] | FOLD, PARTS[1] | FOLD)


@pytest.mark.parametrize("parts", [PARTS, FOLDED, (PARTS[0], {"kind": "egnn", "n_layers": 2, "width": 8})])
def test_a_joined_model_is_its_parts(tmp_path, parts):
    low, high = (saved(tmp_path / f"{k}.safetensors", k, network) for k, network in enumerate(parts, 1))
    model.join(low, high, tmp_path / "out.safetensors", 0.05)
    joined, *loaded = (model.load_model(path) for path in (tmp_path / "out.safetensors", low, high))
    check_joined(joined, *loaded, 0.05)
    refuted(check_joined, joined, *loaded[::-1], 0.05)
    refuted(check_joined, joined, *loaded, 0.06)
    for one in loaded:
        refuted(check_joined, one, *loaded, 0.05)


def test_a_joined_model_may_be_kept_in_half_the_bits(tmp_path):
    """Predictions change by the rounding of its matrices, and by nothing more."""
    low, high = (saved(tmp_path / f"{k}.safetensors", k, network) for k, network in enumerate(FOLDED, 1))
    for half in (False, True):
        model.join(low, high, tmp_path / f"{half}.safetensors", 0.05, half)
    whole, less = (model.load_model(tmp_path / f"{half}.safetensors") for half in (False, True))
    y, sigma = torch.randn(6, N, 3, generator=torch.Generator().manual_seed(0)), torch.full((6,), 0.5)
    a, b = (m.predict(y, sigma) for m in (whole, less))
    assert 0 < (a - b).abs().max() < 2e-3 * a.abs().max()
    sizes = [(tmp_path / f"{half}.safetensors").stat().st_size for half in (False, True)]
    assert sizes[1] < 0.75 * sizes[0]
    weights = load_weights(tmp_path / "True.safetensors")[0]
    assert {v.dtype for name, v in weights.items() if name.endswith(("mean", "std"))} == {torch.float32}


def test_a_folded_network_can_begin_from_a_bare_one(tmp_path):
    """With a rate of nothing it stays what it began as."""
    bare = saved(tmp_path / "bare.safetensors", 1, PARTS[0])
    x = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(0)).numpy()
    settings = Settings(n_steps=1, batch=4, rate=0.0)
    for line in model.train_model((x, x), tmp_path, "on", FOLDED[0], settings, CENTRES.numpy(), start=bare):
        assert line["step"] == 1
    (old, _), (new, _) = load_weights(bare), load_weights(tmp_path / "on.safetensors")
    assert all(torch.equal(new[k.replace("network.", "network.inner.")], v) for k, v in old.items() if k != "scales")
    assert len(new) == len(old)
    begun = load_weights(tmp_path / "on.safetensors")[1]["before"]
    assert json.loads(begun) == {"step": 10, "minutes": "unknown"}


def test_a_deeper_network_begins_as_the_one_before_and_learns(tmp_path):
    """With a rate of nothing it gives the same answers; with any other its new layers move."""
    before = saved(tmp_path / "before.safetensors", 1, FOLDED[0])
    x = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(0))
    old = model.load_model(before)
    deep = FOLDED[0] | {"n_layers": 5}
    for rate, same in ((0.0, True), (1e-3, False)):
        settings, folder = Settings(n_steps=2, batch=4, rate=rate, average=0.0), tmp_path / str(rate)
        list(model.train_model((x.numpy(), x.numpy()), folder, "m", deep, settings, CENTRES.numpy(), start=before))
        new = model.load_model(folder / "m.safetensors")
        sigma = torch.logspace(-2, 0, len(x))
        assert torch.allclose(new.predict(x, sigma), old.predict(x, sigma), atol=1e-6) == same
        moved = [v.abs().max() for k, v in load_weights(folder / "m.safetensors")[0].items() if ".hidden.3.weight" in k]
        assert (moved[0] == 0) == same


def test_a_training_can_begin_from_a_part_of_a_joined_model(tmp_path):
    """With a rate of nothing a part stays what it was, and taken for the other one it does not fit."""
    low, high = (saved(tmp_path / f"{k}.safetensors", k, network) for k, network in enumerate(FOLDED, 1))
    model.join(low, high, tmp_path / "both.safetensors", 0.05)
    x = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(0)).numpy()

    def begin(part, of):
        settings = Settings(n_steps=1, batch=4, rate=0.0)
        options = {"start": tmp_path / "both.safetensors", "part": part}
        folder = tmp_path / f"{part} {of.name}"
        list(model.train_model((x, x), folder, "m", FOLDED[part == "high"], settings, CENTRES.numpy(), **options))
        (old, _), (new, about) = load_weights(of), load_weights(folder / "m.safetensors")
        assert all(torch.equal(new[name], v) for name, v in old.items() if name != "scales")
        assert json.loads(about["before"]) == {"step": 10 if part == "low" else 20, "minutes": "unknown"}

    begin("low", low)
    begin("high", high)
    refuted(begin, "low", high)
    with pytest.raises(InputError, match="joined from two parts"):
        begin("all", low)


def test_a_joined_model_says_where_it_came_from(tmp_path):
    low = saved(tmp_path / "low.safetensors", 1, PARTS[0], n_frames="10")
    high = saved(tmp_path / "high.safetensors", 2, PARTS[1], n_frames="20")
    model.join(low, high, tmp_path / "out.safetensors")
    about = load_weights(tmp_path / "out.safetensors")[1]
    assert json.loads(about.pop("network")) == {
        "kind": "split", "split": model.SPLIT, "low": PARTS[0], "high": PARTS[1]
    }  # fmt: skip
    assert about == {
        "temperature": "800.0", "n_atoms": str(N), "sigma_data": "0.2",
        "low settings": '{"seed": 1}', "low last": '{"step": 10}', "low minutes": "unknown", "low n_frames": "10",
        "high settings": '{"seed": 2}', "high last": '{"step": 20}', "high minutes": "unknown",
        "high n_frames": "20",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "said"), [({"n_atoms": 7}, "n_atoms: 6 and 7"), ({"sigma_data": 0.25}, "sigma_data: 0.2 and 0.25")]
)
def test_parts_that_do_not_fit_are_not_joined(tmp_path, other, said):
    low = saved(tmp_path / "low.safetensors", 1, PARTS[0])
    high = saved(tmp_path / "high.safetensors", 2, PARTS[1], **other)
    with pytest.raises(InputError) as raised:
        model.join(low, high, tmp_path / "out.safetensors")
    assert str(raised.value) == f"{low} and {high} disagree on {said}"
    assert not (tmp_path / "out.safetensors").exists()


def rods(n, seed):
    """Two atoms at 0.15 +- 0.01 nm and a third that swings about them."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, 3, 3), dtype=np.float32)
    x[:, 1, 0] = 0.15 + 0.01 * rng.standard_normal(n)
    x[:, 2] = x[:, 1] + 0.1 * rng.standard_normal((n, 3))
    return x - x.mean(1, keepdims=True)


def trained(folder, steps, stop=None):
    settings = Settings(n_steps=steps, batch=64, warm_up=10, noise_mean=-3.6, noise_std=1.8)
    network = {"kind": "pairs", "n_layers": 2, "width": 32}
    lines = model.train_model((rods(4000, 0), rods(500, 1)), folder, "rod", network, settings, every=50)
    for line in lines:
        if line["step"] == stop:
            lines.close()
            return None
    return model.load_model(folder / "rod.safetensors")


def test_training_resumes_and_learns_the_bond(tmp_path):
    whole = trained(tmp_path / "whole", 300)
    assert trained(tmp_path / "part", 300, stop=150) is None
    part = trained(tmp_path / "part", 300)
    x = torch.from_numpy(rods(2000, 2))
    t = torch.full((2000,), 0.01)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = x + 0.01 * (noise - noise.mean(1, keepdim=True))
    assert torch.equal(whole.predict(y, t), part.predict(y, t))
    # Of six free coordinates the bond's length alone has the noise's own scale: the gap of two atoms has the variance
    # 2 sigma^2 of noise and sigma^2 of data, so a third of the error is left, and 5 1/3 sixths in all.
    loss = model.by_noise(whole.function, x, torch.tensor([0.01]))[0]
    assert 0.87 < loss < 0.94
    untrained = model.build({"kind": "pairs", "n_layers": 2, "width": 32}, 3, float(x.std()))
    assert model.by_noise(untrained, x, torch.tensor([0.01]))[0] > 0.97


def test_hydrogens_are_renamed_in_half_of_the_rows_and_nothing_else():
    x = torch.arange(4000 * 6 * 3, dtype=torch.float32).reshape(4000, 6, 3)
    y = model.renamed(x, np.array([[0, 1, 2, 3]]), torch.Generator().manual_seed(0))
    swapped = (y[:, 2] == x[:, 3]).all(1)
    assert abs(swapped.float().mean() - 0.5) < 5 * 0.5 / 4000**0.5
    assert torch.equal(y[swapped][:, [0, 1, 3, 2, 4, 5]], x[swapped])
    assert torch.equal(y[~swapped], x[~swapped])


def test_unknown_networks_are_refused():
    with pytest.raises(InputError, match='"pairs", "egnn" or "split", got \'mlp\''):
        model.build({"kind": "mlp", "n_layers": 2, "width": 8}, 3, 0.1)


def by_indices(network, y, c_noise):
    """What `PairForces` computes by products with matrices: atoms are gathered, and forces added up by index."""
    sigma = (4 * c_noise).exp()[:, None]
    y = y * (sigma**2 + network.sigma_data**2).sqrt()[:, :, None]
    i, j = network.pairs.T
    gap = y[:, i] - y[:, j]
    d, spread = gap.norm(dim=-1), (network.mean**2 + 6 * sigma**2).sqrt()
    scaled = (d - (network.mean**2 + 16 / math.pi * sigma**2).sqrt()) / (network.std**2 + 2 * sigma**2).sqrt()
    square = (d**2 - network.mean**2 - 6 * sigma**2) / (spread * (4 * network.std**2 + 4 * sigma**2).sqrt())
    at, bond = y[:, network.centres], (0.12**2 + 4 * sigma**2).sqrt()
    a, b, c = (at[:, :, 1:] - at[:, :, :1]).unbind(2)
    volume = (torch.linalg.cross(a, b) * c).sum(-1) / bond**3
    n = len(i)
    w = network._weights(torch.cat([scaled, square, 2 * volume], 1), c_noise)
    force = gap * (w[:, :n] / d + w[:, n : 2 * n] / spread)[:, :, None]
    out = torch.zeros_like(y).index_add(1, i, force).index_add(1, j, -force)
    for k, two in enumerate(((b, c), (c, a), (a, b)), 1):
        push = torch.linalg.cross(*two) * (w[:, 2 * n :] / bond**2)[:, :, None]
        out = out.index_add(1, network.centres[:, k], push).index_add(1, network.centres[:, 0], -push)
    return out


def test_products_with_matrices_are_gathers_and_sums_by_index():
    network = networks()[2]
    network.mean.uniform_(0.1, 0.5)
    y = torch.randn(9, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    c_noise = torch.linspace(-1.5, 0.5, 9, dtype=torch.float64)
    found, wanted = network(y, c_noise), by_indices(network, y, c_noise)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    parameters = list(network.parameters())
    slopes = [torch.autograd.grad(out.square().sum(), parameters) for out in (found, wanted)]
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=1e-10)


def test_atoms_at_one_place_leave_gradients_finite():
    y = torch.zeros(2, N, 3, dtype=torch.float64, requires_grad=True)
    out = networks()[2](y, torch.zeros(2, dtype=torch.float64))
    assert torch.autograd.grad(out.square().sum(), y)[0].isfinite().all()


def test_bfloat16_is_of_training_alone():
    """Coarse products change a little while a network is trained, and nothing when it is used."""
    torch.manual_seed(0)
    network = networks()[2].float()
    y, c_noise = torch.randn(64, N, 3), torch.linspace(-1.5, 0.5, 64)
    exact = network(y, c_noise)
    network.coarse = True
    off = (network(y, c_noise) - exact).norm() / exact.norm()
    assert 1e-4 < off < 2e-2
    assert torch.equal(network.eval()(y, c_noise), exact)


def test_lengths_alone_have_fewer_weights_and_the_same_symmetry():
    torch.manual_seed(0)
    centres = torch.tensor([[0, 1, 2, 3], [4, 2, 5, 0]])
    network = PairForces(N, 0.2, n_layers=3, width=32, centres=centres, rank=4, squares=False).double()
    for p in network.parameters():
        p.data += 0.1 * torch.randn_like(p)
    assert network.first.in_features == network.last.out_features == N * (N - 1) // 2 + len(centres)
    check_symmetric(network, mirrored=False)
    refuted(check_symmetric, network, True)


def test_parts_may_see_different_volumes(tmp_path):
    """Each part of a joined model is built with the centres that it was trained with."""
    low = saved(tmp_path / "low.safetensors", 1, PARTS[0] | {"squares": False})
    weights, about = load_weights(low)
    made = model.build(PARTS[1], N, 0.2, torch.cat([CENTRES, CENTRES.flip(1)]))
    about |= {"network": json.dumps(PARTS[1])}
    save_weights(tmp_path / "high.safetensors", made, about)
    model.join(low, tmp_path / "high.safetensors", tmp_path / "out.safetensors", 0.05)
    joined = model.load_model(tmp_path / "out.safetensors").function.network
    assert (len(joined.low.centres), len(joined.high.centres)) == (2, 4)
    assert torch.equal(joined.low.first.weight, weights["network.first.weight"])


def test_a_training_that_was_stopped_can_be_begun_from(tmp_path):
    x = torch.randn(64, N, 3, generator=torch.Generator().manual_seed(0)).numpy()
    first = model.train_model((x, x), tmp_path / "one", "m", PARTS[0], Settings(n_steps=4, batch=4), every=2)
    assert next(first)["step"] == 2
    first.close()
    begin = tmp_path / "one" / "average.safetensors"
    list(model.train_model((x, x), tmp_path, "m", PARTS[0], Settings(n_steps=1, batch=4, rate=0.0), start=begin))
    weights, about = load_weights(tmp_path / "m.safetensors")
    assert json.loads(about["before"])["step"] == 2
    assert all(torch.equal(weights[name], value) for name, value in load_weights(begin)[0].items())


def test_wide_volumes_show_the_hand_under_noise():
    """At 0.08 nm neighbours show it in two of three frames, and wide volumes in nine of ten."""
    chosen = peptide("dipeptide")
    wide = wide_centres(bonds(chosen))
    assert len(wide) == 3 * 3 * 4 + 3 * 3 + 2 * 3 * 4  # N, C and CB have 2, 2 and 3 more neighbours, HA none
    x = np.concatenate(read_trajectories(TINY, chosen, chosen.hot, equilibration=0.0))
    found = hands.legible(np.tile(x, (8, 1, 1)), chosen)
    near, all_near, far, all_far = found[0.08]
    assert near == all_near < 0.75  # one residue
    assert far == all_far > 0.85


def test_a_fold_by_wide_volumes_shows_one_hand_under_noise():
    """Weights from some frames show others in their own hand, nine of ten at 0.08 nm; neighbours do two of three."""
    chosen = peptide("dipeptide")
    pairs = bonds(chosen)
    x = np.concatenate(read_trajectories(TINY, chosen, chosen.hot, equilibration=0.0))
    learnt, others = np.tile(x[::2], (8, 1, 1)), torch.from_numpy(np.tile(x[1::2], (8, 1, 1))).float()
    generator = torch.Generator().manual_seed(9)
    y = others + 0.08 * torch.randn(others.shape, generator=generator)
    mirrored = torch.rand(len(y), generator=generator) < 0.5
    given = torch.where(mirrored[:, None, None], y * torch.tensor([1.0, 1.0, -1.0]), y)

    class Seen(torch.nn.Module):
        def forward(self, y, c_noise):
            self.y = y
            return y

    def shown_rightly(alphas, weights=None):
        """The share of rows that the network is shown as they were before some were mirrored; answers turn back."""
        inner = Seen()
        folded = Folded(inner, alphas, torch.zeros(0, 4, dtype=torch.long), weights=weights)
        assert torch.equal(folded(given, torch.zeros(len(given))), given)
        return float((inner.y == y).all(2).all(1).double().mean())

    wide, weights = hands.read_out(learnt, chosen)
    assert shown_rightly(wide, weights) > 0.85
    assert shown_rightly(wide, -weights) < 0.15
    near = torch.from_numpy(alphas(pairs))
    assert max(shown_rightly(near), shown_rightly(near[:, [0, 2, 1, 3]])) < 0.75
