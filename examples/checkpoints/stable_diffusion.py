"""Stable Diffusion or SDXL: two prompts at once, with a CLIP score of the decoded picture as a reward."""

from stand_ins import clip, stable_diffusion

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_diffusers(stable_diffusion(), "a red cat")
    both = p**0.5 * p.given("a dog") ** 0.5
    score = cd.rewards.ClipScore("a red dog", *clip())
    target = both.tilt(score, scale=0.1, decode=p.decode, batch_size=4)
    chain = cd.ReplicaExchange(target, p.ladder(4, substeps=2), fit_samples=16, micro_batch=32)
    out = chain.sample(n_draws)
    print(chain.evaluate.rewards, out.verdict(), sep="\n")
    p.images(out.x[-1:])[0].save("stable_diffusion.png")


if __name__ == "__main__":
    main()
