"""Peptides and their dynamics: structures, files that survive a kill, exchanges, the test of convergence."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import permutations

import mdtraj
import numpy as np
import pytest
from openmm import app

from crepe_diffusion import InputError
from studies.molecules import __main__ as shell
from studies.molecules import convergence, data, dynamics, geometry, trajectory
from studies.molecules.peptides import GAS_CONSTANT, PEPTIDES, energies, peptide

TWO = (300.0, 800.0)


@pytest.fixture(scope="module")
def helix():
    return peptide("tetrapeptide").build(-60.0, -40.0)[1]


def mirror(x):
    return x * np.array([1.0, 1.0, -1.0])


# -- structures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "n_atoms"), [("dipeptide", 22), ("tetrapeptide", 42), ("hexapeptide", 62)])
def test_a_peptide_is_built_at_the_torsions_asked_for(name, n_atoms):
    chosen = peptide(name)
    assert len(chosen.atoms) == n_atoms
    _, x = chosen.build(-75.0, 130.0)
    quadruples = geometry.backbone(chosen)
    angles = {k: np.degrees(geometry.dihedrals(x[None], v))[0] for k, v in quadruples.items()}
    assert np.allclose(angles["phi"], -75.0, atol=0.2)
    assert np.allclose(angles["psi"], 130.0, atol=0.2)
    assert (np.abs(angles["omega"]) > 175).all()


def test_torsions_agree_with_mdtraj(helix):
    chosen = peptide("tetrapeptide")
    rng = np.random.default_rng(0)
    x = helix + 0.02 * rng.standard_normal((20, *helix.shape))
    known = mdtraj.Trajectory(x, mdtraj.Topology.from_openmm(chosen.topology))
    quadruples = geometry.backbone(chosen)
    for name, theirs in (("phi", mdtraj.compute_phi), ("psi", mdtraj.compute_psi)):
        gap = geometry.dihedrals(x, quadruples[name]) - theirs(known)[1]
        assert np.abs(np.angle(np.exp(1j * gap))).max() < 1e-4


def test_mirror_images_are_turned_back_and_mixed_hands_are_named(helix):
    """A methyl group whose hydrogens were renamed is the same molecule; an alpha carbon of the other hand is not."""
    chosen = peptide("tetrapeptide")
    pairs = geometry.bonds(chosen)
    groups = geometry.methyls(pairs)
    assert len(geometry.stereocentres(pairs)) == 3 + 5  # alpha carbons; methyls of three side chains and two caps
    assert len(groups) == 5
    helix = geometry.relabelled(helix[None], groups)[0]
    renamed, mixed = helix.copy(), helix.copy()
    renamed[groups[1, [2, 3]]] = helix[groups[1, [3, 2]]]
    swapped = [chosen.atoms.index("ALA1:HA"), chosen.atoms.index("ALA1:CB")]
    mixed[swapped] = helix[swapped[::-1]]
    before = np.stack([helix, mirror(helix), renamed, mixed])
    back, is_mixed, is_turned = geometry.same_hand(before, pairs, helix)
    assert is_mixed.tolist() == [False, False, False, True]
    assert is_turned.tolist() == [False, True, False, False]
    _, both, turned = geometry.same_hand(mirror(mixed)[None], pairs, helix)
    assert (both.item(), turned.item()) == (True, True)  # two of three alpha carbons are of the other hand
    assert np.allclose(back[0], helix)
    assert np.allclose(back[2], helix)
    assert (geometry.handedness(back, groups) > 0).all()
    values = energies(chosen, np.concatenate([before, back]))
    assert np.allclose(values[:3], values[0], atol=1e-6)
    assert np.allclose(values[4:7], values[0], atol=1e-6)
    assert abs(values[3] - values[0]) > 1.0


def test_energy_does_not_tell_mirror_images_apart(helix):
    values = energies(peptide("tetrapeptide"), np.stack([helix, mirror(helix), helix @ _turn(1), 1.01 * helix]))
    assert np.abs(values[1:3] - values[0]).max() < 1e-6
    assert abs(values[3] - values[0]) > 1.0


def test_superposition_finds_the_rotation_and_never_mirrors(helix):
    turned = np.stack([(helix @ _turn(i)) + i for i in range(5)] + [mirror(helix)])
    off = np.sqrt(((geometry.aligned(turned, helix) - (helix - helix.mean(0))) ** 2).sum((1, 2)))
    assert off[:5].max() < 1e-6
    assert off[5] > 0.1


def test_wrong_shapes_are_refused(helix):
    with pytest.raises(InputError, match=r"rows, 22, 3.*\(1, 42, 3\)"):
        energies(peptide("dipeptide"), helix[None])
    with pytest.raises(InputError, match="dipeptide, tetrapeptide, hexapeptide, got 'tripeptide'"):
        peptide("tripeptide")


def _turn(seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.linalg.det(q)


# -- files ---------------------------------------------------------------------------------------------------


def test_a_torn_trajectory_is_cut_back_to_what_was_whole(tmp_path, helix):
    path = tmp_path / "x.dcd"
    rng = np.random.default_rng(0)
    frames = (helix + 0.01 * rng.standard_normal((7, *helix.shape))).astype(np.float32)
    trajectory.append(path, frames[:4], 1.0)
    trajectory.append(path, frames[4:], 1.0)
    topology = mdtraj.Topology.from_openmm(peptide("tetrapeptide").topology)
    assert np.allclose(mdtraj.load_dcd(str(path), top=topology).xyz, frames, atol=1e-6)
    with path.open("ab") as file:
        file.write(path.read_bytes()[-333:-1])  # a frame that a dying process did not finish
    trajectory.truncate(path, 5, len(helix))
    assert np.allclose(mdtraj.load_dcd(str(path), top=topology).xyz, frames[:5], atol=1e-6)
    with pytest.raises(InputError, match="at least 6 frames"):
        trajectory.truncate(path, 6, len(helix))


def blocks(folder, n, temperatures=TWO, index=0, engine="lanes"):
    walker = dynamics.Walker(folder, peptide("dipeptide"), temperatures, index, engine=engine)
    for state in walker.run(walker.open()):
        if state.n_blocks >= n:
            return walker, state


@pytest.mark.parametrize("engine", list(dynamics.ENGINES))
def test_a_killed_walker_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(dynamics, "BLOCK", 2)
    whole, _ = blocks(tmp_path / "whole", 4, engine=engine)
    part, _ = blocks(tmp_path / "part", 2, engine=engine)
    for path in part.files[:1]:  # killed while it wrote block 3: one rung has its frames, the other not
        trajectory.append(path, np.ones((2, 22, 3), dtype=np.float32), 1.0)
    (tmp_path / "part" / ".partial-checkpoint.npz").write_bytes(b"torn")
    part, _ = blocks(tmp_path / "part", 4, engine=engine)
    for a, b in zip(whole.files, part.files, strict=True):
        assert trajectory.n_frames(a, 22) == 8
        assert a.read_bytes() == b.read_bytes()
    other, _ = blocks(tmp_path / "other", 1, index=1, engine=engine)
    assert other.files[0].read_bytes()[:600] != whole.files[0].read_bytes()[:600]  # another walker, another start
    with pytest.raises(InputError, match=r"0-300K.dcd, 1-800K.dcd, not \(500.0,\)"):
        dynamics.Walker(tmp_path / "part", peptide("dipeptide"), (500.0,), 0).open()
    with pytest.raises(InputError, match="lanes, openmm, got 'gromacs'"):
        blocks(tmp_path / "other", 1, engine="gromacs")


@pytest.mark.parametrize(("engine", "n_free"), [pytest.param("openmm", 51, marks=pytest.mark.slow), ("lanes", 54)])
def test_rungs_have_their_temperatures(tmp_path, monkeypatch, engine, n_free):
    """Kinetic energy is k T / 2 for each of 66 coordinates less 12 constraints; OpenMM stops the centre of mass."""
    monkeypatch.setattr(dynamics, "BLOCK", 1)
    chosen = peptide("dipeptide")
    walker = dynamics.Walker(tmp_path, chosen, TWO, 0, engine=engine)
    mass = np.array([chosen.system.getParticleMass(i)._value for i in range(22)])
    seen = []
    for state in walker.run(walker.open()):
        if state.n_blocks > 10:
            kinetic = 0.5 * (mass[:, None] * state.velocities**2).sum((1, 2))
            seen.append(kinetic[np.argsort(state.rung)])
        if state.n_blocks == 60:
            break
    temperature = np.mean(seen, 0) / (0.5 * GAS_CONSTANT * n_free)
    # A kinetic energy of n freedoms has a relative spread of sqrt(2/n), and is forgotten at 2/ps.
    error = np.array(TWO) * np.sqrt(2 / n_free / 50) * 1.5
    assert (np.abs(temperature - TWO) < 4 * error).all()


def test_trajectories_are_read_in_whole_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamics, "BLOCK", 2)
    monkeypatch.setattr(data, "BLOCK", 2)
    blocks(tmp_path / "dipeptide" / "walker-0", 3)
    (read,) = data.read_trajectories(tmp_path, peptide("dipeptide"), 800.0, equilibration=2.0)
    assert read.shape == (4, 22, 3)
    assert np.abs(read.mean(1)).max() < 1e-6
    assert len(data.read_trajectories(tmp_path, peptide("dipeptide"), 800.0, 0.0, most=5.0)[0]) == 4
    assert len(data.read_trajectories(tmp_path, peptide("dipeptide"), 800.0, 0.0, walker=0)) == 1
    for walker, n in ((10, 1), (2, 4)):
        blocks(tmp_path / "dipeptide" / f"walker-{walker}", n, (300.0, 800.0, 800.0), walker)
    assert dynamics.walkers(tmp_path, peptide("dipeptide"), 800.0) == [0, 2, 10]
    assert dynamics.walkers(tmp_path, peptide("dipeptide"), 300.0) == [0, 2, 10]
    walkers = data.read_walkers(tmp_path, peptide("dipeptide"), 800.0, equilibration=2.0)
    assert [[len(t) for t in rungs] for rungs in walkers] == [[4], [6, 6]]  # the last one is not equilibrated
    assert (walkers[0][0] == read).all()
    with pytest.raises(InputError, match="no trajectories of the dipeptide at 800 K"):
        data.read_trajectories(tmp_path, peptide("dipeptide"), 800.0, 0.0, walker=1)
    with pytest.raises(InputError, match="no trajectories of the dipeptide at 490 K"):
        data.read_trajectories(tmp_path, peptide("dipeptide"), 490.0)
    for read_all in (data.read_trajectories, data.read_walkers):
        with pytest.raises(InputError, match="shorter than the 500 ps"):
            read_all(tmp_path, peptide("dipeptide"), 800.0)


# -- exchanges -----------------------------------------------------------------------------------------------

BETAS = np.array([1.0, 1.0, 0.6, 0.3])
ENERGY = np.array([1.0, -0.7, 2.5, 0.4])


def exchange_z(betas_used):
    """The largest z-score of the frequencies of the 24 orders of four replicas against their exact law."""
    orders = list(permutations(range(4)))
    weight = np.array([np.exp(-sum(BETAS[r] * u for r, u in zip(order, ENERGY, strict=True))) for order in orders])
    p, n = weight / weight.sum(), 4000
    rng, rung, counts = np.random.default_rng(0), np.arange(4), np.zeros(24)
    for _ in range(n):
        dynamics.exchange(ENERGY, rung, betas_used, rng)
        counts[orders.index(tuple(rung.tolist()))] += 1
    return np.abs((counts - n * p) / np.sqrt(n * p * (1 - p))).max()


def test_exchanges_leave_the_product_of_the_rungs_invariant():
    assert exchange_z(BETAS) < 4.5  # 24 nearly independent frequencies: one false alarm in 6,000 seeds
    assert exchange_z(-BETAS) > 10  # the sign the wrong way round
    assert exchange_z(0.5 * BETAS) > 6


def test_a_single_rung_exchanges_nothing():
    assert dynamics.exchange(ENERGY[:1], np.array([0]), BETAS[:1], np.random.default_rng(0)) == (0, 0)


# -- convergence ---------------------------------------------------------------------------------------------


def correlated(n, memory, p, rng):
    """A two-state chain that is in the first state with probability p and forgets in `memory` frames."""
    fresh = rng.random(n) < 1 / memory
    fresh[0] = True
    drawn = rng.random(n) < p
    return drawn[np.maximum.accumulate(np.where(fresh, np.arange(n), 0))].astype(float)[:, None]


def exchanging(n_rungs, n_blocks, p, rng, memory=100):
    """A walker (rungs, frames, 1) of two-state replicas, shuffled between the rungs at every block."""
    n = n_blocks * dynamics.BLOCK
    replicas = np.stack([correlated(n, memory, p, rng)[:, 0] for _ in range(n_rungs)])
    return shuffled(replicas[:, :, None], rng)


def shuffled(replicas, rng):
    """Files sorted by rung, (rungs, frames, ...), of replicas that change rungs at every block."""
    blocks = replicas.reshape(len(replicas), -1, dynamics.BLOCK, *replicas.shape[2:])
    order = rng.permuted(np.tile(np.arange(len(blocks))[:, None], (1, blocks.shape[1])), axis=0)
    return blocks[order, np.arange(blocks.shape[1])].reshape(replicas.shape)


def by_files(walkers):
    """The broken twin: batch means along all files, one after the other."""
    return convergence.pooled([np.concatenate([rung for w in walkers for rung in w])[None]])


def test_stated_errors_are_the_spread_of_the_mean_though_replicas_change_places():
    rng = np.random.default_rng(0)
    sizes = ((7, 500), (4, 250), (5, 250))
    runs = [[exchanging(*size, 0.3, rng) for size in sizes] for _ in range(120)]

    def stated_over_spread(pooled):
        means, variances = (np.array(v)[:, 0] for v in zip(*map(pooled, runs), strict=True))
        assert np.allclose(means, [np.concatenate([w.ravel() for w in walkers]).mean() for walkers in runs])
        return np.sqrt(variances.mean()) / means.std(ddof=1)

    # 120 runs know their spread to 6.5 %, and batches of ten and of five memories are short of it by some 7 %.
    assert 0.7 < stated_over_spread(convergence.pooled) < 1.3
    assert stated_over_spread(by_files) < 0.6


def test_halves_and_walkers_of_one_law_pass_and_a_drift_does_not():
    rng = np.random.default_rng(0)
    first, second = ([exchanging(4, 500, 0.3, rng) for _ in range(100)] for _ in range(2))
    pairs = list(zip(first, second, strict=True))
    z = np.array([convergence.compare([a], [b])[0] for a, b in pairs])
    # Student's t of 18 freedoms has 0.8 % beyond 3, and short batches make it about 1 %; six in a hundred is rare.
    assert (np.abs(z) > 3).mean() < 0.06
    twin = np.array([(by_files([a]), by_files([b])) for a, b in pairs])[..., 0]  # (pairs, two, mean or variance)
    z_twin = (twin[:, 0, 0] - twin[:, 1, 0]) / np.sqrt(twin[:, :, 1].sum(1))
    assert (np.abs(z_twin) > 3).mean() > 0.06
    drift = [exchanging(4, 500, p, rng) for p in (0.3, 0.3, 0.5, 0.5)]
    assert convergence.compare(drift[:2], drift[2:])[0] < -4


@cache
def sides():
    chosen = peptide("dipeptide")
    return np.stack([chosen.build(-60.0, -40.0)[1], chosen.build(55.0, 45.0)[1]])


def at_torsions(states):
    """The dipeptide with phi < 0 (0) or phi > 0 (1)."""
    return sides()[np.asarray(states, dtype=int)]


def test_a_walker_is_examined_as_a_whole():
    """Numbers of `examine` are those of `pooled` and `compare` on its walkers, whatever their sizes."""
    rng = np.random.default_rng(0)
    sizes = ((3, 30), (2, 20), (2, 16))
    states = [exchanging(rungs, n, p, rng, memory=5) for (rungs, n), p in zip(sizes, (0.3, 0.6, 0.4), strict=True)]
    walkers = [[at_torsions(rung[:, 0]) for rung in w] for w in states]
    walkers[1][0] = np.concatenate([walkers[1][0], walkers[1][0][: dynamics.BLOCK]])  # `md` is writing the next block
    facts = convergence.examine(walkers, peptide("dipeptide"))
    assert (facts["n_walkers"], facts["n_trajectories"], facts["ns"]) == (3, 7, 162 * 0.02)
    share, variance = convergence.pooled(states)
    found = facts["basins"]["phi > 0"]
    assert found["share"] == pytest.approx(share[0])
    assert found["error"] == pytest.approx(np.sqrt(variance[0]))
    first, second = zip(*(np.split(w, 2, axis=1) for w in states), strict=True)
    assert found["z_halves"] == pytest.approx(convergence.compare(list(first), list(second))[0])
    # The first and the second walker are farthest apart, which neither the last pair nor neighbours alone would show.
    pairs = [abs(convergence.compare([states[i]], [states[j]])[0]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert found["z_walkers"] == pytest.approx(max(pairs))
    assert max(pairs) == pairs[0] > 3
    assert f"populations differ by {max(pairs):.1f}" in facts["verdict"]
    single = convergence.examine(walkers[:1], peptide("dipeptide"))["basins"]["phi > 0"]
    assert single["z_walkers"] is None


def test_replicas_that_change_places_have_not_crossed():
    rng, n_blocks = np.random.default_rng(0), 30
    states = np.repeat([[0], [1], [0], [1]], n_blocks * dynamics.BLOCK, axis=1)
    states[0, 5 * dynamics.BLOCK + 7 :] = 1  # within a block
    states[0, 9 * dynamics.BLOCK :] = 0  # between blocks, where it cannot be told from a change of places
    states[1, 3 * dynamics.BLOCK + 1] = 0  # there and back
    files = shuffled(states, rng)
    along = sum(int((np.diff(rung) != 0).sum()) for rung in files)
    assert convergence.examine([list(at_torsions(files))], peptide("dipeptide"))["crossings"] == 3
    assert along > 40  # what counting along the files would say


def test_a_basin_that_was_never_entered_is_not_converged():
    """Both halves agree that it is empty; only the count of crossings shows it."""
    empty = np.zeros((2, 1000, 1))
    z = convergence.compare([empty[:, :500]], [empty[:, 500:]])
    assert z == 0
    known = (np.array([0.05, 0.65]), np.array([0.003, 0.01]))
    assert "phi was seen to change its sign 2 times, and should 200 times" in convergence.verdict(2, z, *known)
    assert convergence.verdict(500, z, *known) == "converged"
    assert "differ by 4.0 standard errors" in convergence.verdict(500, np.array([0.1, -4.0]), *known)
    vague = np.array([0.05, 0.65]), np.array([0.03, 0.01])
    assert "phi > 0 is 0.050 +- 0.030" in convergence.verdict(500, z, *vague)


def test_basins_are_where_they_should_be():
    chosen = peptide("dipeptide")
    places = {"phi > 0": (55, 45), "beta": (-150, 150), "alpha": (-60, -40)}
    names = [b.name for b in convergence.BASINS]
    for name, angles in places.items():
        inside = convergence.basins(chosen.build(*angles)[1][None], chosen)[0]
        assert inside[names.index(name)] == 1
        assert inside.sum() == 1
    assert convergence.basins(chosen.build(170, 150)[1][None], chosen)[0, names.index("beta")] == 1


def test_only_crossings_from_core_to_core_count():
    degrees = [-80, -10, 10, -5, -90, 20, 60, 10, 55, -60, 170, 60]
    assert convergence.transitions(np.radians(degrees)) == 3


def test_hot_and_cold_are_the_papers():
    assert {p.name: (p.hot, p.cold) for p in PEPTIDES.values()} == {
        "dipeptide": (800, 300), "tetrapeptide": (800, 500), "hexapeptide": (800, 600)
    }  # fmt: skip


def test_check_writes_what_it_prints(tmp_path, capsys):
    chosen, rng = peptide("dipeptide"), np.random.default_rng(0)
    shapes = np.stack([chosen.build(*torsions)[1] for torsions in ((-60.0, -40.0), (-150.0, 150.0), (55.0, 45.0))])
    files = {  # by walker: two rungs each at 300 K, and one of them has been hot
        0: {300.0: [rng.choice(2, 200, p=(p, 1 - p)) for p in (0.3, 0.4)], 800.0: [rng.choice(3, 200)]},
        1: {300.0: [rng.choice(2, 200, p=(p, 1 - p)) for p in (0.6, 0.5)]},
    }
    for walker, temperatures in files.items():
        folder = tmp_path / "dipeptide" / f"walker-{walker}"
        folder.mkdir(parents=True)
        with (folder / "topology.pdb").open("w") as file:
            app.PDBFile.writeFile(chosen.topology, 10 * shapes[0], file)
        for temperature, rungs in temperatures.items():
            for rung, states in enumerate(rungs):
                path = folder / f"{rung}-{temperature:g}K.dcd"
                trajectory.append(path, shapes[states].astype(np.float32), dynamics.INTERVAL)
    assert shell.main(["check", "--data", str(tmp_path), "--equilibration", "0"]) == 0
    printed = capsys.readouterr().out
    cold, hot = json.loads((tmp_path / "dipeptide" / "check.json").read_text())
    assert (cold["temperature"], cold["n_walkers"], cold["n_trajectories"], cold["ns"]) == (300, 2, 4, 0.8)
    alpha = [(np.stack(files[walker][300.0]) == 0)[..., None] for walker in (0, 1)]
    assert cold["basins"]["alpha"]["share"] == pytest.approx(np.mean(alpha))
    z = abs(convergence.compare(alpha[:1], alpha[1:])[0])
    assert cold["basins"]["alpha"]["z_walkers"] == pytest.approx(z)
    assert z > 3
    assert cold["crossings"] == 0
    assert "phi was seen to change its sign 0 times" in cold["verdict"]
    positive = (files[0][800.0][0] == 2).reshape(-1, dynamics.BLOCK)
    assert hot["crossings"] == (np.diff(positive, axis=1) != 0).sum() > 50
    assert (hot["n_walkers"], hot["basins"]["alpha"]["z_walkers"]) == (1, None)
    assert "4 trajectories of 2 walkers, 0.8 ns" in printed
    assert printed.count("walkers |z| <= ") == len(convergence.BASINS)
    assert f"walkers |z| <= {z:.1f}" in printed
    for facts in (cold, hot):
        assert facts["verdict"] in printed
        assert f"changes of sign of phi, within blocks: {facts['crossings']}" in printed
        assert f"alpha    {facts['basins']['alpha']['share']:.4f} +- " in printed


def test_a_missing_package_is_named_with_what_to_install():
    command = (
        "import sys; sys.modules['openmm'] = None; from studies.molecules.__main__ import main; sys.exit(main(['md']))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    said = "molecules: openmm is missing: pip install -e 'studies[molecules]'\n"
    assert (done.returncode, done.stderr) == (2, said)
