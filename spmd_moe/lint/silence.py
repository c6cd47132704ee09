"""`# placements: ok (reason)`: comments that silence findings."""

import io
import re
import tokenize

_OK = re.compile(r"#.*?\bplacements:\s*ok\b(?P<reason>\s*\(.*?[^\s()].*?\))?")


def silences(text: str) -> dict[int, bool]:
    """Return the lines with such a comment, and whether it gives a reason."""
    if "placements:" not in text:
        return {}
    found: dict[int, bool] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (said := _OK.search(token.string)):
                found[token.start[0]] = said["reason"] is not None
    except (tokenize.TokenError, SyntaxError):  # the file was parsed, so the end is odd
        pass
    return found
