"""Denoisers of molecules that do not care how the molecule is turned or moved.

    F = sum_ij w_ij grad d_ij + sum_c w_c grad V_c,      w(d, V, sigma)

`d_ij` are the distances of atoms, `V_c = (a x b) . c` the signed volumes that three neighbours span at a stereocentre.
The score of a law that is invariant under rigid motions has this form, for its log-density is a function of such
invariants. `PairForces` lets one network give all `w` from all invariants, which is cheap because the atoms of one
molecule have names and need no permutation symmetry. Distances do not distinguish mirror images; volumes do, where
they are given. `Fragments` adds networks of parts of the molecule, `Folded` shows a network one hand only, and `Split`
is two networks, one below and one above a noise level. `EGNN` is the graph network of the paper (Satorras et al. 2021,
Hoogeboom et al. 2022), which is given distances only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

__all__ = ["BOND", "EGNN", "LIMIT", "Folded", "Fragments", "PairForces", "Split", "volumes"]

BOND = 0.12  # nm
LIMIT = 10.0
"""Answers have a root mean square of about 1. Where two atoms meet, as they never do in data, they may be anything.

Beyond the limit an answer counts the less the larger it is, so that the best linear denoiser is left. At the limit
itself, answers that point outwards would carry a molecule away, and its density would grow on the way. In training
they stay at the limit: a network that can make an answer vanish by making it large learns to.
"""


class NoiseWaves(nn.Module):
    """The noise level `log(sigma) / 4` as sines and cosines."""

    waves: Tensor

    def __init__(self, n: int = 16):
        super().__init__()
        self.register_buffer("waves", torch.linspace(0.4, 12.0, n), persistent=False)
        self.width = 2 * n

    def forward(self, c_noise: Tensor) -> Tensor:
        phase = c_noise[:, None] * self.waves
        return torch.cat([phase.sin(), phase.cos()], 1)


class PairForces(nn.Module):
    """`n_layers` of `width` units from invariants to the strengths of the forces along them, and a linear path beside.

    A bond is a hundred times stiffer than a torsion, so each distance is measured in its own standard deviation, that
    of the data and of the noise together: `(d - sqrt(mean^2 + 16/pi sigma^2)) / sqrt(std^2 + 2 sigma^2)`. The mean
    distance of two points that are nothing but noise is `4 sigma / sqrt(pi)`, that of their squares `6 sigma^2`.
    Squares come in too, and forces along `grad d^2` go out: under much noise the best denoiser is nearly a polynomial
    in the coordinates, which their products show better than lengths. Under little noise a square is as good as linear
    in its length: without `squares` a step costs little more than half. Volumes only have to show their sign; their
    scale is that of bonds, `BOND`, and of the noise. Without `centres` the network is blind to mirroring. Of a large
    molecule the linear path wants a `rank`: pairs grow with the square of the atoms, and a full matrix with the fourth.
    """

    pairs: Tensor
    centres: Tensor
    mean: Tensor
    std: Tensor
    ends: Tensor
    spans: Tensor
    coarse = False
    """Whether dense layers multiply in bfloat16 while they are trained; distances and forces never do."""

    def __init__(
        self, n_atoms: int, sigma_data: float, n_layers: int = 5, width: int = 512, centres: Tensor | None = None,
        rank: int | None = None, squares: bool = True,
    ):  # fmt: skip
        super().__init__()
        pairs = torch.tensor(list(combinations(range(n_atoms), 2)))
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("centres", torch.zeros(0, 4, dtype=torch.long) if centres is None else centres.clone())
        # What joins two atoms is a product with a matrix of +1 and -1. On a CPU, gathering atoms and adding up forces
        # by their indices takes longer.
        self.register_buffer("ends", _differences(pairs, n_atoms), persistent=False)
        self.register_buffer("spans", _spans(self.centres, n_atoms), persistent=False)
        self.register_buffer("mean", torch.ones(len(pairs)))
        self.register_buffer("std", torch.ones(len(pairs)))
        self.sigma_data, self.squares = sigma_data, squares
        self.noise = NoiseWaves()
        n_invariants = (2 if squares else 1) * len(pairs) + len(self.centres)
        self.first = nn.Linear(n_invariants, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(n_layers - 1))
        self.shifts = nn.Linear(self.noise.width, 2 * width * n_layers)
        self.last = nn.Linear(width, n_invariants)
        inner = [] if rank is None else [nn.Linear(n_invariants, rank, bias=False)]
        outer = nn.Linear(n_invariants if rank is None else rank, n_invariants, bias=False)
        self.linear = nn.Sequential(*inner, outer) if inner else outer
        self.gains = nn.Linear(self.noise.width, 2 * n_invariants)
        nn.init.zeros_(outer.weight)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def fit(self, x: Tensor) -> None:
        """Take the scales of the distances from data (rows, atoms, 3), a piece at a time: pairs outnumber atoms."""

        def total(of: Callable[[Tensor], Tensor]) -> Tensor:
            pieces = ((y[:, self.pairs[:, 0]] - y[:, self.pairs[:, 1]]).norm(dim=-1) for y in x.split(4096))
            return sum((of(d.double()).sum(0) for d in pieces), torch.zeros(len(self.pairs), dtype=torch.float64))

        mean = total(lambda d: d) / len(x)
        self.mean.copy_(mean)
        self.std.copy_((total(lambda d: (d - mean) ** 2) / (len(x) - 1)).sqrt())

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        sigma = (4 * c_noise).exp()[:, None]
        y = (y * (sigma**2 + self.sigma_data**2).sqrt()[:, :, None]).transpose(1, 2).contiguous()  # (rows, 3, atoms)
        gap, edges = y @ self.ends, y @ self.spans
        d = gap.square().sum(1).clamp(min=1e-14).sqrt()
        scaled = (d - (self.mean**2 + 16 / math.pi * sigma**2).sqrt()) / (self.std**2 + 2 * sigma**2).sqrt()
        a, b, c = edges.chunk(3, 2)
        bond = (BOND**2 + 4 * sigma**2).sqrt()
        by_edge = [torch.linalg.cross(*two, dim=1) for two in ((b, c), (c, a), (a, b))]
        volume = (by_edge[2] * c).sum(1) / bond**3
        spread = (self.mean**2 + 6 * sigma**2).sqrt()
        shown = [scaled]
        if self.squares:
            shown += [(d**2 - self.mean**2 - 6 * sigma**2) / (spread * (4 * self.std**2 + 4 * sigma**2).sqrt())]
        sizes = [len(self.pairs)] * len(shown) + [len(self.centres)]
        along, *by_square, around = self._weights(torch.cat([*shown, 2 * volume], 1), c_noise).split(sizes, 1)
        along = along / d + sum(w / spread for w in by_square)
        around = (around / bond**2)[:, None]
        push = torch.cat([by * around for by in by_edge], 2)
        return ((gap * along[:, None]) @ self.ends.T + push @ self.spans.T).transpose(1, 2)

    def _weights(self, invariants: Tensor, c_noise: Tensor) -> Tensor:
        with torch.autocast(invariants.device.type, torch.bfloat16, enabled=self.coarse and self.training):
            return self._dense(invariants, c_noise).to(invariants.dtype)

    def _dense(self, invariants: Tensor, c_noise: Tensor) -> Tensor:
        waves = self.noise(c_noise)
        gain, weight = self.gains(waves).chunk(2, 1)
        straight = (1 + weight) * self.linear((1 + gain) * invariants)
        shifts = self.shifts(waves).reshape(len(c_noise), 2, -1, self.first.out_features)
        scale, shift = shifts.unbind(1)
        h = silu(self.first(invariants) * (1 + scale[:, 0]) + shift[:, 0])
        for k, layer in enumerate(self.hidden, 1):
            h = h + silu(layer(h) * (1 + scale[:, k]) + shift[:, k])
        return self.last(h) + straight


def _differences(pairs: Tensor, n_atoms: int) -> Tensor:
    """The matrix (atoms, pairs) that takes the coordinates of atoms to the first less the second of each pair."""
    one = torch.eye(n_atoms)
    return (one[pairs[:, 0]] - one[pairs[:, 1]]).T.contiguous()


def _spans(centres: Tensor, n_atoms: int) -> Tensor:
    """The matrix that takes coordinates to the first, second and third neighbours of all centres, less the centre."""
    return _differences(torch.cat([centres[:, [k, 0]] for k in (1, 2, 3)]), n_atoms)


class Fragments(nn.Module):
    """A network of the whole molecule, and small ones of its fragments that are added to it.

    Where the hydrogens of a methyl group are depends on the atoms around it, and it is the same question in every
    residue. `parts` are networks of so many atoms, and `atoms` (groups, atoms), one for each of them, says where their
    fragments are: fragments of one kind share a network, which sees all of them in every molecule.
    """

    def __init__(self, whole: PairForces, parts: Sequence[PairForces], atoms: Sequence[Tensor]):
        super().__init__()
        self.whole, self.parts = whole, nn.ModuleList(parts)
        for k, of in enumerate(atoms):
            self.register_buffer(f"atoms_{k}", of, persistent=False)

    def fit(self, x: Tensor) -> None:
        """Take the scales of all distances from data (rows, atoms, 3)."""
        self.whole.fit(x)
        for k, part in enumerate(self.parts):
            part.fit(x[:, self.places(k)].flatten(0, 1))  # type: ignore[operator]

    def places(self, k: int) -> Tensor:
        """The atoms of the fragments of part k, (groups, atoms)."""
        return getattr(self, f"atoms_{k}")

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        out = self.whole(y, c_noise)
        for k, part in enumerate(self.parts):
            at = self.places(k)
            forces = part(y[:, at].flatten(0, 1), c_noise.repeat_interleave(len(at)))
            out = out.index_add(1, at.flatten(), forces.reshape(len(y), -1, 3))
        return out


class Folded(nn.Module):
    """A network that is shown one hand and one naming only: what it draws has both, and is right in both.

    The noise decides which hand a sample will have long before a network could distinguish them, so a network that was
    trained on one hand draws both, and the other one badly. Here every molecule is mirrored until the volumes at its
    `alphas` sum to more than zero, and the hydrogens of `methyls` are renamed until theirs are positive; the answer is
    turned back. On data of one hand this learns the law in which all mirror images and names are equally likely.

    Where the sum shows the hand wrongly, the network has to know the mirror image too. With `weights`, one for each of
    the `alphas`, many tetrahedra read it together under three times the noise (`hands.read_out`).

    A methyl group that turns by a third is the same molecule with other names. With `anchors`, an atom for each group,
    the hydrogen farthest from it comes first, and a network has to learn one of three turns of each group.
    """

    alphas: Tensor
    methyls: Tensor
    anchors: Tensor | None
    weights: Tensor | None

    def __init__(
        self, inner: nn.Module, alphas: Tensor, methyls: Tensor, anchors: Tensor | None = None,
        weights: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        self.inner = inner
        self.register_buffer("alphas", alphas, persistent=False)
        self.register_buffer("methyls", methyls, persistent=False)
        self.register_buffer("anchors", anchors, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        shown = volumes(y, self.alphas)
        shown = shown.sum(1) if self.weights is None else shown @ self.weights
        hand = torch.where(shown < 0, -1.0, 1.0).to(y)
        mirror = torch.stack([torch.ones_like(hand), torch.ones_like(hand), hand], 1)[:, None]
        y = y * mirror
        order = self._names(y)[:, :, None].expand_as(y)
        answer = self.inner(y.gather(1, order), c_noise)
        share = LIMIT**2 / answer.square().mean((1, 2), keepdim=True).clamp(min=LIMIT**2)
        answer = answer * (share.sqrt() if self.training else share)
        return torch.empty_like(answer).scatter_(1, order, answer) * mirror

    def _names(self, y: Tensor) -> Tensor:
        """Which atom of y takes each place, (rows, atoms)."""
        a, b, c = (names.expand(len(y), -1) for names in self.methyls[:, 1:].T)
        wrong = volumes(y, self.methyls) < 0
        three = torch.stack([a, torch.where(wrong, c, b), torch.where(wrong, b, c)], 2)
        if self.anchors is not None:
            at = y.gather(1, three.flatten(1)[:, :, None].expand(-1, -1, 3)).unflatten(1, three.shape[1:])
            first = (at - y[:, self.anchors, None]).square().sum(-1).argmax(2, keepdim=True)
            three = three.gather(2, (first + torch.arange(3, device=y.device)) % 3)
        names = torch.arange(y.shape[1], device=y.device).repeat(len(y), 1)
        names[:, self.methyls[:, 1:].flatten()] = three.flatten(1)
        return names


def volumes(y: Tensor, centres: Tensor) -> Tensor:
    """What three neighbours of each centre (centre and neighbours, as (centres, 4)) span, (rows, centres)."""
    spans = _spans(centres, y.shape[1]).to(y)
    a, b, c = (y.transpose(1, 2).contiguous() @ spans).chunk(3, 2)
    return (torch.linalg.cross(a, b, dim=1) * c).sum(1)


class Split(nn.Module):
    """`low` where sigma is below the split, `high` where it is not; each row is evaluated by one of them."""

    def __init__(self, low: nn.Module, high: nn.Module, split: float):
        super().__init__()
        self.low, self.high, self.split = low, high, split

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        below = 4 * c_noise < math.log(self.split)
        out = torch.empty_like(y)
        for rows, network in ((below, self.low), (~below, self.high)):
            if rows.any():
                out[rows] = network(y[rows], c_noise[rows])
        return out


class EGNN(nn.Module):
    """All atoms talk to all: messages from invariant features, moves along the lines between atoms.

    The first layer of each message network is split into a part per end and a part of their distance, so that it
    costs a product for each atom and not for each pair.
    """

    def __init__(self, n_atoms: int, n_layers: int = 4, width: int = 64):
        super().__init__()
        self.noise = NoiseWaves()
        self.names = nn.Parameter(torch.randn(n_atoms, width))
        self.embed = nn.Linear(self.noise.width, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(n_layers))

    def forward(self, y: Tensor, c_noise: Tensor) -> Tensor:
        y = y - y.mean(1, keepdim=True)
        h = self.names + self.embed(self.noise(c_noise))[:, None]
        x, first = y, _squares(y)
        for layer in self.layers:
            h, x = layer(h, x, first)
        moved = x - y
        return moved - moved.mean(1, keepdim=True)


class _Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ends = nn.Linear(width, 2 * width)
        self.lengths = nn.Linear(2, width, bias=False)
        self.message = nn.Linear(width, width)
        self.gate = nn.Linear(width, 1)
        last = nn.Linear(width, 1, bias=False)
        nn.init.xavier_uniform_(last.weight, gain=1e-3)
        self.pull = nn.Sequential(nn.Linear(width, width), nn.SiLU(), last)
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        gap = x[:, :, None] - x[:, None]
        square = gap.square().sum(-1, keepdim=True)
        sent, heard = self.ends(h).chunk(2, -1)
        m = silu(sent[:, :, None] + heard[:, None] + self.lengths(torch.cat([square, first], -1)))
        m = silu(self.message(m))
        x = x + (gap / ((square + 1e-8).sqrt() + 1) * self.pull(m)).sum(2)
        m = (m * self.gate(m).sigmoid()).sum(2)
        return h + self.node(torch.cat([h, m / h.shape[1]], -1)), x


def _squares(y: Tensor) -> Tensor:
    return (y[:, :, None] - y[:, None]).square().sum(-1, keepdim=True)
