"""A pixel diffusion tilted towards bright images by a black-box reward, with draws as pictures and a verdict."""

from stand_ins import ddpm

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_diffusers(ddpm())
    target = p.tilt(lambda images: 5 * images.mean((1, 2, 3)), decode=p.decode)
    smc = cd.SMC(target, p.ladder(4, substeps=2), n_particles=n_draws, n_batches=2, fit_samples=16, micro_batch=64)
    out = smc.sample()
    print(out.mean(lambda x: p.decode(x).mean((1, 2, 3))), out.verdict())
    p.images(out.x[:1])[0].resize((64, 64)).save("ddpm.png")


if __name__ == "__main__":
    main()
