"""`python -m placements demo | rules`."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

WIDTH = 100  # where there is no terminal to ask


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m placements", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="a tensor-parallel MLP, right and wrong")
    rules = commands.add_parser("rules", help="every rule, grouped, with its reason")
    rules.add_argument("--markdown", action="store_true", help="the text of docs/rules.md")
    chosen = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if chosen.command == "demo":
        from placements import demo

        return demo.run(console)
    from placements import rulebook

    if chosen.markdown:
        sys.stdout.write(rulebook.markdown())
        return 0
    for page in rulebook.pages():
        table = Table(*page.head, title=page.title, caption=page.about, show_lines=True)
        for row in page.rows:
            table.add_row(*row)
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
