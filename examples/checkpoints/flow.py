"""A velocity field of flow matching, cooled: p^2 from a flow that was trained on p."""

from stand_ins import velocity

import crepe_diffusion as cd


def main(n_draws: int = 50) -> None:
    p = cd.models.from_velocity(velocity(), event_shape=(2,), noise_at=0)
    chain = cd.ReplicaExchange(p**2.0, p.ladder(4, substeps=4), n_chains=4, fit_samples=64)
    out = chain.sample(n_draws)
    print(out.mean(lambda x: x[:, 0]), out.verdict())


if __name__ == "__main__":
    main()
