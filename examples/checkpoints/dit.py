"""A class of a DiT with debiased guidance: p(x)^(1 - w) p(x | class)^w, and not what usual guidance draws."""

from stand_ins import dit

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_diffusers(dit(), 207)
    target = cd.guided(p, p.given(None), scale=1.5)
    chain = cd.ReplicaExchange(target, p.ladder(4, substeps=2), fit_samples=16, micro_batch=32)
    out = chain.sample(n_draws)
    print(out.verdict())
    p.images(out.x[-1:])[0].save("dit.png")


if __name__ == "__main__":
    main()
