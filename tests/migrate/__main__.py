"""`python -m tests.migrate`: write the pages of the migration guide, docs/migrate."""

import sys

from tests.migrate.page import first_page, page
from tests.migrate.patterns import NAMES, ROOT

GUIDE = ROOT / "docs" / "migrate"


def main() -> int:
    for name in NAMES:
        (GUIDE / f"{name}.md").write_text(page(name))
        print(name, file=sys.stderr, flush=True)
    first = GUIDE / "README.md"
    first.write_text(first_page(first.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
