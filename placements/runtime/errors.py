"""The one exception about placements, its fields, and its one format."""

from collections.abc import Sequence

from jaxtyping import AnnotationError

from placements.inference.fixes import Fix


class PlacementError(AnnotationError, ValueError):
    """A tensor is not what its use demands across ranks.

    jaxtyping passes subclasses of its AnnotationError through unchanged. It is no
    TypeError, because Python's operators (`p + r`) swallow those.
    """

    def __init__(
        self,
        headline: str,
        *,
        where: str = "",
        name: str = "",
        axis: str | None = None,
        expected: str = "",
        actual: str = "",
        rule: str = "",
        operands: Sequence[str] = (),
        fixes: Sequence[Fix] = (),
        advice: str = "",
    ) -> None:
        self.headline = headline
        self.where = where
        self.name = name
        self.axis = axis
        self.expected = expected
        self.actual = actual
        self.rule = rule
        self.operands = tuple(operands)
        self.fixes = tuple(fixes)
        self.advice = advice
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.headline]
        if self.rule:
            lines.append(f"  rule      {self.rule}")
        for k, operand in enumerate(self.operands):
            lines.append(f"  {'operands' if k == 0 else '':<9} {operand}")
        for fix in self.fixes:
            lines.append(f"  {'fix':<9} {fix.call}")
            lines.append(f"  {'':<9} forward: {fix.forward}; backward: {fix.backward}")
        if self.advice:
            lines.append(f"  {'fix':<9} {self.advice}")
        return "\n".join(lines)


class UncheckedWarning(UserWarning):
    """A block ended in which placements could not be checked, because there was no mesh.

    `warnings.simplefilter("error", UncheckedWarning)` makes it an error.
    """


def mismatch(
    where: str,
    name: str,
    axis: str | None,
    expected: str,
    actual: str,
    *,
    rule: str = "",
    operands: Sequence[str] = (),
    fixes: Sequence[Fix] = (),
    advice: str = "",
) -> PlacementError:
    """`where: name is actual on axis 'axis', expected expected`, and the rest below."""
    on_axis = f" on axis {axis!r}" if axis else ""
    headline = f"{where}: {name} is {actual}{on_axis}, expected {expected}"
    return PlacementError(
        headline,
        where=where,
        name=name,
        axis=axis,
        expected=expected,
        actual=actual,
        rule=rule,
        operands=operands,
        fixes=fixes,
        advice=advice,
    )
