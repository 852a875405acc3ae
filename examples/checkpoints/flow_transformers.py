"""SD3 with debiased guidance, and Flux, which was distilled for one guidance, sharpened by a power."""

from stand_ins import flux, sd3

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_diffusers(sd3(), "a red cat")
    q = cd.models.from_diffusers(flux(), ("a red cat", 3.5))
    for model, target in ((p, cd.guided(p, p.given(""), scale=3.0)), (q, q**1.2)):
        chain = cd.ReplicaExchange(target, model.ladder(4, substeps=2), fit_samples=16, micro_batch=32)
        out = chain.sample(n_draws)
        print(out.verdict())
        model.images(out.x[-1:])[0].save("flow.png")


if __name__ == "__main__":
    main()
