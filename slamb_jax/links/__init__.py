"""The links of optax chains, of which every optimizer is made."""
