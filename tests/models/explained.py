"""Why the models that do not pass do not pass; docs/models.md shows it."""

EXPLAINED: dict[str, str] = {
    "dbrx": (
        "its mask of experts has a row more than there are experts, and an index of the rows "
        "of the mask reads the weights of the experts: it counts other rows than it addresses"
    ),
    "longformer": (
        "takes tensors for sizes of views (torch.div of two numbers) and looks at overlapping "
        "windows with as_strided, which no row knows: it re-reads memory behind every dim"
    ),
    "prophetnet": (
        "gathers from rows that are sorted by sample with an index that is sorted by n-gram; "
        "this is right only because all samples have the same positions, which no type says"
    ),
    "resnet": "batch norm in training takes the statistics of the whole batch, rightly refused",
    "clip": (
        "its logits compare every text with every image of the batch: rightly refused for "
        "pieces, and with Varying inputs each rank compares its own alone"
    ),
}
