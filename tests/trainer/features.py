"""What a trainer does, as data: the rows and columns of docs/trainer_features.md."""

from dataclasses import dataclass, replace

import torch

from spmd_moe import MoE, Parallel
from spmd_moe.training.language_model import TransformerBlock
from tests.trainer.loop import Options, Setting

ONE_DEVICE = "one device"
# With ep and sequence parallelism nothing is simple: experts are on another mesh than the
# rest, sequences are cut unevenly, and the gate's gradient is summed over tp.
COLUMNS: dict[str, Setting] = {
    ONE_DEVICE: Setting(),
    "2 ranks": Setting(Parallel(tp=2, ep=2, sequence_parallel=True)),
    "4 ranks": Setting(Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)),
    "FSDP2": Setting(Parallel(dp=2, tp=2, ep=2, sequence_parallel=True), fsdp=True),
}


@dataclass(frozen=True)
class Feature:
    """A row: what the trainer does, and what the same training is without it."""

    name: str
    options: Options
    plain: Options

    @property
    def needs_processes(self) -> bool:
        """Whether torch wants gloo itself, and not the simulator."""
        return self.options.resumed == "dcp async"

    def __str__(self) -> str:
        return self.name


def _row(name: str, options: Options, **plain: object) -> Feature:
    """Compare with one device that is never checked and changes `plain` alone."""
    return Feature(name, options, replace(Options(checking="never"), **plain))  # type: ignore[arg-type]


def _same(name: str, options: Options) -> Feature:
    """Compare with one device that does the same, never checked."""
    return Feature(name, options, replace(options, checking="never", step_inside=False))


_AROUND = {"the layer": MoE, "a block": TransformerBlock}
_CHECKPOINTING = ("reentrant", "not reentrant", "selective")

FEATURES: tuple[Feature, ...] = (
    _row("types checked at the first step", Options()),
    _row("types checked at every step", Options(checking="typecheck")),
    _row("types and values checked (`verify`)", Options(checking="verify")),
    _row("never checked", Options(checking="never")),
    _same("bfloat16 parameters", Options(dtype=torch.bfloat16, steps=1)),
    _same("autocast to bfloat16", Options(dtype=torch.float32, autocast=True, steps=1)),
    *(
        _row(
            f"checkpointing of {what}, {kind}",
            Options(checkpointing=kind, around=around),
        )
        for kind in _CHECKPOINTING
        for what, around in _AROUND.items()
    ),
    _row("two microbatches, gradients accumulated", Options(microbatches=2)),
    _same("router frozen", Options(frozen="router")),
    _same("experts frozen", Options(frozen="moe.experts")),
    _row("`zero_grad(set_to_none=False)`", Options(set_to_none=False)),
    *(
        _same(f"{name}, step checked", Options(optimizer=name, step_inside=True))
        for name in ("SGD", "SGD foreach", "SGD fused")
    ),
    *(
        _same(f"{name}, step checked", Options(optimizer=name, step_inside=True))
        for name in ("AdamW", "AdamW foreach", "AdamW fused")
    ),
    _same("`placements.clip_grad_norm_`", Options(clip="placements")),
    _same(
        "`torch.nn.utils.clip_grad_norm_`, checked", Options(clip="torch", step_inside=True)
    ),
    _same("auxiliary losses", Options(auxiliary=True)),
    _row(
        "auxiliary losses, blocks checkpointed",
        Options(auxiliary=True, checkpointing="not reentrant", around=TransformerBlock),
        auxiliary=True,
    ),
    _row("`copy.deepcopy` of the model", Options(copied="deepcopy")),
    _row("`pickle` of the model", Options(copied="pickle")),
    _row("`torch.func.functional_call`", Options(functional=True)),
    _row("`torch.func.grad`", Options(transformed=True, checking="never")),
    _row("`torch.func.grad`, checked", Options(transformed=True)),
    _row("made on the meta device", Options(meta=True)),
    *(
        _row(
            f"saved and resumed after the first step, {how}",
            Options(resumed=way, optimizer="AdamW"),
            optimizer="AdamW",
        )
        for way, how in (("dcp", "`dcp.save`"), ("dcp async", "`dcp.async_save`"))
    ),
    _row("layers compiled (`fullgraph=True`)", Options(compiled=True, checking="never")),
)
