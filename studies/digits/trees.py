"""Laws of binary pictures whose posteriors are exact: trees (Chow and Liu 1968), and mixtures of them.

    p(x) = prod_i p(x_i | x_parent(i)),      p(x_0^i = v | x_t) by two passes through the tree, under any mask or noise

A tree has the marginals of all pixels and the joint laws of all pairs that it joins; of all trees, the one with the
largest sum of mutual informations is the likeliest. Several trees over the same pixels are one `Forest`: both passes go
through all of them at once, depth by depth, for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["Forest", "chow_liu"]

TINY = 1e-300


def chow_liu(x: Tensor, noise: float = 0.002) -> tuple[Tensor, Tensor]:
    """Parents (pixels,), -1 for the root, and `P(x_i = 1 | parent = 0 or 1)` (pixels, 2), of the likeliest tree.

    `x` is (pictures, pixels) of 0 and 1. The tree is that of pictures in which every pixel is a coin with probability
    `noise`, so that nothing is impossible, and what never occurs is as rare in one tree as in another. The root is in
    the middle of the longest path, which makes passes short.

    >>> generator = torch.Generator().manual_seed(0)
    >>> a = torch.randint(2, (1000, 1), generator=generator)
    >>> b = a ^ (torch.rand(1000, 1, generator=generator) < 0.1)
    >>> parents, tables = chow_liu(torch.cat([a, b, b ^ (torch.rand(1000, 1, generator=generator) < 0.1)], 1))
    >>> parents.tolist(), (tables[0] > 0.5).tolist()
    ([1, -1, 1], [False, True])
    """
    from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree

    ones = x.to(torch.float64)
    n, kept, coin = x.shape[1], 1 - noise, noise / 2
    seen = ones.mean(0)
    both = kept**2 * (ones.T @ ones) / len(x) + kept * coin * (seen[:, None] + seen[None]) + coin**2
    single = kept * seen + coin
    joint = torch.stack(
        [
            torch.stack([1 - single[:, None] - single[None] + both, single[None] - both]),
            torch.stack([single[:, None] - both, both]),
        ]
    )  # [value of i, value of j, i, j]
    alone = torch.stack([1 - single, single])
    ratio = joint.clamp(min=TINY) / (alone[:, None, :, None] * alone[None, :, None, :])
    information = (joint.clamp(min=0) * ratio.log()).sum((0, 1)).fill_diagonal_(0)
    edges = minimum_spanning_tree((1 + information.max() - information).numpy())
    edges = edges + edges.T

    def from_root(root: int) -> tuple[list[int], np.ndarray]:
        order, parents = breadth_first_order(edges, root, directed=False)
        return order.tolist(), parents

    far, _ = from_root(0)
    order, parents = from_root(far[-1])
    path = [order[-1]]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    _, parents = from_root(path[len(path) // 2])
    parent = torch.from_numpy(np.where(parents < 0, -1, parents)).long()
    at = parent.clamp(min=0)
    i = torch.arange(n)
    tables = torch.stack([joint[1, v, i, at] / alone[v, at] for v in (0, 1)], 1)
    return parent, torch.where((parent < 0)[:, None], single[:, None], tables)


class Forest:
    """Trees over the same pixels: `parents` (trees, pixels), -1 for roots, and `tables` (trees, pixels, 2).

    `tables[k, i, v]` is `P(x_i = 1 | parent = v)` in tree k; for a root both entries are equal.
    """

    def __init__(self, parents: Tensor, tables: Tensor):
        self.parents, self.tables = parents.long(), tables.to(torch.float64)
        self.n_trees, self.n_pixels = self.parents.shape
        first = torch.arange(self.n_trees)[:, None] * self.n_pixels
        parent = torch.where(self.parents < 0, -1, self.parents + first).flatten()
        depth, above = torch.zeros_like(parent), parent
        while (above >= 0).any():
            depth = depth + (above >= 0)
            above = torch.where(above >= 0, parent[above.clamp(min=0)], -1)
        # Nodes are kept by depth, those of one depth by rank among siblings: a depth is a slice, and so are its first
        # children. Messages of siblings are multiplied by halves, since some pixels have hundreds of children.
        rank = _rank(parent)
        order = (depth * (rank.max() + 1) + rank).argsort(stable=True)
        place = order.argsort()
        self._place, self._pixel, self._tree = place, order % self.n_pixels, order // self.n_pixels
        one = self.tables.reshape(-1, 2)[order].T
        self._given = torch.stack([1 - one, one])[..., None]  # P(value | parent): [value, parent, node, row]
        self._depths = []
        for d in range(1, int(depth.max()) + 1):
            nodes = order[depth[order] == d]
            start = int((depth < d).sum())
            parents, ranks = place[parent[nodes]], rank[nodes]
            self._depths.append((start, start + len(nodes), parents, int((ranks == 0).sum()), _halves(parents, ranks)))

    def __getitem__(self, trees: Sequence[int]) -> Forest:
        return Forest(self.parents[list(trees)], self.tables[list(trees)])

    def posterior(self, likelihood: Tensor) -> tuple[Tensor, Tensor]:
        """`P(x_i = v | evidence)` (trees, rows, pixels, 2) and `log P(evidence)` (trees, rows), both exact.

        `likelihood` (rows, pixels, 2) is the probability of what was seen of a pixel if its value is v: (1, 0) or
        (0, 1) where the value is known, (1, 1) where nothing is.
        """
        # belief[v, node, row]: probability of all evidence at and below a node if it has value v, up to its scale
        belief = likelihood.to(torch.float64).permute(2, 1, 0).index_select(1, self._pixel)
        message, scale = torch.empty_like(belief), torch.empty_like(belief[0])
        given = self._given
        for a, b, parent, n_first, halves in reversed(self._depths):
            here = belief[:, a:b]
            torch.add(here[0], here[1], out=scale[a:b])
            here /= scale[a:b].clamp(min=TINY)
            up = message[:, a:b]
            torch.mul(given[0, :, a:b], here[0], out=up).addcmul_(given[1, :, a:b], here[1])
            product = up.clone() if halves else up
            for to, other in halves:
                product.index_copy_(1, to, product.index_select(1, to).mul_(product.index_select(1, other)))
            above = parent[:n_first]
            belief.index_copy_(1, above, belief.index_select(1, above).mul_(product[:, :n_first]))
        k = self.n_trees  # the roots come first, in the order of the trees
        roots = belief[:, :k] * given[:, 0, :k]
        torch.add(roots[0], roots[1], out=scale[:k])
        log_evidence = torch.zeros(k, len(likelihood), dtype=torch.float64).index_add_(0, self._tree, scale.log())
        belief[:, :k] = roots / scale[:k].clamp(min=TINY)
        for a, b, parent, _, _ in self._depths:  # what was belief becomes the marginal law, from the roots down
            share = belief.index_select(1, parent).div_(message[:, a:b].clamp_(min=TINY))
            belief[:, a:b] *= (given[:, 0, a:b] * share[0]).addcmul_(given[:, 1, a:b], share[1])
        marginal = belief.index_select(1, self._place).reshape(2, k, self.n_pixels, -1)
        return marginal.permute(1, 3, 2, 0), log_evidence

    def log_prob(self, x: Tensor) -> Tensor:
        """`log p(x)` in every tree, (trees, rows), of pictures (rows, pixels)."""
        out = []
        for parent, table in zip(self.parents, self.tables, strict=True):
            one = table.gather(1, x[:, parent.clamp(min=0)].T).T
            out.append(torch.where(x == 1, one, 1 - one).log().sum(1))
        return torch.stack(out)

    def sample(self, n: int, tree: int, generator: torch.Generator) -> Tensor:
        """Pictures (n, pixels) from one tree: parents before their children."""
        parents, table = self.parents[tree], self.tables[tree]
        u = torch.rand(self.n_pixels, n, generator=generator, dtype=torch.float64)
        x = (u < table[:, :1]).long()  # right for the root; all others are overwritten
        for a, b, *_ in self._depths:
            i = self._pixel[a:b][self._tree[a:b] == tree]
            x[i] = (u[i] < table[i].gather(1, x[parents[i]])).long()
        return x.T.contiguous()


def _rank(parent: Tensor) -> Tensor:
    """How many siblings of each node come before it."""
    order = parent.argsort(stable=True)
    values = parent[order]
    since = torch.searchsorted(values, values)
    rank = torch.empty_like(parent)
    rank[order] = torch.arange(len(parent)) - since
    return torch.where(parent < 0, 0, rank)


def _halves(parent: Tensor, rank: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of siblings (to, other) whose products, step by step, leave the product of all in those of rank 0.

    >>> [(to.tolist(), other.tolist()) for to, other in _halves(torch.tensor([5, 7, 5, 5]), torch.tensor([0, 0, 1, 2]))]
    [([0], [3]), ([0], [2])]
    """
    n = int(rank.max()) + 1
    at = parent * n + rank
    order = at.argsort()
    steps = []
    while n > 1:
        half = (n + 1) // 2
        other = ((rank >= half) & (rank < n)).nonzero()[:, 0]
        steps.append((order[torch.searchsorted(at[order], at[other] - half)], other))
        n = half
    return steps
