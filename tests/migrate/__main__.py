"""`python -m tests.migrate`: write the pages of the migration guide, docs/migrate."""

import sys

from tests.migrate.page import page
from tests.migrate.patterns import ROOT, pattern, written


def main() -> int:
    for name in written():
        (ROOT / "docs" / "migrate" / f"{name}.md").write_text(page(pattern(name)))
        print(name, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
