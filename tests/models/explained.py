"""Why the models that are refused are refused; docs/models.md shows it."""

_HITS = (
    "the loop over experts asks which of them any token chose: the count over a cut batch is "
    "Partial, and whether it is above zero cannot be told from one summand"
)
_ALL_REAL = (
    "asks whether all (or any) tokens of the batch are real; a rank holds a piece of the batch, "
    "and ranks that answer differently would take different branches"
)
_WEIGHT_NORM = (
    "torch's _weight_norm has no row: with odd arguments it writes beyond its memory, so the law "
    "of call forms cannot judge it"
)
_OTHER_BATCH = (
    "views the encoder's rows by a batch size that was read from the decoder's rows, of which "
    "nothing says that they are cut alike"
)

EXPLAINED: dict[str, str] = {
    "dbrx": _HITS,
    "switch_transformers": _HITS,
    "minimax": (
        "chooses with min between a plain number and the length of rows that are Varying after "
        "the experts"
    ),
    "deberta": "uses a tensor as the end of a slice, which may differ by rank",
    "longformer": _ALL_REAL,
    "convbert": _ALL_REAL,
    "prophetnet": _OTHER_BATCH,
    "whisper": _OTHER_BATCH,
    "resnet": "batch norm in training takes the statistics of the whole batch, rightly refused",
    "clip": "its logits compare every text with every image of the batch, rightly refused",
    "wav2vec2": _WEIGHT_NORM,
    "hubert": _WEIGHT_NORM,
    "wavlm": _WEIGHT_NORM,
}
