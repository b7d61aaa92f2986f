"""From the name of a model to the directory that holds it, fetched and converted where that is needed."""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from regrow.errors import ModelRefused
from regrow.models import demo
from regrow.models.gguf import convert_gguf, converted_path
from regrow.models.identity import file_digest
from regrow.models.progress import Progress
from regrow.models.refusal import refusing

DEMO = "demo"
FORMS = "demo, random:FAMILY[:SIZE], a directory with safetensors, a .gguf file, or org/name of the hub"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def locate(name: str, model_dir: Path, progress: Progress) -> tuple[Path, str]:
    """Return the directory of a model, and the name it is served under.

    Raises ModelRefused where there is no such model, it cannot be fetched, or its file is damaged.
    """
    if name == DEMO:
        target = converted_path(demo.demo_path(model_dir), model_dir, demo.SHA256)
        if not target.exists():
            convert_gguf(demo.fetch_demo(model_dir, progress), model_dir, progress, demo.SHA256)
        return target, DEMO
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path, path.resolve().name
    if path.suffix == ".gguf" and path.is_file():
        return convert_gguf(path, model_dir, progress), path.stem
    _check_hub_id(name)
    return _from_hub(name, progress), name


def present(name: str, model_dir: Path) -> Path | None:
    """Return the directory of a model, or None where it must be fetched or converted first.

    Raises ModelRefused where there is no such model.
    """
    path = Path(name).expanduser()
    if name == DEMO:
        path = converted_path(demo.demo_path(model_dir), model_dir, demo.SHA256)
    elif path.suffix == ".gguf" and path.is_file():
        path = converted_path(path, model_dir, file_digest(path))
    elif not path.is_dir() or not name:
        _check_hub_id(name)
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    return path if path.is_dir() else None


def _check_hub_id(name: str) -> None:
    """Raise ModelRefused for what is neither here nor may be a model of the hub."""
    path = Path(name).expanduser()
    if name and path.exists():
        raise ModelRefused(f"{path} is a file, but not a .gguf file; models are {FORMS}")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelRefused(f"there is no model {name!r}; models are {FORMS}")


def _from_hub(name: str, progress: Progress) -> Path:
    progress(f"fetching {name} from the hub", None)
    disable_progress_bars()
    with refusing(f"{name} is no local directory and could not be fetched from the hub"):
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["original/*", "*.bin.*"])
        )
