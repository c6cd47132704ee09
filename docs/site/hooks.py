"""What the site needs beyond the pages of docs/: the pages at the top of the project."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

TOP = Path(__file__).parents[2]
PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = "placements|spmd_moe|tests|examples"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the project, as if they lay in docs/."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(TOP / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between docs/ and the top; maps of the code have no page here."""
    if "/" not in page.file.src_uri:
        markdown = re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)*(?:{FOLDERS})/[^)]*\)", r"`\1`", markdown)
