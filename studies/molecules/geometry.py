"""Shapes of molecules `(rows, atoms, 3)`: torsions and distances by mdtraj, superposition, handedness."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

import mdtraj
import numpy as np
from mdtraj.geometry.dihedral import indices_phi, indices_psi

if TYPE_CHECKING:
    from studies.molecules.peptides import Peptide

__all__ = [
    "aligned",
    "alphas",
    "anchors",
    "backbone",
    "bonds",
    "dihedrals",
    "distances",
    "fragments",
    "handedness",
    "methyls",
    "relabelled",
    "same_hand",
    "stereocentres",
    "wide_centres",
    "windows",
]


def backbone(peptide: Peptide) -> dict[str, np.ndarray]:
    """The torsions `phi`, `psi` (one per residue) and `omega` (one per peptide bond), as quadruples of atoms."""
    topology = mdtraj.Topology.from_openmm(peptide.topology)
    # mdtraj has no omega at the caps, whose methyl carbons are not called CA.
    atoms = [{a.name: a.index for a in residue.atoms} for residue in topology.residues]
    alpha = [a["CA"] if "CA" in a else a["CH3"] if "CH3" in a else a["C"] for a in atoms]
    omega = [(alpha[r], atoms[r]["C"], atoms[r + 1]["N"], alpha[r + 1]) for r in range(len(atoms) - 1)]
    return {"phi": indices_phi(topology), "psi": indices_psi(topology), "omega": np.array(omega)}


def dihedrals(x: np.ndarray, quadruples: np.ndarray) -> np.ndarray:
    """Torsion angles in radians, (rows, quadruples), in (-pi, pi]."""
    return mdtraj.compute_dihedrals(mdtraj.Trajectory(x, None), quadruples, periodic=False)


def distances(x: np.ndarray, pairs: np.ndarray | None = None) -> np.ndarray:
    """Interatomic distances, (rows, pairs); of all pairs if none are given."""
    if pairs is None:
        pairs = np.array(list(combinations(range(x.shape[1]), 2)))
    return mdtraj.compute_distances(mdtraj.Trajectory(x, None), pairs, periodic=False)


def aligned(x: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Each row centred and turned (never mirrored) onto the reference with the least squared distance (Kabsch).

    mdtraj's `superpose` works in float32 and is off by up to 0.002 nm on the shipped frames.
    """
    x = np.asarray(x, dtype=np.float64)
    x, reference = x - x.mean(1, keepdims=True), reference - reference.mean(0)
    u, _, v = np.linalg.svd(np.einsum("rai,aj->rij", x, reference))
    flip = np.ones((len(x), 3))
    flip[:, 2] = np.sign(np.linalg.det(u @ v))
    return x @ (u * flip[:, None]) @ v


def bonds(peptide: Peptide) -> np.ndarray:
    """Pairs of bonded atoms, (bonds, 2)."""
    return np.array([(a.index, b.index) for a, b in peptide.topology.bonds()])


def stereocentres(pairs: np.ndarray) -> np.ndarray:
    """Atoms with four neighbours and three of them in order, (centres, 4): alpha carbons and methyl groups."""
    return np.array([(atom, *near[:3]) for atom, near in _neighbours(pairs).items() if len(near) == 4])


def methyls(pairs: np.ndarray) -> np.ndarray:
    """Carbons of methyl groups with their hydrogens (the neighbours that have no other), (groups, 4)."""
    around = _neighbours(pairs)
    ends = {atom: [n for n in near if len(around[n]) == 1] for atom, near in around.items() if len(near) == 4}
    return np.array([(atom, *leaves) for atom, leaves in ends.items() if len(leaves) == 3])


def alphas(pairs: np.ndarray) -> np.ndarray:
    """The other stereocentres: alpha carbons with three of their neighbours, (residues, 4)."""
    carbons = methyls(pairs)[:, 0]
    return np.array([centre for centre in stereocentres(pairs) if centre[0] not in carbons])


def anchors(pairs: np.ndarray) -> np.ndarray:
    """For each methyl group an atom two bonds from its carbon, which is the same for all of its turns, (groups,)."""
    around, out = _neighbours(pairs), []
    for carbon, *hydrogens in methyls(pairs).tolist():
        (joint,) = (n for n in around[carbon] if n not in hydrogens)
        out.append(next(n for n in around[joint] if n != carbon))
    return np.array(out)


def fragments(pairs: np.ndarray) -> list[np.ndarray]:
    """Methyl groups with all atoms up to three bonds from their carbon, one array (groups, atoms) for each kind.

    First the carbon and its hydrogens, then the atom that they hang on, its neighbours, and theirs.
    """
    around = _neighbours(pairs)
    kinds: dict[tuple[int, ...], list[list[int]]] = {}
    for group in methyls(pairs).tolist():
        (joint,) = (n for n in around[group[0]] if n not in group)
        near = [n for n in around[joint] if n != group[0]]
        atoms = [*group, joint, *near, *(n for atom in near for n in around[atom] if n != joint)]
        kinds.setdefault(tuple(len(around[atom]) for atom in atoms), []).append(atoms)
    return [np.array(groups) for groups in kinds.values()]


def wide_centres(pairs: np.ndarray) -> np.ndarray:
    """Alpha carbons with three atoms in three directions, each one or two bonds away, (centres, 4).

    Under noise, the volume of a centre and its neighbours shows the hand of a residue long after that of larger
    tetrahedra has: these are as long again, and there are many of them.
    """
    around, out = _neighbours(pairs), []
    for centre in alphas(pairs)[:, 0].tolist():
        groups = [[near, *(n for n in around[near] if n != centre)] for near in around[centre]]
        for three in combinations(groups, 3):
            out += [(centre, *atoms) for atoms in product(*three)]
    return np.array(out)


def windows(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Residues, (residues, atoms): alpha carbons with all atoms up to three bonds away; and the volumes of each.

    These are both torsions of a residue with the peptide planes that they turn. Volumes (centres, 4) count within a
    window: its stereocentres, `wide_centres`, and those of two bonds in a row and a third, whose sign is that of phi or
    psi.
    """
    around, out = _neighbours(pairs), []
    for centre in alphas(pairs)[:, 0].tolist():
        atoms = [centre]
        for _ in range(3):
            atoms += [n for atom in atoms for n in around[atom] if n not in atoms]
        out.append(atoms)
    first, centre = out[0], out[0][0]
    rows = np.concatenate([stereocentres(pairs), wide_centres(pairs)]).tolist()
    rows += [
        (centre, near, beyond, other)
        for near in around[centre]
        for beyond in around[near]
        for other in around[centre]
        if beyond != centre and other != near
    ]
    inside = [[first.index(atom) for atom in row] for row in rows if {*row} <= {*first}]
    return np.array(out), np.array(inside)


def _neighbours(pairs: np.ndarray) -> dict[int, list[int]]:
    around: dict[int, list[int]] = {}
    for a, b in pairs.tolist():
        around.setdefault(a, []).append(b)
        around.setdefault(b, []).append(a)
    return {atom: sorted(near) for atom, near in sorted(around.items())}


def handedness(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The sign of the volume that three neighbours span with their centre, (rows, centres)."""
    at = np.asarray(x, dtype=np.float64)[:, centres]
    a, b, c = np.moveaxis(at[:, :, 1:] - at[:, :, :1], 2, 0)
    return np.sign((np.cross(a, b) * c).sum(-1))


def relabelled(x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The same molecules with the hydrogens of every methyl group named in the same sense of rotation.

    Hydrogens are placed at random when a peptide is built, so starts differ in it. The energy is the same, a distance
    between molecules is not.
    """
    x = x.copy()
    for k, (_, _, b, c) in enumerate(groups):
        rows = np.flatnonzero(handedness(x, groups[k : k + 1])[:, 0] < 0)
        x[np.ix_(rows, [b, c])] = x[np.ix_(rows, [c, b])]
    return x


def same_hand(x: np.ndarray, pairs: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mirror images turned into the hand of the reference, which rows are neither hand, and which were turned.

    A network that is given distances only draws both hands equally often. Both have the same energy, so mirroring is
    exact; a molecule with alpha carbons of both hands is an error of the model, and is counted. It is turned as well
    if most of them are of the other hand.
    """
    groups, alpha = methyls(pairs), alphas(pairs)
    same = handedness(x, alpha) == handedness(reference[None], alpha)
    turned = same.mean(1) < 0.5
    x = np.where(turned[:, None, None], x * np.array([1.0, 1.0, -1.0], dtype=x.dtype), x)
    return relabelled(x, groups), same.any(1) & ~same.all(1), turned
