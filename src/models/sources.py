"""From the name of a model to the directory that holds it, fetched and converted where that is needed."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from regrow.errors import ModelRefused
from regrow.models import demo
from regrow.models.gguf import convert_gguf, converted_path
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
    if name and path.exists():
        raise ModelRefused(f"{path} is a file, but not a .gguf file; models are {FORMS}")
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(name):
        return _from_hub(name, progress), name
    raise ModelRefused(f"there is no model {name!r}; models are {FORMS}")


def _from_hub(name: str, progress: Progress) -> Path:
    progress(f"fetching {name} from the hub", None)
    disable_progress_bars()
    with refusing(f"{name} is no local directory and could not be fetched from the hub"):
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["original/*", "*.bin.*"])
        )
