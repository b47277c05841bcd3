"""The parameter shapes of models that people train, without the models."""

import jax
import jax.numpy as jnp

Shapes = dict[str, tuple[int, ...]]


def abstract(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters in float32 that take no memory."""
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def dense(name: str, fan_in: int, out: int) -> Shapes:
    return {f"{name}/kernel": (fan_in, out), f"{name}/bias": (out,)}


def bert(layers: int, width: int, *, vocabulary: int = 30522) -> Shapes:
    """BERT's encoder and embeddings: 5 + 16 leaves a layer."""
    shapes: Shapes = {
        "embed/word": (vocabulary, width),
        "embed/position": (512, width),
        "embed/type": (2, width),
    }
    shapes |= norm("embed/norm", width)
    for i in range(layers):
        for name in ("query", "key", "value", "out"):
            shapes |= dense(f"{i}/{name}", width, width)
        shapes |= dense(f"{i}/up", width, 4 * width)
        shapes |= dense(f"{i}/down", 4 * width, width)
        shapes |= norm(f"{i}/attention", width) | norm(f"{i}/output", width)
    return shapes


def scanned(shapes: Shapes, layers: int) -> Shapes:
    """The same model with its layers scanned: a stack of each kind of leaf."""
    stacks: Shapes = {}
    for name, shape in shapes.items():
        layer, _, rest = name.partition("/")
        if layer.isdigit():
            stacks[f"layers/{rest}"] = (layers, *shape)
        else:
            stacks[name] = shape
    return stacks


def small_leaves(leaves: int, width: int = 64) -> Shapes:
    """A Transformer's layers that are not scanned: norms, attention, two dense ones."""
    layer = [
        (width,), (width, 3 * width), (width, width), (width,),
        (width,), (width, 4 * width), (4 * width,), (4 * width, width),
    ]  # fmt: skip
    return {f"{i:04}": layer[i % len(layer)] for i in range(leaves)}


def squares(millions: int) -> Shapes:
    """Square leaves, each with its bias: of 1 M elements, in large models of 4 M."""
    side = 2048 if millions >= 128 else 1024  # else there are hundreds to compile
    shapes: Shapes = {}
    for i in range(millions * 1024**2 // side**2):
        shapes |= dense(f"{i}", side, side)
    return shapes


MODELS = {
    "layers": {k: s for i in range(4) for k, s in dense(f"{i}", 1024, 4096).items()},
    **{f"leaves-{n}": small_leaves(n) for n in (20, 200, 400, 2000)},
    **{f"squares-{n}m": squares(n) for n in (1, 4, 16, 64, 128, 300)},
    "bert-tiny": bert(2, 128),
    "bert-tiny-scanned": scanned(bert(2, 128), 2),
    "bert-base": bert(12, 768),
    "bert-base-scanned": scanned(bert(12, 768), 12),
    "bert-large": bert(24, 1024),
    "bert-large-scanned": scanned(bert(24, 1024), 24),
    "bert-xl": bert(24, 3072),  # 2.8 B; the paper does not say how deep or wide
}
