"""The parameter shapes of models that people train, without the models."""

Shapes = dict[str, tuple[int, ...]]


def bert(layers: int, width: int, *, vocabulary: int = 30522) -> Shapes:
    """BERT's encoder and embeddings: 5 + 16 leaves a layer."""
    shapes: Shapes = {
        "embed/word": (vocabulary, width),
        "embed/position": (512, width),
        "embed/type": (2, width),
        "embed/norm/scale": (width,),
        "embed/norm/bias": (width,),
    }
    for i in range(layers):
        for name in ("query", "key", "value", "out"):
            shapes[f"{i}/{name}/kernel"] = (width, width)
            shapes[f"{i}/{name}/bias"] = (width,)
        shapes[f"{i}/up/kernel"] = (width, 4 * width)
        shapes[f"{i}/up/bias"] = (4 * width,)
        shapes[f"{i}/down/kernel"] = (4 * width, width)
        shapes[f"{i}/down/bias"] = (width,)
        for norm in ("attention", "output"):
            shapes[f"{i}/{norm}/scale"] = (width,)
            shapes[f"{i}/{norm}/bias"] = (width,)
    return shapes


def resnet110() -> Shapes:
    """ResNet-110 for CIFAR-10: three stages of 18 blocks of two convolutions."""
    shapes: Shapes = {"stem": (3, 3, 3, 16), "stem/scale": (16,), "stem/bias": (16,)}
    channels = 16
    for stage, out in enumerate((16, 32, 64)):
        for block in range(18):
            for conv in range(2):
                name = f"{stage}/{block}/{conv}"
                shapes[name] = (3, 3, channels, out)
                shapes[f"{name}/scale"] = shapes[f"{name}/bias"] = (out,)
                channels = out
    return shapes | {"head": (64, 10), "head/bias": (10,)}


MODELS = {
    "resnet-110": resnet110(),
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "bert-xl": bert(24, 3072),  # 2.8 B; the paper does not say how deep or wide
}
