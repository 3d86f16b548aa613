"""A step of any model."""

import jax
import optax


def step_of(loss, params, batch, rate=1e-3):
    optimizer = optax.adamw(rate)

    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.jit(optimizer.init)(params), batch)
