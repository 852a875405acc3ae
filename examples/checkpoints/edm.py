"""EDM or EDM2: a class against an unconditional network, a checkpoint of its own (autoguidance works alike)."""

from stand_ins import edm

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_edm(edm(), label=7)
    q = cd.models.from_edm(edm(label_dim=0))
    chain = cd.ReplicaExchange(cd.guided(p, q, scale=1.4), p.ladder(4, substeps=2), fit_samples=16)
    out = chain.sample(n_draws)
    print(out.verdict())
    p.images(out.x[-1:])[0].save("edm.png")


if __name__ == "__main__":
    main()
