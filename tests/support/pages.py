"""What the pages for users print."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language="python"):
    """Return the blocks of code in a language on a page, in its order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
