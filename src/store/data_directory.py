"""Where state that outlives a process is kept."""

import os
from pathlib import Path


def data_directory(chosen: Path | None) -> Path:
    """Return the directory for state: `chosen`, else a place in the user's own."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return chosen or Path(state) / "regrow"
